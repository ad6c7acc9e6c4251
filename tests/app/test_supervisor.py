from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from app import supervisor as supervisor_module
from app.supervisor import State, Supervisor
from punica_core.client import EngineClient, WorkerClient
from punica_core.config import EngineConfig
from punica_core.errors import ConfigError, EngineRestarting, PunicaError, WorkerLost
from punica_core.protocol import Event, NewSequence, Outputs, SamplingParams, StepStarted, StepStats
from tests.support.fake_engine import FakeEngine
from tests.support.scripted_worker import CRASH, GARBAGE, HANG, MUTE

CONFIG = EngineConfig(model="m")


class Watched:
    """A supervisor and what it told."""

    def __init__(
        self,
        connect: Callable[[], EngineClient],
        stall_timeout: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        start_timeout: float = 60.0,
    ) -> None:
        self.events: list[Event] = []
        self.losses: list[PunicaError] = []
        self.lives = 0
        self.supervisor = Supervisor(
            connect,
            CONFIG,
            on_event=self.events.append,
            on_lost=self.losses.append,
            on_ready=self._on_ready,
            on_progress=lambda progress: None,
            stall_timeout=stall_timeout,
            start_timeout=start_timeout,
            clock=clock,
        )

    def _on_ready(self, layout: Any) -> None:
        self.lives += 1

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    def submit(self, first_token: int, max_tokens: int = 3) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.supervisor.submit([NewSequence(request_id=1, prompt_ids=[first_token], sampling=sampling)])

    @property
    def tokens(self) -> list[int]:
        outputs = [output for event in self.events if isinstance(event, Outputs) for output in event.outputs]
        return [token for output in outputs for token in output.token_ids]


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF", 0.01)


@pytest.fixture
async def scripted() -> AsyncIterator[Callable[..., Any]]:
    started: list[Supervisor] = []

    async def start(stall_timeout: float = 60.0) -> Watched:
        command = (sys.executable, "-m", "tests.support.scripted_worker")
        watched = Watched(lambda: WorkerClient(command), stall_timeout)
        started.append(watched.supervisor)
        await watched.supervisor.start()
        return watched

    yield start
    for supervisor in started:
        await supervisor.stop()


async def test_a_worker_process_answers(scripted: Callable[..., Any]) -> None:
    watched = await scripted()
    watched.submit(7)
    await watched.until(lambda: len(watched.tokens) == 3)
    assert watched.tokens == [7, 7, 7]
    assert watched.losses == []


async def test_a_worker_that_dies_is_noticed_and_replaced(scripted: Callable[..., Any]) -> None:
    watched = await scripted()
    watched.submit(CRASH)
    await watched.until(lambda: bool(watched.losses))
    assert "killed by signal 9" in watched.losses[0].message
    with pytest.raises(EngineRestarting):
        watched.supervisor.check_ready()
    await watched.until(lambda: watched.lives == 2)
    watched.supervisor.check_ready()
    watched.submit(7)
    await watched.until(lambda: len(watched.tokens) == 3)
    assert len(watched.losses) == 1


async def test_a_worker_that_stalls_is_killed_and_replaced(scripted: Callable[..., Any]) -> None:
    watched = await scripted(stall_timeout=0.2)
    watched.submit(HANG)
    await watched.until(lambda: watched.lives == 2)
    assert [error.code for error in watched.losses] == [WorkerLost.code]
    assert "did not finish a step in time" in watched.losses[0].message


async def test_a_worker_that_is_frozen_while_idle_is_found_by_the_next_request(scripted: Callable[..., Any]) -> None:
    others = children()
    watched = await scripted(stall_timeout=0.3)
    watched.submit(7)
    await watched.until(lambda: watched.events[-1:] == [StepStarted(busy=False)])
    (frozen,) = set(children()) - set(others)
    os.kill(frozen, signal.SIGSTOP)
    await asyncio.sleep(0.8)
    assert watched.losses == []  # nobody wants anything of it
    watched.submit(7)
    await watched.until(lambda: watched.lives == 2)
    assert [error.code for error in watched.losses] == [WorkerLost.code]
    assert frozen not in children()


async def test_a_worker_that_freezes_while_idle_is_replaced_before_anybody_needs_it(
    scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "PING_SECONDS", 0.1)
    others = children()
    watched = await scripted(stall_timeout=0.3)
    await watched.until(lambda: len(watched.events) > 3)
    assert watched.losses == []  # it answers
    (frozen,) = set(children()) - set(others)
    os.kill(frozen, signal.SIGSTOP)
    await watched.until(lambda: watched.lives == 2)
    assert [error.code for error in watched.losses] == [WorkerLost.code]
    assert frozen not in children()


@pytest.mark.parametrize("has_work", [False, True])
async def test_a_slow_step_before_does_not_keep_a_frozen_idle_worker(has_work: bool) -> None:
    engine, now = FakeEngine(auto=False), [0.0]
    engine.deaf = True
    watched = Watched(lambda: engine, clock=lambda: now[0])
    await watched.supervisor.start()
    engine.emit(Outputs([], StepStats(slowest_step_seconds=30.0)))
    now[0] += supervisor_module.PING_SECONDS
    await watched.until(lambda: engine.num_pings == 1)
    if has_work:
        watched.submit(7)
    now[0] += 61.0
    await asyncio.sleep(1.5)  # a look or two
    assert engine.killed is not has_work
    await watched.supervisor.stop()


@pytest.mark.parametrize("answers", [True, False])
async def test_an_idle_worker_that_is_slow_to_answer_lives_on(answers: bool) -> None:
    engine, now = FakeEngine(auto=False), [0.0]
    engine.deaf = True
    watched = Watched(lambda: engine, clock=lambda: now[0])
    await watched.supervisor.start()
    now[0] += supervisor_module.PING_SECONDS
    await watched.until(lambda: engine.num_pings == 1)
    now[0] += 59.0
    if answers:
        engine.emit(Outputs())
    now[0] += 2.0
    await asyncio.sleep(1.5)  # a look or two
    assert engine.killed is not answers
    await watched.supervisor.stop()


def children() -> list[int]:
    process = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.parametrize("has_news", [True, False])
async def test_a_front_end_that_did_not_run_does_not_blame_the_worker(
    monkeypatch: pytest.MonkeyPatch, has_news: bool
) -> None:
    """Its process was stopped for a while: its timers fire before it has read what came meanwhile."""
    engine, now, looks, real_sleep = FakeEngine(auto=False), [0.0], 0, asyncio.sleep

    async def sleep(seconds: float) -> None:
        nonlocal looks
        if seconds == supervisor_module.SECOND_LOOK:
            looks += 1
            if has_news:
                engine.emit(Outputs([]))
        await real_sleep(0)

    watched = Watched(lambda: engine, clock=lambda: now[0])
    await watched.supervisor.start()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    engine.emit(StepStarted(busy=True))
    now[0] += 100.0
    while not looks:
        await real_sleep(0)
    for _ in range(10):
        await real_sleep(0)
    monkeypatch.setattr(asyncio, "sleep", real_sleep)
    assert engine.killed is not has_news
    await watched.supervisor.stop()


async def test_a_worker_that_sends_garbage_is_replaced(
    scripted: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    watched = await scripted()
    watched.submit(GARBAGE)
    await watched.until(lambda: watched.lives == 2)
    assert len(watched.losses) == 1
    assert "could not be read" in watched.losses[0].message


async def test_a_worker_that_closes_its_socket_and_goes_on_is_killed_and_replaced(
    scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("punica_core.client.EXIT_SECONDS", 0.1)
    watched = await scripted()
    watched.submit(MUTE)
    await watched.until(lambda: watched.lives == 2)
    assert "killed by signal 9" in watched.losses[0].message


async def test_an_idle_worker_never_stalls(scripted: Callable[..., Any]) -> None:
    watched = await scripted(stall_timeout=0.05)
    watched.submit(7)
    await watched.until(lambda: watched.events[-1:] == [StepStarted(busy=False)])
    await asyncio.sleep(0.3)
    assert watched.losses == []


async def test_stopping_is_no_loss(scripted: Callable[..., Any]) -> None:
    watched = await scripted()
    await watched.supervisor.stop()
    await watched.supervisor.stop()
    assert watched.losses == []
    assert watched.supervisor.state is State.STOPPED


async def test_restarts_back_off_until_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    engines: list[FakeEngine] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds not in (1.0, 0.0):  # not the stall watch's
            naps.append(seconds)
        await real_sleep(0)

    def connect() -> FakeEngine:
        failing = 1 <= len(engines) <= 12
        engines.append(FakeEngine(start_error=ConfigError("gone") if failing else None))
        return engines[-1]

    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF", 0.1)
    watched = Watched(connect)
    await watched.supervisor.start()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    engines[0].lose()
    while watched.lives < 2:
        await real_sleep(0)
    monkeypatch.setattr(asyncio, "sleep", real_sleep)
    await watched.supervisor.stop()
    assert naps[:4] == [0.1, 0.2, 0.4, 0.8]
    assert max(naps) == naps[-1] == 30.0
    assert len(naps) == 13
    assert all(engine.stopped for engine in engines)


class SlowToStart(FakeEngine):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    async def start(self, *arguments: Any) -> Any:
        await asyncio.sleep(self._seconds)
        return await super().start(*arguments)


async def test_a_restart_that_hangs_is_given_up_for_another(caplog: pytest.LogCaptureFixture) -> None:
    engines = [SlowToStart(seconds) for seconds in (0.0, 60.0, 60.0, 0.0)]
    left = iter(engines)
    watched = Watched(lambda: next(left), stall_timeout=0.1)
    await watched.supervisor.start()
    engines[0].lose()
    async with asyncio.timeout(10):
        await watched.until(lambda: watched.lives == 2)
    await watched.supervisor.stop()
    assert all(engine.stopped for engine in engines)
    complaints = [record.getMessage() for record in caplog.records if "not ready" in record.getMessage()]
    assert ["within 0.1 s" in complaints[0], "within 0.2 s" in complaints[1]] == [True, True]
    assert len(watched.losses) == 1


async def test_a_restart_may_take_ten_times_as_long_as_a_start_took() -> None:
    engines = [SlowToStart(seconds) for seconds in (0.1, 0.3)]
    left = iter(engines)
    watched = Watched(lambda: next(left), stall_timeout=0.01)
    await watched.supervisor.start()
    engines[0].lose()
    await watched.until(lambda: watched.lives == 2)
    assert not engines[1].stopped
    await watched.supervisor.stop()


async def test_the_first_start_is_not_repeated() -> None:
    engines: list[FakeEngine] = []

    def connect() -> FakeEngine:
        engines.append(FakeEngine(start_error=ConfigError("no such model")))
        return engines[-1]

    watched = Watched(connect)
    with pytest.raises(ConfigError, match="no such model"):
        await watched.supervisor.start()
    assert [engine.stopped for engine in engines] == [True]
