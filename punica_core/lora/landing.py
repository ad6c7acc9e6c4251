"""Page-locked memory that packed adapters are read into, so that the device copies them from where they were read.

A packed file lies as the arena does. Read into memory of the process, it would be copied once more, into a page-locked
buffer, before it is sent. Here it is read, hashed and checked in the memory that is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from punica_core.lora.arena_layout import Run
from punica_core.lora.free_ranges import FreeRanges, fewest_to_give
from punica_core.ops.layout import row_pitch

LANDING_BYTES = 512 * 1024 * 1024
"""A rank of 64 on all projections of an 8B model takes 336 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """A range of the landing memory, one adapter's until it is given back. elements: 1-D; what they hold is another
    adapter's, until all of them were written."""

    start: int
    elements: Tensor


class LandingMemory:
    """Hands out ranges of one buffer of the model's dtype. Not thread-safe: the owner holds a lock.

    page_locked: for a CUDA device; without, ordinary memory, so that everything works alike on a CPU.
    """

    def __init__(self, nbytes: int, *, dtype: torch.dtype, page_locked: bool) -> None:
        with torch.inference_mode(False):  # whoever makes it: readers' threads, which are under none, write to it
            self.buffer = torch.empty(nbytes // dtype.itemsize, dtype=dtype, pin_memory=page_locked)
        self._free = FreeRanges(self.buffer.numel())

    @property
    def num_free(self) -> int:
        """Elements that are free, in however many ranges."""
        return self._free.num_free

    def fewest_to_give(self, rooms: Sequence[Room], num_elements: int) -> int:
        """How many of `rooms`, from the first on, must be given back before so many elements can be taken; 0 if all of
        them are too few, too."""
        runs = [(Run(0, row_pitch(room.elements.numel()), room.start),) for room in rooms]
        return fewest_to_give(self._free, runs, [row_pitch(num_elements)]) or 0

    def take(self, num_elements: int) -> Room | None:
        """Room for so many elements in a row; None if there is none."""
        start = self._free.take(num_elements)
        return None if start is None else Room(start, self.buffer[start : start + num_elements])

    def give(self, room: Room) -> None:
        """Take a room back, once: nobody reads or writes it any more, and no copy from it is on its way."""
        self._free.give(room.start, room.elements.numel())
