"""Building a step's plan on the host: ops with a reference in numpy, which the compiled library replaces on the CPU.

The layout is :class:`punica_core.ops.layout.Header`'s. The twin of ``csrc/include/punica/plan.h``, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from punica_core.ops.layout import (
    EXPAND_SHARE_BYTES,
    HEADER_WORDS,
    ITEM_WORDS,
    NUM_COUNTERS,
    SHRINK_CHUNK_SHORT,
    SHRINK_CHUNK_TALL,
    row_pitch,
)

Int32Array = npt.NDArray[np.int32]

_SHORT_ROWS = 8
_MIDDLE_ROWS = 16
_TALL_ROWS = 64
_SHORT_SEGMENT = 32
"""Rows of the longest segment that is cut into short tiles."""
_MANY_UNITS = 32
"""Short shrink units: with more there is work for the whole GPU without cutting rows for it."""
MAX_DECODE_ROWS = 256
"""Steps of more rows are mostly prompts and have tiles of up to 64 rows; others have more tiles, of at most 16."""

_FEW_SUMMED_ROWS = 16
_LEAST_SUMMED_RANK = 32

_LIBRARY = torch.library.Library("punica", "FRAGMENT")


def sums_in_shrink(num_rows: int, lora_rank: int) -> bool:
    """Whether ``summed`` of ``lora_shrink`` is faster in a step of `num_rows` rows, where nothing runs beside shrink.

    Measured on an H200: each block of expand adds up a few short sums sooner than it can wait for the block that does
    so for all; and shrink of a prompt is another kernel, which always adds them up.

    lora_rank: the largest of the step.
    """
    return num_rows > MAX_DECODE_ROWS or (num_rows > _FEW_SUMMED_ROWS and lora_rank >= _LEAST_SUMMED_RANK)


def build_plan(plan: Tensor, seg_indptr: Tensor, seg_slot: Tensor, slot_rank: Tensor, max_rank: int) -> int:
    """Write the plan of a step given by its segments, and return how many words it takes.

    Args:
        plan: int32 ``[capacity]`` on the CPU (mutated); words behind the plan keep their value, as the counters do.
        seg_indptr: int32 ``[S+1]``, non-decreasing, starting at 0; empty segments are allowed.
        seg_slot: int32 ``[S]``, -1 = base model.
        slot_rank: int32 ``[N]``, for each slot the largest lora_rank over all modules.
        max_rank: largest lora_rank allowed; where a row's adapter exceeds it, the result is minus the largest.

    Raises:
        RuntimeError, IndexError: seg_indptr is not as said, a slot does not exist, or the plan does not fit.
    """
    return int(torch.ops.punica.build_plan(plan, seg_indptr, seg_slot, slot_rank, max_rank))


def build_row_plan(plan: Tensor, row_slots: Tensor, slot_rank: Tensor, max_segments: int, max_rank: int) -> int:
    """:func:`build_plan` of segments that are runs of equal neighbours in ``row_slots``, int32 ``[T]``.

    Raises:
        RuntimeError, IndexError: as there, or more than ``max_segments`` segments.
    """
    return int(torch.ops.punica.build_row_plan(plan, row_slots, slot_rank, max_segments, max_rank))


def capacity(max_rows: int, max_segments: int, max_rank: int) -> int:
    """Words that the plan of any step of so many rows and segments fits in."""
    tiles = min(max_rows, max_segments + max_rows // _SHORT_ROWS)
    chunks = -(-max_rank // SHRINK_CHUNK_SHORT)
    whole = min(max_rows, max_segments + max_rows // _TALL_ROWS)
    items = tiles * (most_shares(max_rank) + chunks) + whole
    return HEADER_WORDS + 2 * max_segments + (2 + items) * ITEM_WORDS + NUM_COUNTERS


def most_shares(max_rank: int) -> int:
    """Expand shares of the tile that has most, of lora_ranks up to ``max_rank``."""
    return -(-(2 * row_pitch(max_rank) + 4 * _MIDDLE_ROWS) // EXPAND_SHARE_BYTES)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of rows with one adapter: first row, rows, slot, lora_rank; int32, equal lengths."""

    starts: Int32Array
    lengths: Int32Array
    slots: Int32Array
    ranks: Int32Array

    def select(self, mask: npt.NDArray[np.bool_]) -> _Runs:
        return _Runs(self.starts[mask], self.lengths[mask], self.slots[mask], self.ranks[mask])

    def cut(self, heights: Int32Array) -> _Runs:
        """Runs of at most ``heights[i]`` rows each out of run i."""
        pieces = -(-self.lengths // heights)
        last = pieces.cumsum()
        owner = np.arange(len(pieces)).repeat(pieces)
        height = heights[owner]
        offset = (np.arange(last[-1], dtype=np.int32) - (last - pieces)[owner]) * height
        lengths = np.minimum(height, self.lengths[owner] - offset)
        return _Runs(self.starts[owner] + offset, lengths, self.slots[owner], self.ranks[owner])


def _heights(runs: _Runs, step_rows: int) -> Int32Array:
    """Rows of the tiles of each run. A tile reads all of an adapter, so where units are many anyway they are few."""
    few_rows = step_rows <= MAX_DECODE_ROWS
    short_units = -(-runs.lengths // _SHORT_ROWS) * -(-runs.ranks // SHRINK_CHUNK_SHORT)
    many = few_rows and int(short_units.sum()) > _MANY_UNITS
    shortest = np.where(many & (runs.ranks > SHRINK_CHUNK_SHORT), _SHORT_ROWS, _SHORT_SEGMENT)
    long = _MIDDLE_ROWS if few_rows else _TALL_ROWS
    return np.where(runs.lengths <= shortest, _SHORT_ROWS, long).astype(np.int32)


def _shares(tiles: _Runs) -> Int32Array:
    """Shares of each tile: one for every EXPAND_SHARE_BYTES that an output column of it moves."""
    cost = (((tiles.ranks + 7) & -8) << 1) + (np.minimum(tiles.lengths, _MIDDLE_ROWS) << 2)
    return (cost + (EXPAND_SHARE_BYTES - 1)) // EXPAND_SHARE_BYTES


def _items(array: Int32Array, offset: int, count: int) -> Int32Array:
    """Room for ``count`` items at ``offset``: ``[count, ITEM_WORDS]``."""
    end = offset + count * ITEM_WORDS
    if end > len(array) - NUM_COUNTERS:
        raise RuntimeError(f"the plan does not fit {len(array)} words")
    return array[offset:end].reshape(-1, ITEM_WORDS)


def _write_items(out: Int32Array, tiles: _Runs, counts: Int32Array, step: Int32Array, high: Int32Array) -> None:
    """Fill ``[items, ITEM_WORDS]`` with ``counts[i]`` items of tile i; word 3 is ``k * step[i] | high[i] << 16``."""
    owner = np.arange(len(counts)).repeat(counts)
    index = np.arange(len(owner), dtype=np.int32) - (counts.cumsum() - counts)[owner]
    out[:, 0], out[:, 1], out[:, 2] = tiles.starts[owner], tiles.lengths[owner], tiles.slots[owner]
    out[:, 3] = index * step[owner] + (high << 16)[owner]


def _write_tiles(array: Int32Array, offset: int, runs: _Runs) -> int:
    """Fill the items at ``offset`` with runs cut into tiles as high as can be; returns how many."""
    if not len(runs.starts):
        return 0
    tiles = runs.cut(np.full_like(runs.lengths, _TALL_ROWS))
    ones, zeros = np.ones_like(tiles.starts), np.zeros_like(tiles.starts)
    _write_items(_items(array, offset, len(tiles.starts)), tiles, ones, zeros, zeros)
    return len(tiles.starts)


def _reference_plan(plan: Tensor, seg_indptr: Tensor, seg_slot: Tensor, slot_rank: Tensor, max_rank: int) -> int:
    return _write_plan(plan.numpy(), seg_indptr.numpy(), seg_slot.numpy(), slot_rank.numpy(), max_rank)


def _reference_row_plan(plan: Tensor, row_slots: Tensor, slot_rank: Tensor, max_segments: int, max_rank: int) -> int:
    rows = row_slots.numpy()
    starts = np.flatnonzero(rows[1:] != rows[:-1]) + 1
    indptr = np.zeros(len(starts) + 2 if len(rows) else 1, np.int32)
    indptr[1:-1], indptr[-1] = starts, len(rows)
    if len(indptr) - 1 > max_segments:
        raise RuntimeError(f"{len(indptr) - 1} segments are more than allowed")
    return _write_plan(plan.numpy(), indptr, rows[indptr[:-1]], slot_rank.numpy(), max_rank)


def _write_plan(array: Int32Array, indptr: Int32Array, slots: Int32Array, slot_rank: Int32Array, max_rank: int) -> int:
    lengths = indptr[1:] - indptr[:-1]
    if indptr[0] != 0 or int(lengths.min(initial=0)) < 0:
        raise RuntimeError("seg_indptr must start at 0 and not decrease")
    runs = _Runs(indptr[:-1], lengths, slots, np.where(slots >= 0, slot_rank[slots], 0))
    blank = runs.select((runs.ranks <= 0) & (lengths > 0))
    runs = runs.select((runs.ranks > 0) & (lengths > 0))
    if (largest := int(runs.ranks.max(initial=0))) > max_rank:
        return -largest
    slot_offset = HEADER_WORDS + len(indptr)
    expand_offset = -(-(slot_offset + len(slots)) // ITEM_WORDS) * ITEM_WORDS
    num_shares = num_units = least_shares = 0
    if len(runs.starts):
        heights = _heights(runs, int(indptr[-1]))
        tiles = runs.cut(heights)
        chunk = np.where(heights == _SHORT_ROWS, SHRINK_CHUNK_SHORT, SHRINK_CHUNK_TALL).astype(np.int32)
        chunk = chunk.repeat(-(-runs.lengths // heights))
        chunks, shares = -(-tiles.ranks // chunk), _shares(tiles)
        num_shares, num_units, least_shares = int(shares.sum()), int(chunks.sum()), int(shares.min())
        items = _items(array, expand_offset, num_shares + num_units)
        _write_items(items[:num_shares], tiles, shares, np.ones_like(shares), shares)
        _write_items(items[num_shares:], tiles, chunks, chunk, chunk)
    shrink_offset = expand_offset + num_shares * ITEM_WORDS
    blank_offset = shrink_offset + num_units * ITEM_WORDS
    num_blanks = _write_tiles(array, blank_offset, blank)
    tile_offset = blank_offset + num_blanks * ITEM_WORDS
    num_tiles = _write_tiles(array, tile_offset, runs)
    array[HEADER_WORDS:slot_offset] = indptr
    array[slot_offset : slot_offset + len(slots)] = slots
    array[slot_offset + len(slots) : expand_offset] = 0
    rows = int(indptr[-1])
    array[:HEADER_WORDS] = (
        *(len(slots), rows, HEADER_WORDS, slot_offset),
        *(num_units, shrink_offset, num_shares, expand_offset),
        *(least_shares, row_pitch(largest), num_blanks, blank_offset),
        *(num_tiles, tile_offset, 0, 0),
    )
    return tile_offset + num_tiles * ITEM_WORDS


def _register() -> None:
    # Not under the CPU key: there the compiled library registers its own.
    key = "CompositeExplicitAutograd"
    _LIBRARY.define(
        "build_plan(Tensor(a!) plan, Tensor seg_indptr, Tensor seg_slot, Tensor slot_rank, int max_rank) -> int"
    )
    _LIBRARY.define(
        "build_row_plan(Tensor(a!) plan, Tensor row_slots, Tensor slot_rank, int max_segments, int max_rank) -> int"
    )
    _LIBRARY.impl("build_plan", _reference_plan, key)
    _LIBRARY.impl("build_row_plan", _reference_row_plan, key)


_register()
