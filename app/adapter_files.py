"""Looks at the files of adapters without holding up the event loop, where a dead mount may hold a call for ever.

One thread makes the calls, one after another. While one lasts longer than anybody waits, others are refused until it
returns, so that a dead mount costs one thread. Requests for adapters that were found before go on meanwhile, with the
files' state as of then: the worker has them in memory, or says that it cannot read them.

On local disks the few calls that each request makes take 20 µs in place. On a thread they take 70, and milliseconds
while the event loop is busy, since each of them waits for the GIL: only mounts that may hang are worth that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from app.mounts import LocalFolders
from punica_core.adapters.header import shorten
from punica_core.adapters.registry import AdapterRegistry
from punica_core.errors import AdapterLoadTimeout, PunicaError
from punica_core.protocol import AdapterRef

log = logging.getLogger(__name__)

LOOKUP_SECONDS = 2.0
"""How long a request waits for a look at files."""
_MAX_KEPT = 4096

ResultT = TypeVar("ResultT")
_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class FileThread:
    """A daemon thread for calls that may hang. seconds: how long a caller waits, and what is believed to hang."""

    def __init__(self, seconds: float = LOOKUP_SECONDS) -> None:
        self._seconds = seconds
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._began_at: float | None = None  # the call that runs
        self._thread: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        """A call has not returned for so long that others need not wait for it."""
        began_at = self._began_at
        return began_at is not None and time.monotonic() - began_at >= self._seconds

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """What `work` returns or raises. Raises TimeoutError if that takes too long; what has begun goes on."""
        if self.is_held:
            raise TimeoutError
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="adapter-files", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[ResultT] = loop.create_future()
        self._jobs.put((work, loop, result))
        async with asyncio.timeout(self._seconds):
            return await result

    def stop(self) -> None:
        """End the thread when it has nothing to do any more. Idempotent."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, loop, result = job
            if result.cancelled():  # nobody waits any more
                continue
            self._began_at = time.monotonic()
            value, error = None, None
            try:
                value = work()
            except Exception as raised:  # is the caller's
                error = raised
            self._began_at = None
            try:
                loop.call_soon_threadsafe(_settle, result, value, error)
            except RuntimeError:  # the loop was closed meanwhile
                return


def _settle(result: asyncio.Future[Any], value: object, error: Exception | None) -> None:
    if result.done():
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error)


class AdapterFiles:
    """What a registry finds, without holding up the event loop. folders: where adapters may lie."""

    def __init__(self, registry: AdapterRegistry, folders: Iterable[str]) -> None:
        self._registry = registry
        self._folders = list(dict.fromkeys(map(os.path.realpath, folders)))
        self._mounts = LocalFolders(self._folders)
        self._thread = FileThread()
        self._found: OrderedDict[str, AdapterRef] = OrderedDict()
        self._was_held = False

    async def resolve(self, name: str, visible: Callable[[str], bool] | None = None) -> AdapterRef:
        """`AdapterRegistry.resolve`; while files cannot be looked at, what it gave last.

        Raises what that raises, and AdapterLoadTimeout for an adapter that was not found before.
        """
        try:
            ref = await self.look(lambda: self._registry.resolve(name, visible), name)
        except AdapterLoadTimeout:
            found = self._found.get(name)
            if found is None or (visible is not None and not visible(name)):
                raise
            return found
        except PunicaError:
            self.forget(name)
            raise
        self._found[name] = ref
        self._found.move_to_end(name)
        if len(self._found) > _MAX_KEPT:
            self._found.popitem(last=False)
        return ref

    async def names(self) -> list[str]:
        """`AdapterRegistry.names`; while the directory cannot be listed, what it gave last. Raises AdapterLoadTimeout
        if it never was."""
        last = self._registry.last_names()
        if last is not None and not self._registry.is_listing_due:
            return last
        try:
            return await self.run(self._registry.names)
        except AdapterLoadTimeout:
            if last is None:
                raise
            return last

    async def look(self, work: Callable[[], ResultT], name: str | None = None) -> ResultT:
        """`run` for the states of a few files."""
        return work() if self._mounts.are_local() else await self.run(work, name)

    async def run(self, work: Callable[[], ResultT], name: str | None = None) -> ResultT:
        """A call of the registry or of files. Raises AdapterLoadTimeout. name: of the adapter, for the message."""
        try:
            result = await self._thread.run(work)
        except TimeoutError:
            self._report()
            what = "Adapters" if name is None else f"Adapter {shorten(name, 100)!r}"
            raise AdapterLoadTimeout(
                f"{what} cannot be looked up: the file system of the adapters' directory does not answer. Those in use "
                "are served. Try again later.",
                param="model",
            ) from None
        self._was_held = False
        return result

    def forget(self, name: str) -> None:
        """What is found under this name next must come from the files."""
        self._found.pop(name, None)

    def stop(self) -> None:
        """Nothing will be asked any more."""
        self._thread.stop()

    def _report(self) -> None:
        if not self._was_held:
            self._was_held = True
            log.error("The file system of the adapters (in %s) does not answer.", ", ".join(self._folders))
