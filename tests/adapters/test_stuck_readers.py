"""Files that never come, as on a dead network mount: they fail alone and cost nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from punica_core.adapters.files import SourceFile
from punica_core.lora import cache as cache_module
from punica_core.lora.cache import NUM_READERS, STALLED_SECONDS, AdapterCache
from punica_core.scheduler.plan import SkipReason
from tests.support.adapter_loading import PATIENCE, granted
from tests.support.peft_adapters import adapter_ref

Make = Callable[..., AdapterCache]


class Gate:
    """Holds readers of one adapter's files, as a dead network mount does, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *held: str) -> None:
        self.open = threading.Event()
        self.reached = threading.Semaphore(0)
        init = SourceFile.__init__

        def wait_at_gate(file: SourceFile, path: str, *arguments: object) -> None:
            if Path(path).parent.name in held and path.endswith(".safetensors"):
                self.reached.release()
                assert self.open.wait(PATIENCE)
            init(file, path, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(SourceFile, "__init__", wait_at_gate)


def test_a_slow_adapter_does_not_hold_up_another(
    make_cache: Make, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "adapter0")
    cache = make_cache()
    slow, quick = adapter_ref(folders[0]), adapter_ref(folders[1])
    cache.acquire(slow)
    granted(cache, quick)
    assert cache.acquire(slow) is SkipReason.ADAPTER_LOADING
    gate.open.set()
    granted(cache, slow)


def test_a_load_without_progress_fails_alone_and_its_reader_is_replaced(
    make_cache: Make, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "adapter0", "adapter1")
    now = [0.0]
    cache = make_cache(load_timeout=60.0, retry_seconds=5.0, clock=lambda: now[0])
    stuck, waiting = [adapter_ref(folder) for folder in folders[:2]], adapter_ref(folders[2])
    for ref in (*stuck, waiting):
        cache.acquire(ref)
    for _ in stuck:
        assert gate.reached.acquire(timeout=PATIENCE)
    assert cache.poll(60.0) == []
    now[0] = 60.5
    failures = dict(cache.poll(now[0]))
    assert failures.keys() == set(stuck)
    assert "no progress for 60 seconds" in failures[stuck[0]].message
    granted(cache, waiting, lambda: now[0])

    gate.open.set()  # the lost reads come back, too late to count
    now[0] = 70.0
    granted(cache, stuck[0], lambda: now[0])
    outcomes = [load.outcome for load in cache.stats().loads]
    assert sorted(outcomes) == sorted(["adapter_load_timeout", "adapter_load_timeout", "ok", "ok"])


def test_a_queued_load_fails_too_when_every_reader_is_lost(
    make_cache: Make, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MAX_STUCK_READERS", 1)
    gate = Gate(monkeypatch, "adapter0", "adapter1")
    now = [0.0]
    cache = make_cache(load_timeout=60.0, retry_seconds=5.0, clock=lambda: now[0])
    refs = [adapter_ref(folder) for folder in folders[:3]]
    for ref in refs[:2]:
        cache.acquire(ref)
        assert gate.reached.acquire(timeout=PATIENCE)
    now[0] = 30.0
    cache.acquire(refs[2])
    now[0] = 61.0
    assert {ref for ref, _ in cache.poll(now[0])} == set(refs[:2])
    assert cache.acquire(refs[2]) is SkipReason.ADAPTER_LOADING
    now[0] = 91.0
    assert {ref for ref, _ in cache.poll(now[0])} == {refs[2]}
    gate.open.set()


def test_readers_that_stall_do_not_hold_up_others_for_the_whole_timeout(
    make_cache: Make, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(threading.enumerate())

    def readers() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "adapter-reader" and one not in others]

    gate = Gate(monkeypatch, "adapter0", "adapter1")
    now = [0.0]
    cache = make_cache(load_timeout=60.0, clock=lambda: now[0])
    stalled, waiting = [adapter_ref(folder) for folder in folders[:2]], adapter_ref(folders[2])
    for ref in (*stalled, waiting):
        cache.acquire(ref)
    for _ in stalled:
        assert gate.reached.acquire(timeout=PATIENCE)
    now[0] = STALLED_SECONDS - 0.1
    assert cache.poll(now[0]) == []
    assert len(readers()) == NUM_READERS, "they may only be slow"
    now[0] = STALLED_SECONDS
    granted(cache, waiting, lambda: now[0])
    assert len(readers()) <= 2 * NUM_READERS
    gate.open.set()  # they were only slow
    for ref in stalled:
        granted(cache, ref, lambda: now[0])
    assert {load.outcome for load in cache.stats().loads} == {"ok"}
    deadline = time.monotonic() + PATIENCE
    while len(readers()) > NUM_READERS:
        assert time.monotonic() < deadline, "those that stood in end"
        time.sleep(0.01)
