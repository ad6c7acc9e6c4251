"""Who runs."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from punica_core.scheduler.sequence import Sequence

_serial = attrgetter("serial")


class RunningSequences:
    """Sequences that run, oldest first. Iterating goes through those that ran when it began."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.copy())

    @property
    def newest(self) -> Sequence:
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_serial)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.serial, key=_serial)
        assert self._sequences[index] is sequence, f"sequence {sequence.request_id} does not run"
        del self._sequences[index]
