"""The worker's loop around an engine that runs ahead: what the front end hears of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import torch

from punica_core import worker
from punica_core.engine.engine import Engine
from punica_core.errors import AdapterLoadTimeout, PunicaError
from punica_core.lora.cache import AdapterCache
from punica_core.protocol import (
    AdapterRef,
    Cancel,
    Command,
    Event,
    FinishReason,
    Outputs,
    Ping,
    SequenceOutput,
    Shutdown,
    StepStarted,
    Submit,
)
from punica_core.scheduler.plan import PendingStep, StepPlan, StepResult
from punica_core.worker import Loop
from tests.support.ahead_runner import AheadRunner
from tests.support.residency import adapter_ref
from tests.support.scheduling import Rig, expected_tokens, make_rig, new_sequence

TIMEOUT = 30.0
"""Seconds after which a test gives up on the loop."""


class LocalChannel:
    """The worker's end without a socket. first: what the loop sent before it had any command."""

    first: Event

    def __init__(self) -> None:
        self.wake = threading.Event()
        self.events: queue.Queue[Event] = queue.Queue()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def command(self, command: Command) -> None:
        self._commands.put(command)
        self.wake.set()

    def take(self) -> list[Command]:
        taken = []
        while not self._commands.empty():
            taken.append(self._commands.get())
        return taken

    def send(self, event: Event) -> None:
        self.events.put(event)

    def until_idle(self) -> list[Event]:
        """What was sent up to the news that the worker is idle, and the gauges after it."""
        events = [self.events.get(timeout=TIMEOUT)]
        while events[-1] != StepStarted(False):
            events.append(self.events.get(timeout=TIMEOUT))
        return [*events, self.events.get(timeout=TIMEOUT)]


class HeldRunner:
    """An `AheadRunner` whose results come when `go` allows. waiting: a result is being waited for."""

    runs_ahead = True

    def __init__(self, rig: Rig) -> None:
        self.runner = AheadRunner(rig.model)
        self.go = threading.Semaphore(0)
        self.waiting = threading.Semaphore(0)

    def launch(self, plan: StepPlan) -> PendingStep:
        return HeldStep(self, self.runner.launch(plan))


class HeldStep:
    def __init__(self, held: HeldRunner, step: PendingStep) -> None:
        self._held = held
        self._step = step

    def result(self) -> StepResult:
        self._held.waiting.release()
        assert self._held.go.acquire(timeout=TIMEOUT)
        return self._step.result()


@pytest.fixture
def rig() -> Rig:
    return make_rig(max_num_batched_tokens=12)


@pytest.fixture
def runner(rig: Rig) -> HeldRunner:
    return HeldRunner(rig)


@pytest.fixture
def channel(rig: Rig, runner: HeldRunner) -> Iterator[LocalChannel]:
    channel = LocalChannel()
    loop = Loop(channel, Engine(rig.scheduler, AdapterCache({}, torch.float32, 1), runner))  # type: ignore[arg-type]
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    channel.first = channel.events.get(timeout=TIMEOUT)
    yield channel
    channel.command(Shutdown())
    runner.go.release(100)
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def outputs_of(events: list[Event], request_id: int) -> list[SequenceOutput]:
    return [o for event in events if isinstance(event, Outputs) for o in event.outputs if o.request_id == request_id]


def test_the_gauges_are_told_before_there_is_work(channel: LocalChannel, rig: Rig) -> None:
    assert isinstance(channel.first, Outputs)
    assert channel.first.stats is not None
    assert (channel.first.stats.free_blocks, channel.first.stats.steps) == (rig.pool.num_blocks, 0)
    assert channel.events.empty()


def test_all_tokens_come_and_then_the_news_that_nothing_is_left(
    channel: LocalChannel, runner: HeldRunner, rig: Rig
) -> None:
    runner.go.release(100)
    requests = [new_sequence(1, max_tokens=3), new_sequence(2, max_tokens=6)]
    channel.command(Submit(requests))
    events = channel.until_idle()
    for request in requests:
        outputs = outputs_of(events, request.request_id)
        assert [token for output in outputs for token in output.token_ids] == expected_tokens(request)
        assert [output.finish_reason for output in outputs][-1] is FinishReason.LENGTH
    assert runner.runner.num_ahead > 0
    last = events[-1]
    assert isinstance(last, Outputs)
    assert last.stats is not None
    assert (last.stats.running, last.stats.steps, last.stats.free_blocks) == (0, 6, rig.pool.num_blocks)


def test_every_wait_for_the_device_begins_with_a_heartbeat(channel: LocalChannel, runner: HeldRunner) -> None:
    channel.command(Submit([new_sequence(1, max_tokens=4)]))
    for _ in range(4):
        assert runner.waiting.acquire(timeout=TIMEOUT)
        sent: list[Event] = []
        while not channel.events.empty():
            sent.append(channel.events.get())
        assert sent[-1] == StepStarted(True) or isinstance(sent[-1], Outputs)
        runner.go.release()


@pytest.fixture
def few_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gauges come with the first step and at the end only."""
    monkeypatch.setattr(worker, "STATS_INTERVAL", 1e9)


@pytest.mark.usefixtures("few_stats")
def test_a_step_that_follows_outputs_has_no_heartbeat_of_its_own(channel: LocalChannel, runner: HeldRunner) -> None:
    runner.go.release(100)
    channel.command(Submit([new_sequence(1, max_tokens=40)]))
    events = channel.until_idle()
    assert len(outputs_of(events, 1)) == 40
    assert events.count(StepStarted(True)) == 1
    assert events[0] == StepStarted(True)


@pytest.mark.usefixtures("few_stats")
def test_a_step_after_one_without_news_has_a_heartbeat(channel: LocalChannel, runner: HeldRunner) -> None:
    """The chunks of a long prompt: nothing comes out of all but the last."""
    runner.go.release(100)
    channel.command(Submit([new_sequence(1, prompt=60, max_tokens=1)]))
    events = channel.until_idle()
    last = events[-1]
    assert isinstance(last, Outputs)
    assert last.stats is not None
    assert last.stats.steps == 5
    assert events.count(StepStarted(True)) == 5


def test_a_cancel_while_two_steps_are_in_flight_gives_everything_back(
    channel: LocalChannel, runner: HeldRunner, rig: Rig
) -> None:
    channel.command(Submit([new_sequence(1, max_tokens=50)]))
    assert runner.waiting.acquire(timeout=TIMEOUT)
    channel.command(Cancel([1]))
    runner.go.release(100)
    events = channel.until_idle()
    *tokens, end = outputs_of(events, 1)
    assert end.finish_reason is FinishReason.CANCELLED
    assert all(output.finish_reason is None for output in tokens)
    last = events[-1]
    assert isinstance(last, Outputs)
    assert last.stats is not None
    assert (last.stats.running, last.stats.free_blocks) == (0, rig.pool.num_blocks)
    assert last.stats.steps < 50


def test_an_idle_worker_answers_a_ping_with_its_gauges(channel: LocalChannel, rig: Rig) -> None:
    assert channel.events.empty()
    channel.command(Ping())
    answer = channel.events.get(timeout=TIMEOUT)
    assert isinstance(answer, Outputs)
    assert answer.outputs == []
    assert answer.stats is not None
    assert answer.stats.free_blocks == rig.pool.num_blocks


@pytest.mark.parametrize("has_woken", [True, False])
def test_a_load_that_failed_after_its_client_left_fails_nobody_else(
    channel: LocalChannel, runner: HeldRunner, rig: Rig, monkeypatch: pytest.MonkeyPatch, has_woken: bool
) -> None:
    """has_woken: the load ended, which wakes the loop, before there was the request; else after."""
    ref = adapter_ref("flaky")
    failures = [(ref, AdapterLoadTimeout("no progress"))]
    told = threading.Event()

    def poll(cache: AdapterCache, now: float) -> list[tuple[AdapterRef, PunicaError]]:
        told.set()
        return [failures.pop()] if failures and (has_woken or rig.scheduler.has_unfinished()) else []

    monkeypatch.setattr(AdapterCache, "poll", poll)
    runner.go.release(100)
    if has_woken:
        channel.wake.set()
        assert told.wait(TIMEOUT)
    channel.command(Submit([new_sequence(1, max_tokens=3, adapter=ref)]))
    reasons = [output.finish_reason for output in outputs_of(channel.until_idle(), 1)]
    assert reasons[-1] is (FinishReason.LENGTH if has_woken else FinishReason.ERROR)


def test_shutdown_ends_the_loop_with_a_step_in_flight(channel: LocalChannel, runner: HeldRunner) -> None:
    channel.command(Submit([new_sequence(1, max_tokens=50)]))
    assert runner.waiting.acquire(timeout=TIMEOUT)
    channel.command(Shutdown())
    runner.go.release(2)
