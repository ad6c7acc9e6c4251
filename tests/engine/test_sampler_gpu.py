"""Sampling on a GPU gives the CPU's tokens."""

from __future__ import annotations

import pytest
import torch

from punica_core.engine.sampler import Sampler
from tests.engine.test_sampler import mixed_rows, peaked_logits
from tests.support.sampling import sampling_row, token_ids


@pytest.mark.gpu
def test_tokens_do_not_depend_on_the_device() -> None:
    sampler = Sampler(vocab_size=4096, eos_token_ids=[0], seed=11)
    logits = torch.stack([peaked_logits(2049, seed) for seed in range(51)])
    rows = [sampling_row(**row) for row in mixed_rows(51)]
    assert token_ids(sampler, logits.cuda(), rows) == token_ids(sampler, logits, rows)


@pytest.mark.gpu
def test_logprobs_agree_between_devices() -> None:
    sampler = Sampler(vocab_size=4096, eos_token_ids=[0], seed=11)
    logits = torch.stack([peaked_logits(2049, seed) for seed in range(5)])
    here = sampler.prompt_logprobs(logits, [3] * 5, top=4)
    there = sampler.prompt_logprobs(logits.cuda(), [3] * 5, top=4)
    for one, other in zip(here, there, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-5)
