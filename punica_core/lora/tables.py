"""Adapter weights on the device: a flat arena of matrices and the tables that say where each one lies."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from punica_core.ops.layout import RECORD_WORDS, Field, row_pitch


class ArenaFull(Exception):
    """No free range of the arena is long enough. Evict an adapter and try again."""


class Arena:
    """A byte-budgeted buffer of the model's dtype that hands out ranges of elements.

    First fit, neighbours merged on release. Every range starts at a multiple of ROW_ALIGNMENT elements.
    """

    def __init__(self, num_elements: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        num_elements = row_pitch(num_elements)
        self.buffer = torch.zeros(num_elements, dtype=dtype, device=device)
        self.num_free = num_elements
        self._free: list[tuple[int, int]] = [(0, num_elements)] if num_elements else []

    def allocate(self, num_elements: int) -> int:
        """Reserve a range and return its first element.

        Raises:
            ArenaFull: no free range is long enough; nothing has changed.
        """
        size = row_pitch(num_elements)
        for index, (start, length) in enumerate(self._free):
            if length >= size:
                self._free[index : index + 1] = [(start + size, length - size)] if length > size else []
                self.num_free -= size
                return start
        raise ArenaFull(f"no room for {size} elements: {self.num_free} of {self.buffer.numel()} are free")

    def release(self, start: int, num_elements: int) -> None:
        """Give back a range that :meth:`allocate` returned for ``num_elements``."""
        size = row_pitch(num_elements)
        self.num_free += size
        insort(self._free, (start, size))
        merged: list[tuple[int, int]] = []
        for begin, length in self._free:
            if merged and merged[-1][0] + merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self._free = merged


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


def num_module_elements(weights: ModuleWeights) -> int:
    """Arena elements that ``weights`` take."""
    sizes = [weights.a.numel(), weights.b.size(0) * row_pitch(weights.b.size(1))]
    sizes += [t.numel() for t in (weights.row_gain, weights.bias) if t is not None]
    return sum(row_pitch(size) for size in sizes)


class AdapterTables:
    """Records of every module and slot, with a host mirror.

    ``records`` is int64 ``[modules, N, RECORD_WORDS]`` on the device; the modules of a fused group are adjacent, so
    ``group(first, count)`` is the table of an op. Slots are written whole, by one copy.
    """

    def __init__(self, num_modules: int, num_slots: int, *, device: torch.device | str = "cpu") -> None:
        self.records = torch.zeros(num_modules, num_slots, RECORD_WORDS, dtype=torch.int64, device=device)
        self.slot_rank: npt.NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self._ranges: dict[int, tuple[int, int]] = {}

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
        size = sum(num_module_elements(weights) for weights in modules.values())
        start = arena.allocate(size)
        self._ranges[slot] = (start, size)
        rows = torch.zeros(self.records.size(0), RECORD_WORDS, dtype=torch.int64)
        writer = _Writer(arena.buffer, start)
        for module, weights in modules.items():
            writer.write(rows[module], weights)
        self.records[:, slot].copy_(rows)
        self.slot_rank[slot] = max((weights.a.size(0) for weights in modules.values()), default=0)

    def clear(self, slot: int, arena: Arena) -> None:
        """Empty a slot and give its range of the arena back. No step that reads the slot may be queued."""
        start, size = self._ranges.pop(slot)
        arena.release(start, size)
        self.records[:, slot].zero_()
        self.slot_rank[slot] = 0


class _Writer:
    """Lays the matrices of one adapter one after another."""

    def __init__(self, buffer: Tensor, start: int) -> None:
        self._buffer = buffer
        self._cursor = start

    def write(self, record: Tensor, weights: ModuleWeights) -> None:
        """Store the weights of a module and fill its record (int64 ``[RECORD_WORDS]``)."""
        lora_rank = weights.a.size(0)
        record[Field.A_OFFSET] = self._put(weights.a, weights.a.size(1))
        record[Field.B_OFFSET] = self._put(weights.b, row_pitch(lora_rank))
        record[Field.GAIN_OFFSET] = -1 if weights.row_gain is None else self._put(weights.row_gain[None], -1)
        record[Field.BIAS_OFFSET] = -1 if weights.bias is None else self._put(weights.bias[None], -1)
        write_rank_and_scale(record, lora_rank, weights.scale)

    def _put(self, matrix: Tensor, pitch: int) -> int:
        height, width = matrix.shape
        pitch = width if pitch < 0 else pitch
        offset = self._cursor
        rows = self._buffer[offset : offset + height * pitch].view(height, pitch)
        rows[:, :width].copy_(matrix)
        rows[:, width:].zero_()
        self._cursor += row_pitch(height * pitch)
        return offset


def write_rank_and_scale(record: Tensor, lora_rank: int, scale: float) -> None:
    """Set lora_rank and scale of a record (int64 ``[RECORD_WORDS]`` on the CPU)."""
    packed = record[Field.RANK_AND_SCALE : Field.RANK_AND_SCALE + 1]
    packed.view(torch.int32)[0] = lora_rank
    packed.view(torch.float32)[1] = scale
