"""`generate` of a mixed batch gives each row the tokens that PEFT alone gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import GenerationConfig

from punica_core import BatchLoRA
from tests.lora.conftest import LORA_INDICES
from tests.support.peft_adapters import peft_warnings_ignored, tiny_llama
from tests.support.peft_batch import answers, left_padded, prompts, row_generate

PROMPTS = prompts([4, 9, 7, 2, 9, 5], seed=3)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 7, "pad_token_id": 0}
BEAMS = GREEDY | {"num_beams": 3}


def generate(folders: list[Path], lora_indices: list[int] = LORA_INDICES, **options: Any) -> list[list[list[int]]]:
    """Answers of each prompt's sequences."""
    ids, mask = left_padded(PROMPTS)
    with BatchLoRA(tiny_llama(), folders) as m:
        output = m.generate(input_ids=ids, attention_mask=mask, lora_indices=lora_indices, **options)
    flat = answers(output, ids.size(1))
    copies = len(flat) // len(PROMPTS)
    return [flat[start : start + copies] for start in range(0, len(flat), copies)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(GREEDY | {"use_cache": False}, id="greedy without a cache"),
        pytest.param(BEAMS, id="beams"),
        pytest.param(BEAMS | {"num_return_sequences": 2, "length_penalty": 0.5}, id="some beams returned"),
    ],
)
def test_every_row_gets_pefts_tokens(folders: list[Path], options: dict[str, Any]) -> None:
    got = generate(folders, **options)
    assert got == row_generate(folders, LORA_INDICES, PROMPTS, **options)
    rotated = LORA_INDICES[1:] + LORA_INDICES[:1]
    others = generate(folders, rotated, **options)
    changed = [a != b for a, b in zip(got, others, strict=True)]
    assert all(changed), "the wrong adapter must show in every row"


def test_beams_may_be_asked_for_by_a_generation_config(folders: list[Path]) -> None:
    config = GenerationConfig(**BEAMS)
    assert generate(folders, generation_config=config) == generate(folders, **BEAMS)


def test_beams_may_be_the_models_own_setting(folders: list[Path]) -> None:
    model = tiny_llama()
    model.generation_config.num_beams = 3
    ids, mask = left_padded(PROMPTS)
    with BatchLoRA(model, folders) as m:
        output = m.generate(ids, attention_mask=mask, lora_indices=LORA_INDICES, **GREEDY)
    assert [[row] for row in answers(output, ids.size(1))] == generate(folders, **BEAMS)


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        pytest.param({"temperature": 1.3}, 1, id="one sample"),
        pytest.param({"top_k": 20, "num_return_sequences": 3}, 3, id="several samples"),
        pytest.param({"num_beams": 2}, 1, id="sampled beams"),
    ],
)
def test_sampling_draws_what_pefts_mixed_batch_draws(folders: list[Path], options: dict[str, Any], copies: int) -> None:
    options = {"do_sample": True, "max_new_tokens": 7, "pad_token_id": 0} | options
    ids, mask = left_padded(PROMPTS)
    # PEFT knows no num_return_sequences in a mixed batch: there each copy is a prompt of its own.
    peft_options = options | {"num_return_sequences": 1}
    names = ["__base__" if index < 0 else str(index) for index in LORA_INDICES for _ in range(copies)]
    inputs = {"input_ids": ids.repeat_interleave(copies, 0), "attention_mask": mask.repeat_interleave(copies, 0)}
    with peft_warnings_ignored():
        peft = PeftModel.from_pretrained(tiny_llama(), folders[0], adapter_name="0").eval()
        for index, folder in enumerate(folders[1:], 1):
            peft.load_adapter(folder, str(index))
        torch.manual_seed(5)
        want = peft.generate(**inputs, adapter_names=names, **peft_options)
    with BatchLoRA(tiny_llama(), folders) as m:
        torch.manual_seed(5)
        got = m.generate(ids, attention_mask=mask, lora_indices=LORA_INDICES, **options)
        torch.manual_seed(6)
        other = m.generate(ids, attention_mask=mask, lora_indices=LORA_INDICES, **options)
    assert got.tolist() == want.tolist()
    assert got.tolist() != other.tolist()


def test_prompt_lookup_checks_several_tokens_at_once(folders: list[Path]) -> None:
    ids = PROMPTS[1].repeat(3)[None]
    with BatchLoRA(tiny_llama(), folders) as m:
        plain = m.generate(ids, attention_mask=torch.ones_like(ids), lora_indices=[0], **GREEDY)
        lookup = m.generate(
            ids, attention_mask=torch.ones_like(ids), lora_indices=[0], prompt_lookup_num_tokens=3, **GREEDY
        )
    assert lookup.tolist() == plain.tolist()
