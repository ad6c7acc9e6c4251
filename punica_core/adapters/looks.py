"""Which folders are being looked at, and since when: one that does not answer is known by it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

HELD_SECONDS = 1.0
"""A look that takes longer is believed to hang."""

_ResultT = TypeVar("_ResultT")


class Looks:
    """Safe to use from several threads, each of which looks at one folder at a time."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[str, float]] = {}  # by thread

    @contextlib.contextmanager
    def at(self, folder: str) -> Iterator[None]:
        """While this thread looks at a folder; within such a look, at another one.

        Raises TimeoutError if another thread does and gets no answer.
        """
        thread = threading.get_ident()
        outer = self._at.get(thread)
        if self.is_held(folder):
            raise TimeoutError
        self._at[thread] = folder, time.monotonic()
        try:
            yield
        finally:
            if outer is None:
                del self._at[thread]
            else:
                self._at[thread] = outer[0], time.monotonic()

    def look(self, folder: str, look: Callable[[str], _ResultT], otherwise: _ResultT) -> _ResultT:
        """What a look at a folder gives; `otherwise` if another thread gets no answer there."""
        try:
            with self.at(folder):
                return look(folder)
        except TimeoutError:
            return otherwise

    def is_held(self, folder: str) -> bool:
        """Whether another thread looks at this folder and gets no answer."""
        return any(at == folder and self._hangs(thread, since) for thread, (at, since) in list(self._at.items()))

    def held(self) -> frozenset[str]:
        """Folders where another thread gets no answer."""
        return frozenset(at for thread, (at, since) in list(self._at.items()) if self._hangs(thread, since))

    def _hangs(self, thread: int, since: float) -> bool:
        return thread != threading.get_ident() and time.monotonic() - since >= HELD_SECONDS
