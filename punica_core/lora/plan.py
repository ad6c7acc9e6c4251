"""From the rows of a step to its LoRA segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from punica_core.lora.weights import AdapterWeights
from punica_core.scheduler.plan import BASE_SLOT


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, end) of a step use `adapter`."""

    start: int
    end: int
    adapter: AdapterWeights

    @property
    def num_rows(self) -> int:
        return self.end - self.start


def build_segments(runs: Iterable[tuple[int, int]], weights_of: Callable[[int], AdapterWeights]) -> tuple[Segment, ...]:
    """Segments of a step's rows, in order, without those of the base model.

    runs: (slot, number of rows) of consecutive rows; neighbours of one slot are merged, empty runs are dropped.
    weights_of: the adapter in a slot; called once per segment.
    """
    merged: list[tuple[int, int, int]] = []
    end = 0
    for slot, count in runs:
        start, end = end, end + count
        if count == 0:
            continue
        if merged and merged[-1][0] == slot:
            merged[-1] = (slot, merged[-1][1], end)
        else:
            merged.append((slot, start, end))
    return tuple(Segment(start, end, weights_of(slot)) for slot, start, end in merged if slot != BASE_SLOT)
