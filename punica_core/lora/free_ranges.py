"""The free ranges of the arena: first fit, neighbours merged. Pure bookkeeping in elements."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from punica_core.lora.arena_layout import Run
from punica_core.ops.layout import row_pitch


class FreeRanges:
    """Which elements of [0, num_elements) are free. Sizes are rounded up to ROW_ALIGNMENT, so starts are aligned."""

    def __init__(self, num_elements: int) -> None:
        self.num_free = num_elements
        self._ranges: list[tuple[int, int]] = [(0, num_elements)] if num_elements else []

    def copy(self) -> FreeRanges:
        """The same ranges, to try something out."""
        other = FreeRanges(0)
        other.num_free = self.num_free
        other._ranges = list(self._ranges)
        return other

    def take(self, num_elements: int) -> int | None:
        """The start of a range that is no longer free; None, and nothing has changed, if none is long enough."""
        size = row_pitch(num_elements)
        for index, (start, length) in enumerate(self._ranges):
            if length >= size:
                self._ranges[index : index + 1] = [(start + size, length - size)] if length > size else []
                self.num_free -= size
                return start
        return None

    def give(self, start: int, num_elements: int) -> None:
        """Make a range free that was taken as a whole or in part."""
        size = row_pitch(num_elements)
        self.num_free += size
        insort(self._ranges, (start, size))
        merged: list[tuple[int, int]] = []
        for begin, length in self._ranges:
            if merged and merged[-1][0] + merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self._ranges = merged

    def give_runs(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.give(run.start, run.length)

    def take_parts(self, sizes: Sequence[int]) -> tuple[Run, ...] | None:
        """Room for parts of these (aligned) sizes, which follow one another in a layout: one range if there is one,
        else several, cut between parts. None, and nothing has changed, if they do not fit.

        They fit whenever as much is free as they and one largest part for each free range take together.
        """
        total = sum(sizes)
        start = self.take(total)
        if start is not None:
            return (Run(0, total, start),)
        if total > self.num_free:
            return None
        return self._scatter(sizes)

    def _scatter(self, sizes: Sequence[int]) -> tuple[Run, ...] | None:
        """Fill the free ranges in order, each as far as whole parts go."""
        runs: list[Run] = []
        left: list[tuple[int, int]] = []
        source = index = 0
        for start, length in self._ranges:
            used = 0
            while index < len(sizes) and used + sizes[index] <= length:
                used += sizes[index]
                index += 1
            if used:
                runs.append(Run(source, used, start))
                source += used
            if used < length:
                left.append((start + used, length - used))
        if index < len(sizes):
            return None
        self._ranges = left
        self.num_free -= source
        return tuple(runs)
