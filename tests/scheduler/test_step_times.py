"""What is learned of the time that steps take."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from punica_core.scheduler import step_times
from punica_core.scheduler.plan import StepWork
from punica_core.scheduler.step_times import StepTimes


def seconds_of(work: StepWork, factor: float = 1.0) -> float:
    """A device: what an 8B model takes on a large GPU, roughly."""
    rows = work.decode_rows + work.prompt_rows
    return factor * (4.7e-3 + 18e-6 * rows + 1.7e-9 * work.attended)


def random_work(rng: random.Random, share_with_prompts: float = 0.3) -> StepWork:
    work = StepWork(rng.randint(1, 128))
    if rng.random() >= share_with_prompts:
        return work
    return work.with_prompt(rng.choice([0, 0, 0, 8000]), rng.choice([64, 128, 256, 512, 1024]))


def learned(steps: int, *, factor: float = 1.0, noise: float = 0.0) -> StepTimes:
    """Times learned from random steps."""
    rng, times = random.Random(0), StepTimes()
    for _ in range(steps):
        work = random_work(rng)
        times.observe(work, seconds_of(work, factor) * rng.lognormvariate(0.0, noise))
    return times


def worst_error(stalls: float) -> float:
    """Of the estimate for a large step, as a factor, while a share of all steps takes half a second."""
    rng, times, worst = random.Random(1), learned(500), 0.0
    for _ in range(500):
        work = random_work(rng)
        times.observe(work, 0.5 if rng.random() < stalls else seconds_of(work))
        worst = max(worst, times.expected(WORKS[2]) / seconds_of(WORKS[2]))
    return worst


WORKS = [StepWork(8), StepWork(128), StepWork(64).with_prompt(0, 1024), StepWork(16).with_prompt(8000, 512)]


def test_nothing_is_known_before_the_first_step() -> None:
    assert math.isinf(StepTimes().at_most(StepWork(8)))
    assert math.isinf(StepTimes().expected(StepWork(8)))


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_times_are_learned_with_some_caution(work: StepWork, noise: float) -> None:
    times = learned(500, noise=noise)
    assert 0.9 <= times.expected(work) / seconds_of(work) < 1.1
    assert 1.0 <= times.at_most(work) / seconds_of(work) < 1.4


@pytest.mark.parametrize("work", WORKS)
def test_caution_is_the_standard_deviation_of_the_estimate(work: StepWork) -> None:
    times = learned(40, noise=0.2)
    features, covariance = np.array(times._features(work)), np.array(times._covariance)
    assert np.allclose(covariance, covariance.T)
    assert times.at_most(work) == pytest.approx(times.expected(work) + float(features @ covariance @ features) ** 0.5)


@pytest.mark.parametrize("work", WORKS)
def test_nothing_depends_on_how_fast_the_device_is(work: StepWork) -> None:
    slow = learned(300, factor=1000.0).at_most(work)
    assert slow == pytest.approx(1000.0 * learned(300).at_most(work), rel=1e-6)


def test_stalls_of_the_host_are_not_taken_for_the_cost_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst_error(stalls=0.02) < 1.5
    monkeypatch.setattr(step_times, "_OUTLIER", 1e9)  # believes every step
    assert worst_error(stalls=0.02) > 3


def test_what_prompts_cost_is_remembered_while_there_are_none() -> None:
    times = learned(300)
    before = times.at_most(WORKS[2])
    for _ in range(20_000):
        times.observe(StepWork(64), seconds_of(StepWork(64)))
    assert before <= times.at_most(WORKS[2]) < 2 * before
    times.observe(WORKS[2], seconds_of(WORKS[2]))
    assert times.at_most(WORKS[2]) < 1.2 * seconds_of(WORKS[2]), "one step makes it certain again"


def test_a_prompt_is_not_free_before_one_was_seen() -> None:
    times = StepTimes()
    for _ in range(100):
        times.observe(StepWork(64), 0.006)
    assert times.at_most(WORKS[2]) > 0.012


def test_a_device_that_becomes_slower_is_noticed() -> None:
    times = learned(1000)
    for _ in range(20):
        for work in WORKS:
            times.observe(work, seconds_of(work, 3.0))
    assert all(1.0 <= times.at_most(work) / seconds_of(work, 3.0) < 1.5 for work in WORKS)


def test_whatever_is_measured_the_estimate_stays_one() -> None:
    """No number overflows, none becomes negative, and certainty stays a covariance."""
    rng, times = random.Random(2), StepTimes()
    for _ in range(5000):
        times.observe(random_work(rng), rng.choice([1e-5, 5e-3, 5e-3, 1.0, 100.0]))
        assert all(0 <= value < 1e6 for value in times._mean)
    covariance = np.array(times._covariance)
    assert np.allclose(covariance, covariance.T)
    assert np.linalg.eigvalsh(covariance).min() > 0


def test_measurements_fourteen_powers_of_ten_apart_raise_nothing() -> None:
    rng, times = random.Random(5), StepTimes(2048)
    for _ in range(3000):
        prompt = rng.choice([0, 0, 64, 512, 8192])
        attended = prompt * rng.choice([1, 100, 1000, 131_072, 1_000_000])
        work = StepWork(rng.choice([0, 1, 8, 256, 4096]), prompt, int(prompt > 0), attended)
        times.observe(work, rng.choice([1e-9, 1e-6, 1e-3, 1.0, 100.0, 1e5]))
        assert math.isfinite(times.at_most(work))


def test_one_absurd_first_step_is_forgotten() -> None:
    times = StepTimes()
    times.observe(StepWork(1), 30.0)
    rng = random.Random(1)
    for _ in range(200):
        work = random_work(rng)
        times.observe(work, seconds_of(work))
    assert all(times.at_most(work) < 1.5 * seconds_of(work) for work in WORKS)
