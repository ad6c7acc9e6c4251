"""Threads for calls that may hang, such as looks at files on a dead mount.

Calls have a key (an adapter's name): those of one key are made one after another, so that what hangs costs one thread
however many ask for it, and who asks for something else does not wait for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

LOOKUP_SECONDS = 2.0
"""How long anybody waits for a call, and after which it is believed to hang."""
MAX_THREADS = 16

ResultT = TypeVar("ResultT")
_Call = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


@dataclass(slots=True)
class _Key:
    """Calls of one key, in order. began_at: when a thread began with the first of them."""

    calls: deque[_Call] = field(default_factory=deque)
    began_at: float | None = None


async def on_daemon_thread(work: Callable[[], ResultT]) -> ResultT:
    """What `work` returns or raises. A thread of its own, which nobody waits for when the process ends."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[ResultT] = loop.create_future()
    threading.Thread(target=_make, args=((work, loop, result),), name="call", daemon=True).start()
    return await result


class FileThreads:
    """At most `max_threads` daemon threads, started when they are needed. seconds: see LOOKUP_SECONDS."""

    def __init__(self, seconds: float = LOOKUP_SECONDS, max_threads: int = MAX_THREADS) -> None:
        self._seconds = seconds
        self._max_threads = max_threads
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._keys: dict[Hashable, _Key] = {}
        self._ready: deque[Hashable] = deque()  # keys that wait for a thread
        self._num_threads = 0
        self._num_idle = 0
        self._stopped = False

    async def run(self, work: Callable[[], ResultT], key: Hashable) -> ResultT:
        """What `work` returns or raises. Raises TimeoutError if that takes too long; what has begun goes on.

        At once, if the key's last call hangs, or so many others that there is no thread.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[ResultT] = loop.create_future()
        with self._lock:
            if self._hangs(key):
                raise TimeoutError
            self._add(key, (work, loop, result))
        async with asyncio.timeout(self._seconds):
            return await result

    @property
    def num_held(self) -> int:
        """Threads whose call hangs."""
        with self._lock:
            return self._count_held()

    def stop(self) -> None:
        """End the threads when they have nothing to do any more. Idempotent."""
        with self._lock:
            self._stopped = True
            self._has_work.notify_all()

    def _hangs(self, key: Hashable) -> bool:
        calls = self._keys.get(key)
        if calls is not None and calls.began_at is not None:
            return self._is_held(calls)
        return self._count_held() >= self._max_threads

    def _is_held(self, calls: _Key) -> bool:
        return calls.began_at is not None and time.monotonic() - calls.began_at >= self._seconds

    def _count_held(self) -> int:
        return sum(map(self._is_held, self._keys.values()))

    def _add(self, key: Hashable, call: _Call) -> None:
        calls = self._keys.get(key)
        if calls is not None:
            calls.calls.append(call)
            return
        self._keys[key] = _Key(deque([call]))
        self._ready.append(key)
        if len(self._ready) > self._num_idle and self._num_threads < self._max_threads:
            self._num_threads += 1
            threading.Thread(target=self._serve, name="files", daemon=True).start()
        else:
            self._has_work.notify()

    def _serve(self) -> None:
        while (key := self._next()) is not None:
            while (call := self._next_of(key)) is not None:
                if not _make(call):
                    return

    def _next(self) -> Hashable | None:
        with self._lock:
            self._num_idle += 1
            while not self._ready and not self._stopped:
                self._has_work.wait()
            self._num_idle -= 1
            return self._ready.popleft() if self._ready else None

    def _next_of(self, key: Hashable) -> _Call | None:
        """The key's next call for which somebody waits; None, and the key is nobody's, if there is none."""
        with self._lock:
            calls = self._keys[key]
            while calls.calls:
                call = calls.calls.popleft()
                if not call[2].done():
                    calls.began_at = time.monotonic()
                    return call
            del self._keys[key]
            return None


def _make(call: _Call) -> bool:
    """Whether there is still a loop to tell."""
    work, loop, result = call
    value, error = None, None
    try:
        value = work()
    except BaseException as raised:  # is the caller's; a panic of a library in Rust is no Exception
        error = raised
    try:
        loop.call_soon_threadsafe(_settle, result, value, error)
    except RuntimeError:  # the loop was closed meanwhile
        return False
    return True


def _settle(result: asyncio.Future[Any], value: object, error: BaseException | None) -> None:
    if result.done():
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error)
