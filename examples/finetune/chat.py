"""Examples as token ids, rendered as the server renders a chat request with one user message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from examples.finetune.data import Example

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of one example; the first `num_prompt` are the prompt, the rest is what the model must say."""

    ids: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as the model takes it: ids and labels are [B, T], mask is [B, prefix + T]."""

    ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor

    def to(self, device: str) -> Batch:
        return Batch(self.ids.to(device), self.labels.to(device), self.mask.to(device))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The ids of a chat request with this one user message, up to where the assistant starts."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> Encoded:
    """The whole dialogue, ended by the end-of-sequence token."""
    prompt = prompt_ids(tokenizer, example.prompt)
    answer = tokenizer.encode(example.answer, add_special_tokens=False)
    return Encoded((*prompt, *answer, tokenizer.eos_token_id), len(prompt))


def shared_prefix(encoded: Sequence[Encoded]) -> list[int]:
    """The longest beginning that all prompts share: the default system message."""
    first = encoded[0]
    length = min(e.num_prompt for e in encoded) - 1
    for other in encoded[1:]:
        while other.ids[:length] != first.ids[:length]:
            length -= 1
    return list(first.ids[:length])


def collate(batch: Sequence[Encoded], prefix_length: int, pad_id: int) -> Batch:
    """Right-padded rows without the shared prefix; labels are `IGNORED` wherever the answer does not stand."""
    length = max(len(e.ids) for e in batch) - prefix_length
    ids = torch.full((len(batch), length), pad_id)
    labels = torch.full_like(ids, IGNORED)
    mask = torch.zeros(len(batch), prefix_length + length, dtype=torch.long)
    for row, e in enumerate(batch):
        size = len(e.ids) - prefix_length
        ids[row, :size] = torch.tensor(e.ids[prefix_length:])
        start = e.num_prompt - prefix_length
        labels[row, start:size] = ids[row, start:size]
        mask[row, : len(e.ids)] = 1
    return Batch(ids, labels, mask)
