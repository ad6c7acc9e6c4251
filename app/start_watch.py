"""Waits for a start, however long it takes, as long as it makes progress; says what it waits for when it does not.

Progress is another step, a larger share of one, or a MiB that was read or written: loading a large model from a slow
disk is progress, a disk or a driver that does not answer is none. Computing is none either, since a driver may wait in
a loop; so the bound must be longer than any step computes without a word.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from app.file_threads import on_daemon_thread
from punica_core.errors import WorkerLost
from punica_core.protocol import Progress

log = logging.getLogger(__name__)

FIRST_WORD = 30.0
"""Seconds without progress after which that is logged; then after twice as many, and so on."""
MIN_BYTES = 1 << 20
"""Fewer bytes are no progress: a process that hangs may still write a line of its log."""
_LONGEST_PERIOD = 1.0

ResultT = TypeVar("ResultT")


class StartWatch:
    """Watches one start. bound: seconds without progress after which it is ended.

    what: its first step. num_bytes: how much was read and written so far, None where nobody counts.
    """

    def __init__(self, bound: float, what: str, num_bytes: Callable[[], int | None] = lambda: None) -> None:
        self._bound = bound
        self._progress = Progress(what)
        self._num_bytes = num_bytes

    @property
    def what(self) -> str:
        """The step that the start is at."""
        return self._progress.what

    def on_progress(self, progress: Progress) -> None:
        """A step begins or goes on."""
        self._progress = progress

    async def wait_for(self, work: Awaitable[ResultT]) -> ResultT:
        """What `work` gives; it is cancelled when there is no progress. Raises WorkerLost, which names the step."""
        limit = asyncio.timeout(None)
        watching: asyncio.Task[None] | None = None
        try:
            async with limit:
                watching = asyncio.create_task(self._watch(limit), name="start-watch")
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise WorkerLost(_ended(self.what, self._bound)) from None
        finally:
            if watching is not None:
                watching.cancel()

    async def _watch(self, limit: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        period = min(_LONGEST_PERIOD, self._bound / 10)
        silent, next_word = 0.0, FIRST_WORD
        seen, num_bytes = self._progress, self._num_bytes() or 0
        while silent < self._bound:
            before = loop.time()
            await asyncio.sleep(period)
            silent += min(loop.time() - before, 2 * period)  # while this process did not run it heard nothing
            now_bytes = self._num_bytes() or 0
            if self._progress != seen or now_bytes >= num_bytes + MIN_BYTES:
                silent, next_word, seen, num_bytes = 0.0, FIRST_WORD, self._progress, now_bytes
            elif next_word <= silent < self._bound:
                _say(self.what, silent, self._bound)
                next_word *= 2
        limit.reschedule(loop.time())


def call_watched(work: Callable[[], ResultT], bound: float, what: str) -> ResultT:
    """What `work` returns or raises, on a daemon thread: before there is an event loop. Raises WorkerLost after `bound`
    seconds."""
    return asyncio.run(StartWatch(bound, what).wait_for(on_daemon_thread(work)))


def _say(what: str, silent: float, bound: float) -> None:
    log.warning("The start waits: %s. No progress for %.0f s; it is ended after %g s.", what, silent, bound)


def _ended(what: str, bound: float) -> str:
    return (
        f"The start was ended: {what} made no progress for {bound:g} seconds. A disk, a network mount or the GPU's "
        "driver does not answer, or start_timeout is too short for this machine."
    )
