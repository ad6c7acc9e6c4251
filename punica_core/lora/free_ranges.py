"""The free ranges of the arena: first fit, neighbours merged. Pure bookkeeping in elements."""

from __future__ import annotations

from bisect import bisect
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
        index = self._first_of(size)
        if index is None:
            return None
        start = self._ranges[index][0]
        self._cut(index, size)
        return start

    def give(self, start: int, num_elements: int) -> None:
        """Make a range free that was taken as a whole or in part."""
        size = row_pitch(num_elements)
        self.num_free += size
        first = last = bisect(self._ranges, (start,))
        end = start + size
        if last < len(self._ranges) and self._ranges[last][0] == end:
            end += self._ranges[last][1]
            last += 1
        if first and sum(self._ranges[first - 1]) == start:
            first -= 1
            start = self._ranges[first][0]
        self._ranges[first:last] = [(start, end - start)]

    def give_runs(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.give(run.start, run.length)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether `take_parts` would find room. More free ranges never make a "no" of a "yes"."""
        return self._shares(sizes) is not None

    def take_parts(self, sizes: Sequence[int]) -> tuple[Run, ...] | None:
        """Room for parts of these (aligned) sizes, which follow one another in a layout: one range if there is one,
        else several, cut between parts. None, and nothing has changed, if they do not fit.

        They fit whenever as much is free as they and one largest part for each free range take together.
        """
        shares = self._shares(sizes)
        if shares is None:
            return None
        runs: list[Run] = []
        source = 0
        for index, used in shares:
            runs.append(Run(source, used, self._ranges[index][0]))
            source += used
        for index, used in reversed(shares):
            self._cut(index, used)
        return tuple(runs)

    def _shares(self, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
        """(index of a free range, elements of it) for each run of an adapter, ascending; None if it does not fit."""
        total = sum(sizes)
        if total > self.num_free:
            return None
        index = self._first_of(total)
        return self._scattered(sizes) if index is None else [(index, total)]

    def _scattered(self, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
        """Fill the free ranges in order, each as far as whole parts go."""
        shares: list[tuple[int, int]] = []
        part = 0
        for index, (_, length) in enumerate(self._ranges):
            used = 0
            while part < len(sizes) and used + sizes[part] <= length:
                used += sizes[part]
                part += 1
            if used:
                shares.append((index, used))
        return shares if part == len(sizes) else None

    def _first_of(self, size: int) -> int | None:
        """Index of the first free range that is long enough."""
        return next((index for index, (_, length) in enumerate(self._ranges) if length >= size), None)

    def _cut(self, index: int, size: int) -> None:
        """The first elements of a free range are no longer free."""
        start, length = self._ranges[index]
        self._ranges[index : index + 1] = [(start + size, length - size)] if length > size else []
        self.num_free -= size


def fewest_to_give(
    free: FreeRanges, owners: Sequence[Sequence[Run]], sizes: Sequence[int], *, at_least: int = 0
) -> int | None:
    """How many owners, from the first on, must give their runs for parts of these sizes to fit; None: all are too few.

    Nothing is changed. The search tries few counts, not each: 1, 2, 4, … more than give enough in sum, then halves the
    last step, for what fits goes on fitting when more is given.
    """
    total, room, count = sum(sizes), free.num_free, 0
    while count < len(owners) and (room < total or count < at_least):
        room += sum(run.length for run in owners[count])
        count += 1
    if room < total or count < at_least:
        return None
    trial = _with(free, owners[:count])
    if trial.fits(sizes):
        return count
    step = 1
    while count < len(owners):
        more = _with(trial, owners[count : count + step])
        if more.fits(sizes):
            return _fewest(trial, owners[count : count + step], sizes) + count
        trial, count, step = more, count + step, 2 * step
    return None


def _fewest(free: FreeRanges, owners: Sequence[Sequence[Run]], sizes: Sequence[int]) -> int:
    """The same where none is too few and all are enough."""
    low, high = 0, len(owners)
    while high - low > 1:
        middle = (low + high) // 2
        trial = _with(free, owners[low:middle])
        if trial.fits(sizes):
            high = middle
        else:
            free, low = trial, middle
    return high


def _with(free: FreeRanges, owners: Iterable[Sequence[Run]]) -> FreeRanges:
    """The free ranges, and those of `owners` too."""
    trial = free.copy()
    for runs in owners:
        trial.give_runs(runs)
    return trial
