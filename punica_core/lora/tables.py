"""Adapter weights on the device: a flat arena of matrices and the tables that say where each one lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from punica_core.lora.arena_layout import ModuleShape, Part, Run, lay_out, record_words
from punica_core.lora.free_ranges import FreeRanges
from punica_core.ops.layout import RECORD_WORDS, row_pitch


class ArenaFull(Exception):
    """No free range of the arena is long enough. Evict an adapter and try again."""


class Arena:
    """A byte-budgeted buffer of the model's dtype that hands out ranges of elements.

    First fit, neighbours merged on release. Every range starts at a multiple of ROW_ALIGNMENT elements.
    """

    def __init__(self, num_elements: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        num_elements = row_pitch(num_elements)
        self.buffer = torch.zeros(num_elements, dtype=dtype, device=device)
        self.free = FreeRanges(num_elements)

    @property
    def num_free(self) -> int:
        """Elements that are free, in however many ranges."""
        return self.free.num_free

    def allocate(self, num_elements: int) -> int:
        """Reserve a range and return its first element.

        Raises:
            ArenaFull: no free range is long enough; nothing has changed.
        """
        start = self.free.take(num_elements)
        if start is None:
            raise ArenaFull(
                f"no room for {row_pitch(num_elements)} elements: {self.num_free} of {self.buffer.numel()} are free"
            )
        return start

    def release(self, start: int, num_elements: int) -> None:
        """Give back a range that :meth:`allocate` returned for ``num_elements``."""
        self.free.give(start, num_elements)


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """One module's part of an adapter. A ``[R, I]``, B ``[O, R]`` as PEFT stores them, any device or float dtype.

    ``row_gain`` ``[O]`` multiplies the sum of base and adapter (DoRA); ``bias`` ``[O]`` is added last. Where the base
    layer has a bias of its own outside the gain, pass ``bias = b - row_gain * b``.
    """

    a: Tensor
    b: Tensor
    scale: float
    row_gain: Tensor | None = None
    bias: Tensor | None = None


def shape_of(weights: ModuleWeights) -> ModuleShape:
    """What of ``weights`` takes room in the arena."""
    lora_rank, in_features = weights.a.shape
    return ModuleShape(
        lora_rank, in_features, weights.b.size(0), weights.row_gain is not None, weights.bias is not None
    )


def is_affine(modules: Iterable[ModuleWeights]) -> bool:
    """Whether any of them changes what it is added to (a row gain) or adds what no row can change (a bias)."""
    return any(weights.row_gain is not None or weights.bias is not None for weights in modules)


def num_module_elements(weights: ModuleWeights) -> int:
    """Arena elements that ``weights`` take."""
    return lay_out({0: shape_of(weights)}).num_elements


class AdapterTables:
    """Records of every module and slot, with a host mirror.

    ``records`` is int64 ``[modules, N, RECORD_WORDS]`` on the device; the modules of a fused group are adjacent, so
    ``group(first, count)`` is the table of an op. In memory the records of a slot lie together: a slot is written by
    one copy, and those that a step reads fill few pages, however many slots there are.

    Of each slot the host knows ``slot_rank``, int32 ``[N]``, the largest lora_rank of its adapter, and ``slot_affine``,
    bool ``[N]``, whether any of its records has a gain or bias.
    """

    def __init__(self, num_modules: int, num_slots: int, *, device: torch.device | str = "cpu") -> None:
        by_slot = torch.zeros(num_slots, num_modules, RECORD_WORDS, dtype=torch.int64, device=device)
        self.records = by_slot.transpose(0, 1)
        self.slot_rank: npt.NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.slot_affine: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self._ranges: dict[int, Run] = {}

    def group(self, first_module: int, num_slices: int) -> Tensor:
        """The ``[slices, N, RECORD_WORDS]`` table of ``num_slices`` adjacent modules. A view: stays valid."""
        return self.records[first_module : first_module + num_slices]

    def write(self, slot: int, modules: Mapping[int, ModuleWeights], arena: Arena) -> None:
        """Copy an adapter into the arena and point ``slot`` at it. The slot must be empty.

        The copies are queued on the current stream. The adapter takes one range of the arena.

        Raises:
            ArenaFull: nothing has changed.
        """
        if slot in self._ranges:
            raise ValueError(f"slot {slot} is in use; clear it first")
        layout = lay_out({module: shape_of(weights) for module, weights in modules.items()})
        runs = (Run(0, layout.num_elements, arena.allocate(layout.num_elements)),)
        self._ranges[slot] = runs[0]
        rows = torch.zeros(self.records.size(0), RECORD_WORDS, dtype=torch.int64)
        for module, weights in modules.items():
            place = layout.places[module]
            rows[module] = torch.tensor(record_words(place, weights.scale, runs))
            for part, matrix in zip(place.parts, matrices(weights), strict=True):
                _store(arena.buffer[runs[0].start + part.start :], part, matrix)
        self.records[:, slot].copy_(rows)
        self.slot_rank[slot] = max((weights.a.size(0) for weights in modules.values()), default=0)
        self.slot_affine[slot] = is_affine(modules.values())

    def clear(self, slot: int, arena: Arena) -> None:
        """Empty a slot and give its range of the arena back. No step that reads the slot may be queued."""
        run = self._ranges.pop(slot)
        arena.release(run.start, run.length)
        self.records[:, slot].zero_()
        self.slot_rank[slot], self.slot_affine[slot] = 0, False


def matrices(weights: ModuleWeights) -> list[Tensor]:
    """The parts of a module as 2-D tensors, in the order in which `arena_layout` has them."""
    vectors = [vector[None] for vector in (weights.row_gain, weights.bias) if vector is not None]
    return [weights.a, weights.b, *vectors]


def _store(room: Tensor, part: Part, matrix: Tensor) -> None:
    """Copy a matrix to the start of ``room``, 1-D; the padding of its rows becomes 0."""
    rows = room[: part.height * part.pitch].view(part.height, part.pitch)
    rows[:, : part.width].copy_(matrix)
    rows[:, part.width :].zero_()
