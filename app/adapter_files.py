"""Looks at the files of adapters without holding up the event loop: a dead mount or disk may hold a call for ever.

Threads make the calls (`app.file_threads`): those for one adapter one after another, so that one whose files do not
answer costs one thread, and only requests for it. Requests for adapters that were found before go on even so, with the
files' state as of then: the worker has them in memory, or says that it cannot read them.

On a local disk the few calls that each request makes take 20 µs in place. On a thread they take 70, and milliseconds
while the event loop is busy, since each of them waits for the GIL. So what was looked at a moment ago is looked at in
place: the kernel answers from memory, be the disk as dead as it may.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from app.file_threads import FileThreads
from app.mounts import LocalFolders
from punica_core.adapters.header import shorten
from punica_core.adapters.registry import AdapterRegistry
from punica_core.errors import AdapterError, AdapterLoadTimeout, PunicaError
from punica_core.protocol import AdapterRef

log = logging.getLogger(__name__)

HOT_SECONDS = 10.0
"""How long the kernel is believed to remember files of a local disk that were looked at."""
MAX_HELD = 8
"""Folders that do not answer, beyond which nobody looks at all of them any more: each has cost a thread."""
_MAX_KEPT = 4096

ResultT = TypeVar("ResultT")


class AdapterFiles:
    """What a registry finds, without holding up the event loop. folders: where adapters may lie. clock: seconds."""

    def __init__(
        self, registry: AdapterRegistry, folders: Iterable[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = registry
        self._folders = list(dict.fromkeys(map(os.path.realpath, folders)))
        self._mounts = LocalFolders(self._folders)
        self._clock = clock
        self._threads = FileThreads()
        self._found: OrderedDict[str, AdapterRef] = OrderedDict()
        self._looked_at: OrderedDict[Hashable, float] = OrderedDict()
        self._reported: set[Hashable] = set()
        self._refused: OrderedDict[str, str] = OrderedDict()

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
        except AdapterError as error:
            self.forget(name)
            self._log_refusal(name, error)
            raise type(error)(f"Adapter {name!r}: {error.message}", param="model") from None
        except PunicaError:
            self.forget(name)
            raise
        self._refused.pop(name, None)
        _keep(self._found, name, ref)
        return ref

    async def names(self) -> list[str]:
        """`AdapterRegistry.names`; while the directory cannot be listed, what it gave last. Raises AdapterLoadTimeout
        if it never was."""
        last = self._registry.last_names()
        if last is not None and not self._registry.is_listing_due:
            return last
        try:
            return await self.run_over_all(self._registry.names, "names")
        except AdapterLoadTimeout:
            if last is None:
                raise
            return last

    async def run_over_all(self, work: Callable[[], ResultT], what: str) -> ResultT:
        """`run` for a call of the registry, named `what`, that looks at many adapters: it is made again without those
        that did not answer."""
        while True:
            held = self._registry.held_folders()
            if len(held) > MAX_HELD:
                raise self._timeout(None)
            try:
                return await self.run(work, key=(what, held))
            except AdapterLoadTimeout:
                if self._registry.held_folders() <= held:
                    raise

    async def look(self, work: Callable[[], ResultT], name: str, what: str = "") -> ResultT:
        """`run` for the states of a few files of an adapter, always the same ones. what: which, if there are others."""
        key = (name, what)
        looked_at = self._looked_at.pop(key, None)
        if looked_at is None or self._clock() - looked_at >= HOT_SECONDS or not self._mounts.are_local():
            result = await self.run(work, name)
        else:
            try:
                result = work()
            except TimeoutError:  # others know already that it hangs
                raise self._timeout(name) from None
        _keep(self._looked_at, key, self._clock())
        return result

    async def run(self, work: Callable[[], ResultT], name: str | None = None, key: Hashable = None) -> ResultT:
        """A call of the registry or of files. Raises AdapterLoadTimeout. name: of the adapter, for the message.

        key: what else it is about, if not one adapter.
        """
        about = name if name is not None else key
        try:
            result = await self._threads.run(work, about)
        except TimeoutError:
            self._report(about)
            raise self._timeout(name) from None
        self._reported.discard(about)
        return result

    def forget(self, name: str) -> None:
        """What is found under this name next must come from the files."""
        self._found.pop(name, None)
        self._looked_at.pop((name, ""), None)

    def stop(self) -> None:
        """Nothing will be asked any more."""
        self._threads.stop()

    def _timeout(self, name: str | None) -> AdapterLoadTimeout:
        what = "Adapters" if name is None else f"Adapter {shorten(name, 100)!r}"
        return AdapterLoadTimeout(
            f"{what} cannot be looked up: the file system of the adapters' directory does not answer. Those in use "
            "are served. Try again later.",
            param="model",
        )

    def _log_refusal(self, name: str, error: AdapterError) -> None:
        """Once until its files are another matter."""
        if self._refused.get(name) != error.message:
            log.warning("Adapter %r is refused: %s: %s", name, error.code, error.message)
        _keep(self._refused, name, error.message)

    def _report(self, about: Hashable) -> None:
        """Log it once until it answers."""
        if about in self._reported or len(self._reported) >= _MAX_KEPT:
            return
        self._reported.add(about)
        what = f"adapter {shorten(about, 100)!r}" if isinstance(about, str) else "the adapters' directory"
        log.error("The file system of %s (in %s) does not answer.", what, ", ".join(self._folders))


def _keep(kept: OrderedDict[Hashable, ResultT] | OrderedDict[str, ResultT], key: Any, value: ResultT) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > _MAX_KEPT:
        kept.popitem(last=False)
