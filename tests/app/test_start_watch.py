"""Starts that hang, and those that are only slow."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from app import start_watch
from app.start_watch import MIN_BYTES, StartWatch, call_watched
from app.supervisor import Supervisor
from app.tokenizer import Tokenizer
from punica_core.client import WorkerClient
from punica_core.config import EngineConfig
from punica_core.errors import ConfigError, WorkerLost
from punica_core.protocol import Progress
from tests.app.conftest import MakeServer
from tests.app.test_supervisor import Watched, children
from tests.support.fake_engine import FakeEngine

BOUND = 0.3
CONFIG = EngineConfig(model="m")


class SlowEngine(FakeEngine):
    """Reports `news` one after another, each after 0.6 BOUND, and moves bytes in between as it is told."""

    def __init__(self, news: list[Progress], nbytes: int = 0) -> None:
        super().__init__()
        self._news = news
        self._nbytes = nbytes
        self._moved = 0

    def num_bytes(self) -> int | None:
        return self._moved

    async def start(self, config: EngineConfig, on_progress: Any) -> Any:
        for news in self._news:
            on_progress(news)
            for _ in range(4):
                await asyncio.sleep(0.15 * BOUND)
                self._moved += self._nbytes
        return await super().start(config, on_progress)


STEPS = [Progress(f"step {number}") for number in range(6)]
SHARES = [Progress("loading", share / 6) for share in range(6)]
SAME = [Progress("loading", 0.5)] * 6


@pytest.mark.parametrize(
    ("news", "nbytes", "ends"),
    [
        (STEPS, 0, False),
        (SHARES, 0, False),
        (SAME, MIN_BYTES, False),
        (SAME, MIN_BYTES // 100, True),
        (SAME, 0, True),
    ],
    ids=["steps", "shares", "bytes", "a few bytes", "nothing"],
)
async def test_a_start_is_ended_only_if_it_makes_no_progress(news: list[Progress], nbytes: int, ends: bool) -> None:
    engine = SlowEngine(news, nbytes)
    watched = Watched(lambda: engine, start_timeout=BOUND)
    if ends:
        with pytest.raises(WorkerLost, match=r"loading made no progress for 0\.3 seconds.*driver"):
            await watched.supervisor.start()
    else:
        await watched.supervisor.start()
    assert engine.stopped is ends
    await watched.supervisor.stop()


@pytest.mark.parametrize(("start_seconds", "ends"), [("3600", True), ("0.1", False)])
async def test_a_worker_process_that_hangs_while_it_starts_is_ended(start_seconds: str, ends: bool) -> None:
    command = (sys.executable, "-m", "tests.support.scripted_worker", "--start-seconds", start_seconds)
    before = children()
    watched = Watched(lambda: WorkerClient(command), start_timeout=2.0)
    began = time.monotonic()
    if ends:
        with pytest.raises(WorkerLost, match="loading made no progress for 2 seconds"):
            await watched.supervisor.start()
        assert time.monotonic() - began < 15
        assert children() == before
    else:
        await watched.supervisor.start()
    await watched.supervisor.stop()


async def test_what_a_process_reads_is_counted() -> None:
    program = (
        "import os, socket, sys; connection = socket.socket(fileno=int(sys.argv[2])); "
        "os.pread(os.open('/dev/zero', os.O_RDONLY), 4 << 20, 0); connection.recv(1 << 16); connection.recv(1)"
    )
    client = WorkerClient((sys.executable, "-c", program))
    assert client.num_bytes() is None
    start = asyncio.create_task(client.start(CONFIG, lambda progress: None))
    async with asyncio.timeout(20):
        while (client.num_bytes() or 0) < 4 << 20:
            await asyncio.sleep(0.02)
    start.cancel()
    await client.stop()
    assert client.num_bytes() is None


async def test_what_a_start_waits_for_is_said_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_watch, "FIRST_WORD", 0.1)
    watch = StartWatch(1.0, "first")
    watch.on_progress(Progress("loading weights", 0.25))
    with pytest.raises(WorkerLost, match="loading weights"):
        await watch.wait_for(asyncio.Event().wait())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4  # after 0.1, 0.2, 0.4 and 0.8 s
    assert all("loading weights" in line and "ended after 1 s" in line for line in said)


async def test_a_front_end_that_did_not_run_does_not_blame_the_start() -> None:
    watch = StartWatch(0.5, "loading")

    async def work() -> str:
        await asyncio.sleep(0.01)
        time.sleep(1.0)  # as if the whole process had been stopped
        await asyncio.sleep(0.1)
        return "done"

    assert await watch.wait_for(work()) == "done"


async def test_a_timeout_of_the_work_itself_is_its_own() -> None:
    async def work() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await StartWatch(10.0, "loading").wait_for(work())


async def test_a_start_that_is_cancelled_is_cancelled() -> None:
    engine = SlowEngine(SAME * 100)
    watched = Watched(lambda: engine)
    start = asyncio.create_task(watched.supervisor.start())
    await asyncio.sleep(0.1)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert engine.stopped
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "start-watch" and not task.cancelling()]


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_tokenizer_on_a_disk_that_hangs_ends_the_start(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    goes_on, load = threading.Event(), Tokenizer.load

    def held(*arguments: Any) -> Tokenizer:
        goes_on.wait(30 if hangs else 0)
        return load(*arguments)

    monkeypatch.setattr(Tokenizer, "load", held)
    if not hangs:
        async with make_server(settings={"start_timeout": 20.0}):
            return
    try:
        with pytest.raises(WorkerLost, match=r"tokenizer and the chat template made no progress for 0\.3"):
            async with make_server(settings={"start_timeout": BOUND}):
                pass
    finally:
        goes_on.set()


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_folder_that_hangs_does_not_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    from app.tokenizer_files import tokenizer_folder

    (tmp_path / "tokenizer.json").write_text("{}")
    goes_on, stat, idents = threading.Event(), os.stat, set[int]()

    def held(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path)):
            idents.add(threading.get_ident())
            goes_on.wait(30 if hangs else 0)
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", held)
    work = asyncio.create_task(tokenizer_folder(tmp_path))
    await asyncio.wait({work}, timeout=BOUND)
    assert work.done() is not hangs
    assert threading.get_ident() not in idents
    assert idents
    goes_on.set()
    assert await work == tmp_path


def test_before_there_is_a_loop_calls_are_watched_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_watch, "FIRST_WORD", 0.1)
    goes_on = threading.Event()
    with pytest.raises(WorkerLost, match=r"looking at folders made no progress for 0\.3 seconds"):
        call_watched(lambda: goes_on.wait(30), BOUND, "looking at folders")
    goes_on.set()
    assert len(caplog.records) == 2  # after 0.1 and 0.2 s
    assert call_watched(lambda: 7, BOUND, "looking at folders") == 7
    with pytest.raises(ConfigError, match="wrong"):
        call_watched(_fail, BOUND, "looking at folders")


def _fail() -> None:
    raise ConfigError("wrong")


async def test_a_restart_that_hangs_is_told_with_its_step(caplog: pytest.LogCaptureFixture) -> None:
    engines = [FakeEngine(), SlowEngine(SAME * 100), FakeEngine()]
    left = iter(engines)
    watched = Watched(lambda: next(left), stall_timeout=0.2)
    assert isinstance(watched.supervisor, Supervisor)
    await watched.supervisor.start()
    engines[0].lose()
    async with asyncio.timeout(10):
        await watched.until(lambda: watched.lives == 2)
    await watched.supervisor.stop()
    assert any("not ready within 0.2 s (loading)" in record.getMessage() for record in caplog.records)
