"""Choosing tokens: greedy, the drawn distribution, filters against Hugging Face's, independence of neighbours."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from punica_core.engine.sampler import Sampler
from tests.support.sampling import chi_square_excess, frequencies, sampling_row, token_ids

DRAWS = 3000
VOCAB_SIZES = [1, 2, 37, 128, 300, 2049]


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(vocab_size=4096, eos_token_ids=[0], seed=11)


def peaked_logits(vocab_size: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_greedy_takes_the_largest_logit(sampler: Sampler, vocab_size: int) -> None:
    logits = torch.stack([peaked_logits(vocab_size, seed) for seed in range(20)])
    rows = [sampling_row(i) for i in range(20)]
    assert token_ids(sampler, logits, rows) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 2.0, "top_k": 1}], ids=["greedy", "top_k 1"])
@pytest.mark.parametrize(("first", "second"), [(3, 4), (5, 290), (127, 128), (256, 299)])
def test_the_lowest_id_wins_a_tie(sampler: Sampler, first: int, second: int, sampling: dict[str, float]) -> None:
    logits = torch.zeros(1, 300)
    logits[0, [first, second]] = 7.5
    assert token_ids(sampler, logits, [sampling_row(**sampling)]) == [first]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_minus_infinity_is_never_chosen(sampler: Sampler, sampling: dict[str, float]) -> None:
    logits = torch.full((50, 300), -torch.inf)
    logits[:, 299] = -80.0
    rows = [sampling_row(i, seed=i, **sampling) for i in range(50)]
    assert set(token_ids(sampler, logits, rows)) == {299}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3}])
def test_a_row_without_any_finite_logit_gives_id_0(sampler: Sampler, sampling: dict[str, float]) -> None:
    assert token_ids(sampler, torch.full((1, 300), -torch.inf), [sampling_row(**sampling)]) == [0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy(sampler: Sampler, temperature: float) -> None:
    logits = torch.stack([peaked_logits(300, seed) for seed in range(20)])
    rows = [sampling_row(i, seed=i, temperature=temperature) for i in range(20)]
    assert token_ids(sampler, logits, rows) == logits.argmax(dim=-1).tolist()


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 100},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 4.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.7},
    {"temperature": 4.0, "top_k": 90, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.95, "min_p": 0.1},
    {"temperature": 2.0, "top_p": 0.8, "min_p": 0.2},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "top_k": 10_000},
]


def transformers_probabilities(logits: torch.Tensor, sampling: dict[str, float]) -> torch.Tensor:
    """What `generate` would sample from: its warpers in its order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling["temperature"])])
    if "top_k" in sampling:
        warpers.append(TopKLogitsWarper(int(sampling["top_k"])))
    if "top_p" in sampling:
        warpers.append(TopPLogitsWarper(sampling["top_p"]))
    if "min_p" in sampling:
        warpers.append(MinPLogitsWarper(sampling["min_p"]))
    ids = torch.zeros(1, 1, dtype=torch.int64)
    return warpers(ids, logits.unsqueeze(0).clone()).squeeze(0).double().softmax(dim=-1)


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_draws_have_the_distribution_of_transformers(sampler: Sampler, sampling: dict[str, float]) -> None:
    logits = peaked_logits(300)
    observed = frequencies(sampler, logits, DRAWS, **sampling)
    assert chi_square_excess(observed, transformers_probabilities(logits, sampling)) < 4.0


@pytest.mark.parametrize("wrong", [{"temperature": 1.2}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_the_distribution_test_can_fail(sampler: Sampler, wrong: dict[str, float]) -> None:
    logits = peaked_logits(300)
    observed = frequencies(sampler, logits, DRAWS, temperature=1.0)
    assert chi_square_excess(observed, transformers_probabilities(logits, wrong)) > 6.0


@pytest.mark.parametrize(("sampling", "kept"), [({"top_k": 90}, 90), ({"top_p": 0.5}, 150), ({"top_k": 3}, 3)])
def test_among_equal_logits_the_lowest_ids_stay(sampler: Sampler, sampling: dict[str, float], kept: int) -> None:
    observed = frequencies(sampler, torch.zeros(300), DRAWS, temperature=1.0, **sampling)
    assert int(observed[kept:].sum()) == 0
    assert chi_square_excess(observed[:kept], torch.full((kept,), 1 / kept)) < 4.0


def mixed_rows(count: int) -> list[dict[str, object]]:
    kinds = [*FILTERS, {}, {"temperature": 1.0, "repetition_penalty": 1.3}, {"presence_penalty": 1.0}]
    return [{"request_id": i, "generated": range(i % 5), **kinds[i % len(kinds)]} for i in range(count)]


def test_a_token_does_not_depend_on_neighbours_or_their_order(sampler: Sampler) -> None:
    logits = torch.stack([peaked_logits(2049, seed) for seed in range(51)])
    rows = [sampling_row(**row) for row in mixed_rows(51)]
    together = token_ids(sampler, logits, rows)
    order = torch.randperm(51, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = token_ids(sampler, logits[order], [rows[b] for b in order])
    assert shuffled == [together[b] for b in order]
    assert [token_ids(sampler, logits[b : b + 1], rows[b : b + 1])[0] for b in range(51)] == together


def test_a_seed_decides_the_token_whatever_the_request_or_engine() -> None:
    logits = torch.zeros(40, 2000)
    rows = [sampling_row(i, seed=77, temperature=1.0) for i in range(40)]
    other = [sampling_row(i + 999, seed=77, temperature=1.0) for i in range(40)]
    one = token_ids(Sampler(2000, [], seed=0), logits, rows)
    assert len(set(one)) == 1
    assert token_ids(Sampler(2000, [], seed=1), logits, other) == one


def test_without_a_seed_engine_seed_and_request_decide() -> None:
    logits = torch.zeros(40, 2000)
    rows = [sampling_row(i, temperature=1.0) for i in range(40)]
    one = token_ids(Sampler(2000, [], seed=0), logits, rows)
    assert len(set(one)) > 30
    assert token_ids(Sampler(2000, [], seed=0), logits, rows) == one
    assert token_ids(Sampler(2000, [], seed=1), logits, rows) != one


def test_the_position_is_that_of_the_token_to_come(sampler: Sampler) -> None:
    logits = torch.zeros(1, 2000)
    by_length = [
        token_ids(sampler, logits, [sampling_row(seed=1, temperature=1.0, generated=[9] * n)]) for n in range(8)
    ]
    assert len({ids[0] for ids in by_length}) == 8
    same_length = token_ids(sampler, logits, [sampling_row(seed=1, temperature=1.0, prompt=[4] * 10)])
    assert same_length == by_length[7]


def test_logits_are_left_as_they_were(sampler: Sampler) -> None:
    logits = torch.stack([peaked_logits(300, seed) for seed in range(34)])
    before = logits.clone()
    sampler.sample(logits, [sampling_row(**row) for row in mixed_rows(34)])
    assert torch.equal(logits, before)


def test_no_rows_give_no_tokens(sampler: Sampler) -> None:
    assert sampler.sample(torch.empty(0, 300), []) == []
