"""PEFT's own results for each row of a batch, one row at a time, each on a freshly built base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from tests.support.peft_adapters import peft_warnings_ignored, tiny_llama

BaseFactory = Callable[[], Any]


def adapted_model(folder: Path | None, base: BaseFactory = tiny_llama) -> Any:
    """A fresh base, with the adapter in `folder` if one is given."""
    if folder is None:
        return base()
    with peft_warnings_ignored():
        return PeftModel.from_pretrained(base(), folder).eval()


def folder_of(folders: Sequence[Path], lora_index: int) -> Path | None:
    return None if lora_index < 0 else folders[lora_index]


def row_logits(
    folders: Sequence[Path], lora_indices: Sequence[int], rows: Sequence[Tensor], base: BaseFactory = tiny_llama
) -> list[Tensor]:
    """[L, V] logits of each row of token ids [L]."""
    results = []
    for index, row in zip(lora_indices, rows, strict=True):
        model = adapted_model(folder_of(folders, index), base)
        with torch.no_grad(), peft_warnings_ignored():
            results.append(model(row[None].to(model.device)).logits[0])
    return results


def row_generate(
    folders: Sequence[Path], lora_indices: Sequence[int], rows: Sequence[Tensor], **options: Any
) -> list[list[list[int]]]:
    """For each row the token ids of its returned sequences, without the prompt and what follows the stop token."""
    results = []
    for index, row in zip(lora_indices, rows, strict=True):
        model = adapted_model(folder_of(folders, index))
        with peft_warnings_ignored():
            output = model.generate(input_ids=row[None], attention_mask=torch.ones_like(row[None]), **options)
        results.append(answers(output, row.numel()))
    return results


def answers(output: Tensor, prompt_length: int, stop_id: int = 2) -> list[list[int]]:
    """Token ids after the prompt, up to and with the stop token, of each row of what `generate` returned."""
    rows = output[:, prompt_length:].tolist()
    return [row[: row.index(stop_id) + 1] if stop_id in row else row for row in rows]


def left_padded(rows: Sequence[Tensor], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask) of rows of unlike length, padded on the left."""
    width = max(row.numel() for row in rows)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - row.numel() :] = row
        mask[index, width - row.numel() :] = 1
    return ids, mask


def prompts(lengths: Sequence[int], seed: int = 0, vocab_size: int = 512) -> list[Tensor]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths]
