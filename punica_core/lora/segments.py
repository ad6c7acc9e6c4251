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

from punica_core.ops.layout import ITEM_WORDS, SHRINK_CHUNK_SHORT, SHRINK_CHUNK_TALL, Header

Int32Array = npt.NDArray[np.int32]

_SHORT_ROWS = 8
"""Segments of at most this many rows go through the one-column tile of the kernels."""
_SHRINK_HEIGHTS = (_SHORT_ROWS, 16, 64)
_SHRINK_LIMITS = (_SHORT_ROWS, 32)
_EXPAND_HEIGHTS = (_SHORT_ROWS, 16, 64)
_EXPAND_LIMITS = (_SHORT_ROWS, 256)
_NUM_STAGING = 4


@dataclass(frozen=True, slots=True)
class _Runs:
    """Non-empty segments with an adapter: first row, rows, slot; int32, equal lengths."""

    starts: Int32Array
    lengths: Int32Array
    slots: Int32Array


def _split_rows(runs: _Runs, heights: tuple[int, ...], limits: tuple[int, ...]) -> tuple[Int32Array, Int32Array]:
    """Cut runs into tiles: int32 ``[tiles, ITEM_WORDS]`` (row_start, row_count, slot, 0) and each tile's run length."""
    longest = int(runs.lengths.max())
    if longest <= limits[0]:
        items = np.zeros((len(runs.starts), ITEM_WORDS), np.int32)
        items[:, 0], items[:, 1], items[:, 2] = runs.starts, runs.lengths, runs.slots
        return items, runs.lengths
    height = np.asarray(heights, np.int32)[np.searchsorted(limits, runs.lengths)]
    tiles = -(-runs.lengths // height)
    last = np.cumsum(tiles)
    offset = (np.arange(last[-1], dtype=np.int32) - np.repeat(last - tiles, tiles)) * np.repeat(height, tiles)
    lengths = np.repeat(runs.lengths, tiles)
    items = np.zeros((len(offset), ITEM_WORDS), np.int32)
    items[:, 0] = np.repeat(runs.starts, tiles) + offset
    items[:, 1] = np.minimum(np.repeat(height, tiles), lengths - offset)
    items[:, 2] = np.repeat(runs.slots, tiles)
    return items, lengths


def _split_ranks(tiles: Int32Array, lengths: Int32Array, slot_rank: Int32Array) -> Int32Array:
    """Cut tiles into units of at most one rank chunk; the fourth word becomes rank_start | rank_count << 16."""
    chunk = np.where(lengths <= _SHORT_ROWS, np.int32(SHRINK_CHUNK_SHORT), np.int32(SHRINK_CHUNK_TALL))
    chunks = -(-slot_rank[tiles[:, 2]] // chunk)
    last = np.cumsum(chunks)
    if last[-1] == len(tiles):
        units = tiles.copy()
        units[:, 3] = chunk << 16
        return units
    units = np.repeat(tiles, chunks, axis=0)
    index = np.arange(last[-1], dtype=np.int32) - np.repeat(last - chunks, chunks)
    chunk = np.repeat(chunk, chunks)
    units[:, 3] = (index * chunk) | (chunk << 16)
    return units


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
        capacity = len(Header) + 2 * self.max_segments + 2 * ITEM_WORDS + tiles * ITEM_WORDS * (1 + chunks)
        self.plan = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        pinned = self.device.type == "cuda"
        self._staging = [torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(_NUM_STAGING)]
        self._arrays: list[Int32Array] = [staging.numpy() for staging in self._staging]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_STAGING
        self._next = 0
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
        """Describe a step by the slot of each row, ``int32 [T]``, -1 = base model. See :meth:`set_segments`."""
        if len(row_slots) == 0:
            self.set_segments(np.zeros(1, np.int32), row_slots, slot_rank)
            return
        starts = np.flatnonzero(row_slots[1:] != row_slots[:-1]) + 1
        indptr = np.empty(len(starts) + 2, np.int32)
        indptr[0], indptr[1:-1], indptr[-1] = 0, starts, len(row_slots)
        self.set_segments(indptr, row_slots[indptr[:-1]], slot_rank)

    def set_segments(self, seg_indptr: Int32Array, seg_slot: Int32Array, slot_rank: Int32Array) -> None:
        """Describe a step by segments and send it to the device without waiting for it.

        Args:
            seg_indptr: int32 ``[S+1]``, non-decreasing, starting at 0; empty segments are allowed.
            seg_slot: int32 ``[S]``, -1 = base model.
            slot_rank: int32 ``[N]``, for each slot the largest lora_rank over all modules.

        Raises:
            ValueError: more rows or segments than this plan was made for, or a lora_rank above max_rank.
        """
        self._check(seg_indptr, seg_slot)
        lengths = np.diff(seg_indptr)
        active = (lengths > 0) & (seg_slot >= 0)
        if not active.all():
            runs = _Runs(seg_indptr[:-1][active], lengths[active], seg_slot[active])
        else:
            runs = _Runs(seg_indptr[:-1], lengths, seg_slot)
        ranked = slot_rank[runs.slots]
        if len(ranked) and int(ranked.max()) > self.max_rank:
            raise ValueError(
                f"a slot has lora_rank {int(ranked.max())}, this plan was made for at most {self.max_rank}"
            )
        if not ranked.all():
            adapted = ranked > 0
            runs = _Runs(runs.starts[adapted], runs.lengths[adapted], runs.slots[adapted])
        self.num_segments = len(seg_slot)
        self.num_rows = int(seg_indptr[-1])
        self.num_adapter_rows = int(runs.lengths.sum())
        empty = np.empty((0, ITEM_WORDS), np.int32)
        if self.num_adapter_rows:
            expand_tiles, _ = _split_rows(runs, _EXPAND_HEIGHTS, _EXPAND_LIMITS)
            tiles, tile_lengths = _split_rows(runs, _SHRINK_HEIGHTS, _SHRINK_LIMITS)
            self._send(seg_indptr, seg_slot, _split_ranks(tiles, tile_lengths, slot_rank), expand_tiles)
        else:
            self._send(seg_indptr, seg_slot, empty, empty)

    def _check(self, seg_indptr: Int32Array, seg_slot: Int32Array) -> None:
        if len(seg_slot) > self.max_segments:
            raise ValueError(f"{len(seg_slot)} segments, this plan was made for at most {self.max_segments}")
        if len(seg_indptr) != len(seg_slot) + 1:
            raise ValueError(f"seg_indptr has {len(seg_indptr)} entries, want {len(seg_slot) + 1}")
        if int(seg_indptr[-1]) > self.max_rows:
            raise ValueError(f"{int(seg_indptr[-1])} rows, this plan was made for at most {self.max_rows}")

    def _send(self, seg_indptr: Int32Array, seg_slot: Int32Array, units: Int32Array, expand_tiles: Int32Array) -> None:
        slot_offset = len(Header) + len(seg_indptr)
        expand_offset = -(-(slot_offset + len(seg_slot)) // ITEM_WORDS) * ITEM_WORDS
        shrink_offset = expand_offset + expand_tiles.size
        used = shrink_offset + units.size
        array = self._free_staging()
        array[: len(Header)] = (
            len(seg_slot),
            self.num_rows,
            len(Header),
            slot_offset,
            len(units),
            shrink_offset,
            len(expand_tiles),
            expand_offset,
        )
        array[len(Header) : slot_offset] = seg_indptr
        array[slot_offset : slot_offset + len(seg_slot)] = seg_slot
        array[expand_offset:shrink_offset] = expand_tiles.reshape(-1)
        array[shrink_offset:used] = units.reshape(-1)
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
