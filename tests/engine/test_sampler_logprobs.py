"""Log-probabilities: of the raw logits, ranked, never NaN."""

from __future__ import annotations

import math

import pytest
import torch

from punica_core.engine.sampler import Sampler
from tests.support.sampling import sampling_row

VOCAB_SIZE = 300


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(VOCAB_SIZE, [0], seed=0)


def some_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3


def test_only_rows_that_ask_get_logprobs(sampler: Sampler) -> None:
    rows = [sampling_row(0), sampling_row(1, logprobs=0), sampling_row(2, logprobs=3), sampling_row(3, logprobs=1)]
    found = [token.logprobs for token in sampler.sample(some_logits(4), rows)]
    assert [entry and len(entry.top) for entry in found] == [None, 0, 3, 1]


def test_logprobs_are_the_log_softmax_of_the_raw_logits(sampler: Sampler) -> None:
    logits = some_logits(20)
    settings = {"temperature": 0.3, "top_k": 5, "repetition_penalty": 1.5, "logit_bias": {7: 5.0}, "logprobs": 4}
    rows = [sampling_row(i, seed=i, prompt=range(100), **settings) for i in range(20)]
    expected = logits.double().log_softmax(dim=-1)
    for b, token in enumerate(sampler.sample(logits, rows)):
        assert token.logprobs is not None
        assert token.logprobs.token_id == token.token_id
        assert token.logprobs.logprob == pytest.approx(float(expected[b, token.token_id]), abs=1e-5)
        values, ids = expected[b].topk(4)
        assert [entry[0] for entry in token.logprobs.top] == ids.tolist()
        assert [entry[1] for entry in token.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_a_greedy_token_has_exactly_the_top_value(sampler: Sampler) -> None:
    for token in sampler.sample(some_logits(50), [sampling_row(i, logprobs=1) for i in range(50)]):
        assert token.logprobs is not None
        assert token.logprobs.top == [(token.token_id, token.logprobs.logprob)]


def test_ties_in_the_top_list_are_ordered_by_id(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [250, 40, 41]] = 3.0
    (entry,) = sampler.prompt_logprobs(logits, [5], top=6)
    assert [token_id for token_id, _ in entry.top] == [40, 41, 250, 0, 1, 2]


def test_minus_infinity_stays_minus_infinity(sampler: Sampler) -> None:
    logits = torch.full((2, VOCAB_SIZE), -torch.inf)
    logits[0, 9] = 1.0
    finite, nothing = sampler.prompt_logprobs(logits, [4, 4], top=2)
    assert finite.logprob == -math.inf
    assert finite.top == [(9, 0.0), (0, -math.inf)]
    assert [nothing.logprob, *(value for _, value in nothing.top)] == [-math.inf] * 3


def test_large_logits_lose_no_precision(sampler: Sampler) -> None:
    logits = some_logits(1)
    (near,) = sampler.prompt_logprobs(logits, [5], top=0)
    (far,) = sampler.prompt_logprobs(logits * 0 + logits.round() + 2.0**20, [5], top=0)
    assert near.logprob == pytest.approx(float(logits.double().log_softmax(-1)[0, 5]), abs=1e-5)
    assert far.logprob == pytest.approx(float(logits.round().double().log_softmax(-1)[0, 5]), abs=1e-5)


@pytest.mark.parametrize("count", [0, 1, 64, 65, 200])
def test_prompt_logprobs_of_many_rows_equal_those_of_each(sampler: Sampler, count: int) -> None:
    logits = some_logits(count)
    ids = [(7 * i) % VOCAB_SIZE for i in range(count)]
    together = sampler.prompt_logprobs(logits, ids, top=2)
    assert together == [sampler.prompt_logprobs(logits[i : i + 1], ids[i : i + 1], top=2)[0] for i in range(count)]


def test_more_alternatives_than_tokens_are_cut(sampler: Sampler) -> None:
    (entry,) = sampler.prompt_logprobs(some_logits(1), [5], top=VOCAB_SIZE + 10)
    assert len(entry.top) == VOCAB_SIZE
