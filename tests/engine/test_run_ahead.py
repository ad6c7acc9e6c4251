"""The engine with a runner that runs ahead: the same outcome as in lock-step, whatever happens on the way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from punica_core.engine.engine import MAX_FAILED_STEPS, Engine
from punica_core.errors import InternalError
from punica_core.lora.cache import AdapterCache
from punica_core.protocol import FinishReason, NewSequence, SequenceOutput
from punica_core.scheduler.scheduler import Scheduler
from tests.support.ahead_runner import AheadRunner, Faults
from tests.support.residency import adapter_ref
from tests.support.scheduling import Rig, expected_tokens, make_rig, new_sequence


class Bench:
    """An engine around a rig, and what its clients have seen."""

    def __init__(self, rig: Rig, faults: Faults | None = None, *, runs_ahead: bool = True) -> None:
        self.rig = rig
        self.runner = AheadRunner(rig.model, faults or Faults(), runs_ahead)
        self.engine = Engine(rig.scheduler, AdapterCache({}, torch.float32, 1), self.runner)
        self.outputs: dict[int, list[SequenceOutput]] = {}

    def submit(self, *requests: NewSequence) -> None:
        self.outputs |= {request.request_id: [] for request in requests}
        self._emit(self.engine.submit(requests, self.rig.now))

    def cancel(self, request_id: int) -> None:
        self._emit(self.engine.cancel([request_id], self.rig.now))

    def step(self) -> bool:
        outputs, executed = self.engine.step(self.rig.now)
        self._emit(outputs)
        self.rig.now += self.rig.step_seconds
        self.rig.residency.advance()
        return executed

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_unfinished():
                self.rig.assert_idle()
                return
            self.step()
        raise AssertionError(f"still unfinished: {self.rig.scheduler.waiting_by_reason}")

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def end(self, request_id: int) -> FinishReason | None:
        *before, last = self.outputs[request_id]
        assert all(output.finish_reason is None for output in before), "something followed the terminal output"
        return last.finish_reason

    def _emit(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self.outputs[output.request_id].append(output)


@pytest.fixture
def bench() -> Bench:
    return Bench(make_rig(max_num_batched_tokens=64))


# One step after the other


def test_a_step_is_launched_before_the_one_before_is_collected(bench: Bench) -> None:
    bench.submit(request := new_sequence(1, max_tokens=3))
    trace = []
    while bench.engine.has_unfinished():
        executed = bench.step()
        trace.append((len(bench.runner.plans), len(bench.tokens(1)), executed))
    assert trace == [(1, 0, True), (2, 1, True), (3, 2, True), (3, 3, True)]
    assert bench.tokens(1) == expected_tokens(request)
    assert bench.engine.stats().steps == 3


def test_a_runner_that_does_not_run_ahead_is_collected_at_once() -> None:
    bench = Bench(make_rig(), runs_ahead=False)
    bench.submit(new_sequence(1, max_tokens=3))
    trace = []
    while bench.engine.has_unfinished():
        bench.step()
        trace.append((len(bench.runner.plans), len(bench.tokens(1))))
    assert trace == [(1, 1), (2, 2), (3, 3)]
    assert not any(row.pending for plan in bench.runner.plans for row in plan.rows)


def test_the_last_step_is_collected_also_when_all_were_cancelled(bench: Bench) -> None:
    bench.submit(new_sequence(1, adapter=adapter_ref("a")))
    bench.step()
    bench.cancel(1)
    assert bench.engine.has_unfinished(), "the step in flight holds blocks and an adapter"
    assert bench.step()
    assert not bench.engine.has_unfinished()
    bench.rig.assert_idle()
    assert bench.end(1) is FinishReason.CANCELLED


def test_a_step_that_does_nothing_says_so() -> None:
    bench = Bench(make_rig(load_steps=3))
    bench.submit(new_sequence(1, adapter=adapter_ref("a"), max_tokens=1))
    assert [bench.step() for _ in range(5)] == [False, False, False, True, True]
    bench.rig.assert_idle()


def test_a_step_takes_from_when_it_could_begin_until_its_result(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched at 0 and 10, ended at 30 and 35: the second could not begin before 30."""
    ticks = iter([0.0, 10.0, 30.0, 35.0])
    monkeypatch.setattr("punica_core.engine.engine.time.perf_counter", lambda: next(ticks))
    bench.submit(new_sequence(1, max_tokens=2))
    seconds = []
    while bench.engine.has_unfinished():
        bench.step()
        seconds.append(bench.engine.stats().last_step_seconds)
    assert seconds == [0.0, 30.0, 5.0]
    assert bench.engine.stats().slowest_step_seconds == 30.0


# Faults


@pytest.mark.parametrize("faults", [Faults(launch={9}), Faults(result={9}), Faults(overflow={9})], ids=repr)
@pytest.mark.parametrize("arrival", [0, 1, 2, 3])
def test_a_row_at_fault_ends_alone_and_the_others_go_on(faults: Faults, arrival: int) -> None:
    bench = Bench(make_rig(max_num_batched_tokens=64), faults)
    healthy = [new_sequence(request_id, max_tokens=6) for request_id in (1, 2)]
    bench.submit(*healthy)
    for _ in range(arrival):
        bench.step()
    bench.submit(new_sequence(9, max_tokens=6))
    bench.run()
    assert bench.end(9) is FinishReason.ERROR
    assert bench.tokens(9) == []
    for request in healthy:
        assert bench.end(request.request_id) is FinishReason.LENGTH
        assert bench.tokens(request.request_id) == expected_tokens(request)


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("kind", ["flaky_launch", "flaky_result"])
def test_a_step_that_fails_once_loses_nothing_and_counts_nothing_twice(kind: str, number: int) -> None:
    bench = Bench(make_rig(max_num_batched_tokens=8), Faults(**{kind: {number}}))
    requests = [new_sequence(1, prompt=3, max_tokens=7), new_sequence(2, prompt=19, max_tokens=5)]
    bench.submit(*requests)
    bench.run()
    for request in requests:
        assert bench.end(request.request_id) is FinishReason.LENGTH
        assert bench.tokens(request.request_id) == expected_tokens(request)
    stats = bench.engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (19 + 3, 4 + 6)
    assert stats.prefix_query_tokens == 19 + 3
    assert bench.runner.num_ahead > 0


def test_a_step_whose_every_sequence_was_cancelled_may_fail(bench: Bench) -> None:
    bench.runner.faults = Faults(result={1, 2})
    bench.submit(new_sequence(1), new_sequence(2))
    bench.step()
    bench.cancel(1)
    bench.cancel(2)
    bench.run()
    assert {bench.end(i) for i in (1, 2)} == {FinishReason.CANCELLED}


@pytest.mark.parametrize("kind", ["launch", "result"])
def test_a_device_that_fails_everything_ends_the_worker(kind: str) -> None:
    bench = Bench(make_rig(max_num_batched_tokens=64), Faults(**{kind: range(100)}))
    for request_id in range(MAX_FAILED_STEPS - 1):
        bench.submit(new_sequence(request_id))
        bench.run()
        assert bench.end(request_id) is FinishReason.ERROR
    bench.submit(new_sequence(MAX_FAILED_STEPS))
    with pytest.raises(InternalError, match=r"5 steps in a row failed: RuntimeError"):
        bench.run()


# Random mixes


@dataclass
class Seen:
    """What random mixes had in them, so that a test that saw nothing fails."""

    pending: int = 0
    ahead: int = 0
    preemptions: int = 0
    hits: int = 0
    ends: dict[FinishReason | None, int] = field(default_factory=dict)


def random_requests(rng: random.Random) -> list[NewSequence]:
    stem = [rng.randrange(49) for _ in range(12)]
    requests = []
    for request_id in range(rng.randrange(4, 14)):
        prompt = [*stem[: rng.choice([0, 7, 12, 12])], *(rng.randrange(49) for _ in range(rng.randrange(1, 6)))]
        requests.append(
            new_sequence(
                request_id,
                prompt,
                max_tokens=rng.randrange(1, 15),
                adapter=rng.choice([None, None, None, *map(adapter_ref, "abc")]),
                tenant=rng.choice(["", "", "", "t"]),
                stop_token_ids=tuple(rng.sample(range(49), rng.choice([0, 0, 3, 8]))),
                min_tokens=rng.choice([0, 0, 3]),
                presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.5]),
                prompt_logprobs=rng.choice([None, None, 0]),
                logprobs=rng.choice([None, 0]),
            )
        )
    return requests


def random_run(
    seed: int, *, runs_ahead: bool, scheduler: type[Scheduler] = Scheduler
) -> tuple[Bench, list[NewSequence]]:
    """One random mix on a tight rig; the mix is the same however it is run."""
    rng = random.Random(seed)
    rig = make_rig(
        num_blocks=rng.choice([8, 9, 10, 24]),
        num_slots=2,
        load_steps=rng.randrange(3),
        prefix_cache=rng.random() < 0.7,
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([8, 12, 32]),
        max_model_len=32,
        overtake_limit=0.5,
        adapter_wait_limit=0.5,
        scheduler_type=scheduler,
    )
    requests = random_requests(rng)
    some = [request.request_id for request in requests]
    faults = Faults(
        launch=rng.sample(some, rng.choice([0, 0, 1])),
        result=rng.sample(some, rng.choice([0, 0, 1])),
        overflow=rng.sample(some, rng.choice([0, 0, 1])),
        flaky_launch=rng.sample(range(40), rng.choice([0, 0, 2])),
        flaky_result=rng.sample(range(40), rng.choice([0, 0, 2])),
    )
    bench = Bench(rig, faults, runs_ahead=runs_ahead)
    arrivals = {request.request_id: rng.randrange(12) for request in requests}
    cancels = {request.request_id: rng.randrange(40) for request in requests if rng.random() < 0.2}
    for step in range(40):
        bench.submit(*(request for request in requests if arrivals[request.request_id] == step))
        for request_id, at in cancels.items():
            if at == step and bench.outputs.get(request_id) is not None:
                bench.cancel(request_id)
        if bench.engine.has_unfinished():
            bench.step()
    bench.run()
    return bench, requests


def check_same(seed: int, seen: Seen, scheduler: type[Scheduler] = Scheduler) -> None:
    ahead, requests = random_run(seed, runs_ahead=True, scheduler=scheduler)
    locked, _same = random_run(seed, runs_ahead=False)
    for request in requests:
        request_id = request.request_id
        end, tokens, expected = ahead.end(request_id), ahead.tokens(request_id), expected_tokens(request)
        assert tokens == expected[: len(tokens)]
        # Whether a cancel comes before the end is a question of time.
        if FinishReason.CANCELLED not in (end, locked.end(request_id)):
            assert (end, tokens) == (locked.end(request_id), locked.tokens(request_id))
            assert end is FinishReason.ERROR or tokens == expected
            both = [[(o.logprobs, o.prompt_logprobs) for o in b.outputs[request_id]] for b in (ahead, locked)]
            assert both[0] == both[1]
        seen.ends[end] = seen.ends.get(end, 0) + 1
    seen.pending += sum(row.pending for plan in ahead.runner.plans for row in plan.rows)
    seen.ahead += ahead.runner.num_ahead
    seen.preemptions += ahead.engine.stats().preemptions
    seen.hits += ahead.engine.stats().prefix_hit_tokens


def test_running_ahead_equals_lock_step() -> None:
    seen = Seen()
    for seed in range(100):
        check_same(seed, seen)
    assert min(seen.pending, seen.ahead) > 1000, seen
    assert seen.hits > 300, seen
    assert seen.preemptions > 30, seen
    assert all(seen.ends[reason] > 30 for reason in FinishReason), seen


class TokenLostInPreemption(Scheduler):
    """Lets a sequence yield while a step samples its token."""

    def _preempt(self, sequence, step):  # type: ignore[no-untyped-def]
        in_flight, sequence.in_flight = sequence.in_flight, 0
        plans, self._in_flight._plans = self._in_flight._plans, type(self._in_flight._plans)()
        super()._preempt(sequence, step)
        self._in_flight._plans, sequence.in_flight = plans, in_flight


class PlansAllAhead(Scheduler):
    def add(self, request: NewSequence, now: float) -> None:
        super().add(request, now)
        self._live[request.request_id].needs_known_tokens = False


class NeverTakesBack(Scheduler):
    """Believes that a step behind a failed one has computed something."""

    def abandon(self, plan):  # type: ignore[no-untyped-def]
        self._in_flight._plans.pop()
        for row in plan.rows:
            row.sequence.in_flight -= 1


@pytest.mark.parametrize("broken", [TokenLostInPreemption, PlansAllAhead, NeverTakesBack])
def test_a_broken_scheduler_does_not_equal_lock_step(broken: type[Scheduler]) -> None:
    def search() -> None:
        for seed in range(100):
            check_same(seed, Seen(), scheduler=broken)

    with pytest.raises((AssertionError, KeyError, IndexError)):
        search()
