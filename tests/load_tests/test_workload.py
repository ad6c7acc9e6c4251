"""Workloads: popularity, lengths, arrivals, all functions of a seed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from punica_core.bench.workload import Workload, arrival_times, assign_models, request_lengths

MODELS = [f"m{i}" for i in range(8)]


@pytest.mark.parametrize(
    ("popularity", "counts"),
    [
        ("identical", [40]),
        ("distinct", [5] * 8),
        ("uniform", [6, 6, 6, 6, 6, 5, 5]),
        ("skewed", [11, 10, 7, 5, 3, 2, 1, 1]),
    ],
)
def test_popularity_decides_how_many_requests_each_model_gets(popularity: str, counts: list[int]) -> None:
    found = Counter(assign_models(popularity, MODELS, 40))
    assert sum(found.values()) == 40
    assert [found[model] for model in MODELS if found[model]] == counts


def test_requests_of_different_models_are_mixed_and_the_same_each_time() -> None:
    once = assign_models("uniform", MODELS, 40)
    assert once == assign_models("uniform", MODELS, 40)
    assert once != sorted(once)


def test_zipf_prefers_the_first_models() -> None:
    found = Counter(assign_models("zipf:1.2", MODELS, 4000))
    shares = [found[model] / 4000 for model in MODELS]
    expected = np.arange(1, 9) ** -1.2
    assert shares == pytest.approx((expected / expected.sum()).tolist(), abs=0.03)


def test_more_adapters_than_models_wrap_around() -> None:
    assert Counter(assign_models("distinct", MODELS[:3], 7)) == {"m0": 3, "m1": 2, "m2": 2}


def test_log_normal_lengths_are_the_published_ones() -> None:
    lengths = request_lengths("lognormal:90:1.2:150:1.0", 512, seed=0)
    assert sum(prompt for prompt, _ in lengths) == 84_411
    assert sum(output for _, output in lengths) == 95_531


def test_punica_lengths_fit_the_longest_sequence() -> None:
    lengths = request_lengths("punica:512", 2000, seed=1)
    assert min(prompt for prompt, _ in lengths) >= 1
    assert min(output for _, output in lengths) >= 2
    assert max(prompt + output for prompt, output in lengths) <= 512
    assert 15 <= np.median([prompt for prompt, _ in lengths]) <= 19


def test_uniform_lengths_reach_both_bounds() -> None:
    lengths = request_lengths("uniform:3:5:7:8", 500)
    assert {prompt for prompt, _ in lengths} == {3, 4, 5}
    assert {output for _, output in lengths} == {7, 8}


@pytest.mark.parametrize(
    ("arrivals", "cv"), [("poisson", 1.0), ("gamma:3", 3.0), ("gamma:0.5", 0.5), ("constant", 0.0)]
)
def test_gaps_between_arrivals_have_the_rate_and_the_variation(arrivals: str, cv: float) -> None:
    times = np.array(arrival_times(arrivals, rate=4.0, requests=20_000))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.03 + 0.05 * cv)


def test_a_plan_is_a_function_of_its_seed() -> None:
    plan = Workload(models=tuple(MODELS), requests=20, arrivals="poisson", rate=5.0, lengths="uniform:1:9:1:9")
    assert plan.plan() == plan.plan()
    other = Workload(models=tuple(MODELS), requests=20, arrivals="poisson", rate=5.0, lengths="uniform:1:9:1:9", seed=1)
    assert [r.prompt_ids for r in other.plan()] != [r.prompt_ids for r in plan.plan()]
    assert [r.at for r in other.plan()] != [r.at for r in plan.plan()]


def test_a_closed_plan_has_no_times() -> None:
    assert {request.at for request in Workload(models=("a",), requests=5).plan()} == {None}


def test_a_text_prompt_has_as_many_words_as_tokens() -> None:
    plan = Workload(models=("a",), requests=4, lengths="uniform:3:9:1:1", prompts="text").plan()
    assert [len(request.text.split()) for request in plan] == [len(request.prompt_ids) for request in plan]
    assert len({request.text for request in plan}) == 4
    assert {request.text for request in Workload(models=("a",), requests=4).plan()} == {""}


@pytest.mark.parametrize(
    "wrong",
    [
        {"popularity": "fair"},
        {"popularity": "zipf:x"},
        {"lengths": "fixed:5"},
        {"lengths": "fixed:5:-1"},
        {"lengths": "lognormal:90:1:150:1:7"},
        {"arrivals": "sometimes"},
        {"arrivals": "gamma"},
        {"arrivals": "poisson", "rate": 0.0},
        {"models": ()},
        {"prompts": "images"},
    ],
    ids=str,
)
def test_words_without_meaning_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|at least"):
        Workload(**{"models": ("a",), "requests": 3, **wrong}).plan()  # type: ignore[arg-type]
