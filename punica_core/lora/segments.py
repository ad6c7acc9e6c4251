"""Metadata of one step: which rows belong to which adapter, and the work list that the kernels walk.

Built once a step for all layers, on the host, and sent in one asynchronous copy to a device buffer whose address and
capacity never change, so that a captured CUDA graph replays for any mix of adapters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from punica_core.ops.layout import (
    EXPAND_SHARE_BYTES,
    ITEM_WORDS,
    MAX_EXPAND_SHARES,
    SHRINK_CHUNK_SHORT,
    SHRINK_CHUNK_TALL,
    Header,
)

Int32Array = npt.NDArray[np.int32]

_SHORT_ROWS = 8
_MIDDLE_ROWS = 16
_TALL_ROWS = 64
_SHORT_SEGMENT = 32
"""Rows of the longest segment that is cut into short tiles."""
_TALL_SEGMENT = 128
"""Rows of the longest segment of a decode step that is cut into middle tiles."""
_MAX_DECODE_ROWS = 256
"""Steps of more rows take the kernels for prompts."""
_NUM_STAGING = 4


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


def _heights(lengths: Int32Array, middle_limit: int) -> Int32Array:
    """Rows of the tiles of each segment."""
    return np.where(
        lengths <= _SHORT_SEGMENT, _SHORT_ROWS, np.where(lengths <= middle_limit, _MIDDLE_ROWS, _TALL_ROWS)
    ).astype(np.int32)


def _shares(tiles: _Runs) -> Int32Array:
    """Shares of each tile: one for every EXPAND_SHARE_BYTES that an output column of it moves."""
    cost = (((tiles.ranks + 7) & -8) << 1) + (np.minimum(tiles.lengths, _MIDDLE_ROWS) << 2)
    return (cost + (EXPAND_SHARE_BYTES - 1)) // EXPAND_SHARE_BYTES


def _write_expand_shares(out: Int32Array, tiles: _Runs, shares: Int32Array) -> None:
    """Fill ``[shares, ITEM_WORDS]`` with ``shares[i]`` shares of tile i."""
    if len(out) == len(shares):
        out[:, 0], out[:, 1], out[:, 2], out[:, 3] = tiles.starts, tiles.lengths, tiles.slots, 1 << 16
        return
    owner = np.arange(len(shares)).repeat(shares)
    index = np.arange(len(owner), dtype=np.int32) - (shares.cumsum() - shares)[owner]
    out[:, 0], out[:, 1], out[:, 2] = tiles.starts[owner], tiles.lengths[owner], tiles.slots[owner]
    out[:, 3] = index + (shares << 16)[owner]


def _write_shrink_units(out: Int32Array, tiles: _Runs, chunk: Int32Array, chunks: Int32Array) -> None:
    """Fill ``[units, ITEM_WORDS]`` with ``chunks[i]`` units of ``chunk[i]`` ranks for tile i."""
    if len(out) == len(chunks):
        out[:, 0], out[:, 1], out[:, 2], out[:, 3] = tiles.starts, tiles.lengths, tiles.slots, chunk << 16
        return
    owner = np.arange(len(chunks)).repeat(chunks)
    index = np.arange(len(owner), dtype=np.int32) - (chunks.cumsum() - chunks)[owner]
    chunk = chunk[owner]
    out[:, 0], out[:, 1], out[:, 2] = tiles.starts[owner], tiles.lengths[owner], tiles.slots[owner]
    out[:, 3] = index * chunk + (chunk << 16)


class SegmentPlan:
    """Static buffers of a step's segments, refilled in place.

    ``plan`` is the device tensor the ops take. Rows of a step must be ordered so that one adapter's rows are adjacent
    (more than one segment may have the same slot; that only costs speed).

    Args:
        max_rows: most rows a step may have.
        max_rank: bound of every lora_rank.
        device: where the ops run.
        max_segments: most segments a step may have; default max_rows.
    """

    def __init__(
        self, max_rows: int, *, max_rank: int, device: torch.device | str = "cpu", max_segments: int | None = None
    ) -> None:
        self.max_rows = max_rows
        self.max_rank = max_rank
        self.max_segments = max_rows if max_segments is None else max_segments
        self.device = torch.device(device)
        tiles = min(max_rows, self.max_segments + max_rows // _SHORT_ROWS)
        chunks = -(-max_rank // SHRINK_CHUNK_SHORT)
        capacity = (
            len(Header) + 2 * self.max_segments + 2 * ITEM_WORDS + tiles * ITEM_WORDS * (MAX_EXPAND_SHARES + chunks)
        )
        self.plan = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        pinned = self.device.type == "cuda"
        self._staging = [torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(_NUM_STAGING)]
        self._arrays: list[Int32Array] = [staging.numpy() for staging in self._staging]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_STAGING
        self._next = 0
        self._last_rows: tuple[Int32Array, Int32Array] | None = None
        self.num_segments = 0
        self.num_rows = 0
        self.num_adapter_rows = 0

    @property
    def seg_indptr(self) -> Tensor:
        """int32 ``[S+1]`` view of the plan: first row of each segment, then the number of rows."""
        return self.plan[len(Header) : len(Header) + self.num_segments + 1]

    @property
    def seg_slot(self) -> Tensor:
        """int32 ``[S]`` view of the plan: slot of each segment, -1 = base model."""
        start = len(Header) + self.num_segments + 1
        return self.plan[start : start + self.num_segments]

    def set_rows(self, row_slots: Int32Array, slot_rank: Int32Array) -> None:
        """Describe a step by the slot of each row, ``int32 [T]``, -1 = base model. See :meth:`set_segments`.

        Does nothing when rows and ranks are those of the step before, as they are in most decode steps.
        """
        ranks = slot_rank[row_slots]
        if self._last_rows is not None:
            last_slots, last_ranks = self._last_rows
            if np.array_equal(row_slots, last_slots) and np.array_equal(ranks, last_ranks):
                return
        if len(row_slots) == 0:
            self.set_segments(np.zeros(1, np.int32), row_slots, slot_rank)
            return
        starts = np.flatnonzero(row_slots[1:] != row_slots[:-1]) + 1
        indptr = np.empty(len(starts) + 2, np.int32)
        indptr[0], indptr[1:-1], indptr[-1] = 0, starts, len(row_slots)
        self.set_segments(indptr, row_slots[indptr[:-1]], slot_rank)
        self._last_rows = (row_slots.copy(), ranks)

    def set_segments(self, seg_indptr: Int32Array, seg_slot: Int32Array, slot_rank: Int32Array) -> None:
        """Describe a step by segments and send it to the device without waiting for it.

        Args:
            seg_indptr: int32 ``[S+1]``, non-decreasing, starting at 0; empty segments are allowed.
            seg_slot: int32 ``[S]``, -1 = base model.
            slot_rank: int32 ``[N]``, for each slot the largest lora_rank over all modules.

        Raises:
            ValueError: more rows or segments than this plan was made for, or a lora_rank above max_rank.
        """
        self._last_rows = None
        self._check(seg_indptr, seg_slot)
        lengths = seg_indptr[1:] - seg_indptr[:-1]
        runs = _Runs(seg_indptr[:-1], lengths, seg_slot, np.where(seg_slot >= 0, slot_rank[seg_slot], 0))
        adapted = (runs.ranks > 0) & (lengths > 0)
        if not adapted.all():
            runs = runs.select(adapted)
        if int(runs.ranks.max(initial=0)) > self.max_rank:
            raise ValueError(f"a slot has lora_rank {runs.ranks.max()}, this plan was made for at most {self.max_rank}")
        self.num_segments = len(seg_slot)
        self.num_rows = int(seg_indptr[-1])
        self.num_adapter_rows = int(runs.lengths.sum())
        array = self._free_staging()
        slot_offset = len(Header) + len(seg_indptr)
        array[len(Header) : slot_offset] = seg_indptr
        array[slot_offset : slot_offset + len(seg_slot)] = seg_slot
        offset = -(-(slot_offset + len(seg_slot)) // ITEM_WORDS) * ITEM_WORDS
        self._send(array, slot_offset, offset, runs)

    def _check(self, seg_indptr: Int32Array, seg_slot: Int32Array) -> None:
        if len(seg_slot) > self.max_segments:
            raise ValueError(f"{len(seg_slot)} segments, this plan was made for at most {self.max_segments}")
        if len(seg_indptr) != len(seg_slot) + 1:
            raise ValueError(f"seg_indptr has {len(seg_indptr)} entries, want {len(seg_slot) + 1}")
        if int(seg_indptr[-1]) > self.max_rows:
            raise ValueError(f"{int(seg_indptr[-1])} rows, this plan was made for at most {self.max_rows}")

    def _send(self, array: Int32Array, slot_offset: int, expand_offset: int, runs: _Runs) -> None:
        """Write work list and header behind the segments, and start the copy."""
        num_shares = num_units = 0
        shrink_offset = expand_offset
        if self.num_adapter_rows:
            tiles = runs
            chunk = np.full(len(runs.starts), SHRINK_CHUNK_SHORT, np.int32)
            if int(runs.lengths.max()) > _SHORT_ROWS:
                heights = _heights(runs.lengths, _MIDDLE_ROWS if self.num_rows > _MAX_DECODE_ROWS else _TALL_SEGMENT)
                tiles = runs.cut(heights)
                chunk = np.where(heights == _SHORT_ROWS, SHRINK_CHUNK_SHORT, SHRINK_CHUNK_TALL).astype(np.int32)
                chunk = chunk.repeat(-(-runs.lengths // heights))
            chunks = -(-tiles.ranks // chunk)
            shares = _shares(tiles)
            num_shares, num_units = int(shares.sum()), int(chunks.sum())
            shrink_offset = expand_offset + num_shares * ITEM_WORDS
            items = array[expand_offset : shrink_offset + num_units * ITEM_WORDS].reshape(-1, ITEM_WORDS)
            _write_expand_shares(items[:num_shares], tiles, shares)
            _write_shrink_units(items[num_shares:], tiles, chunk, chunks)
        array[: len(Header)] = (
            self.num_segments,
            self.num_rows,
            len(Header),
            slot_offset,
            num_units,
            shrink_offset,
            num_shares,
            expand_offset,
        )
        used = shrink_offset + num_units * ITEM_WORDS
        self.plan[:used].copy_(self._staging[self._next][:used], non_blocking=True)
        if self.device.type == "cuda":
            event = self._copied[self._next] or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._copied[self._next] = event
        self._next = (self._next + 1) % _NUM_STAGING

    def _free_staging(self) -> Int32Array:
        """The next staging buffer, once the copy that last read it has finished."""
        event = self._copied[self._next]
        if event is not None:
            event.synchronize()
        return self._arrays[self._next]
