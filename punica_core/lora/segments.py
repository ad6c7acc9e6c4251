"""Metadata of one step: which rows belong to which adapter, and the work list that the kernels walk.

Built once a step for all layers, on the host, and sent in one asynchronous copy to a device buffer whose address and
capacity never change, so that a captured CUDA graph replays for any mix of adapters.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from punica_core.ops import plan as plan_builder
from punica_core.ops.layout import HEADER_WORDS, Header
from punica_core.ops.plan import Int32Array

__all__ = ["Int32Array", "SegmentPlan", "plan_bytes"]

_NUM_STAGING = 4


def plan_bytes(max_rows: int, max_rank: int, max_segments: int) -> int:
    """Device memory of a `SegmentPlan` with these limits."""
    return 4 * plan_builder.capacity(max_rows, max_segments, max_rank)


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
        capacity = plan_bytes(max_rows, max_rank, self.max_segments) // 4
        self.plan = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        pinned = self.device.type == "cuda"
        self._staging = [torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(_NUM_STAGING)]
        self._arrays: list[Int32Array] = [staging.numpy() for staging in self._staging]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_STAGING
        self._next = 0
        self._sent: Int32Array = self._arrays[0][:0]
        self.num_segments = 0
        self.num_rows = 0

    @property
    def has_adapters(self) -> bool:
        """Whether any row of the step has an adapter."""
        return len(self._sent) > 0 and bool(self._sent[Header.NUM_EXPAND_SHARES])

    @property
    def rank_pitch(self) -> int:
        """The largest lora_rank of the step, rounded up to 8: ops take no max_rank below it."""
        return int(self._sent[Header.RANK_PITCH]) if len(self._sent) else 0

    @property
    def seg_indptr(self) -> Tensor:
        """int32 ``[S+1]`` view of the plan: first row of each segment, then the number of rows."""
        return self.plan[HEADER_WORDS : HEADER_WORDS + self.num_segments + 1]

    @property
    def seg_slot(self) -> Tensor:
        """int32 ``[S]`` view of the plan: slot of each segment, -1 = base model."""
        start = HEADER_WORDS + self.num_segments + 1
        return self.plan[start : start + self.num_segments]

    def set_rows(self, row_slots: Int32Array, slot_rank: Int32Array) -> None:
        """Describe a step by the slot of each row, ``int32 [T]``, -1 = base model. See :meth:`set_segments`."""
        if len(row_slots) > self.max_rows:
            raise ValueError(f"{len(row_slots)} rows, this plan was made for at most {self.max_rows}")
        if len(row_slots) > self.max_segments:
            segments = 1 + int(np.count_nonzero(row_slots[1:] != row_slots[:-1]))
            self._check_segments(segments)
        staging = self._free_staging()
        rows, ranks = torch.from_numpy(row_slots), torch.from_numpy(slot_rank)
        self._send(plan_builder.build_row_plan(staging, rows, ranks, self.max_segments, self.max_rank))

    def set_segments(self, seg_indptr: Int32Array, seg_slot: Int32Array, slot_rank: Int32Array) -> None:
        """Describe a step by segments and send it to the device without waiting for it.

        A plan that is word for word the one sent last is not sent again.

        Args:
            seg_indptr: int32 ``[S+1]``, non-decreasing, starting at 0; empty segments are allowed.
            seg_slot: int32 ``[S]``, -1 = base model.
            slot_rank: int32 ``[N]``, for each slot the largest lora_rank over all modules.

        Raises:
            ValueError: more rows or segments than this plan was made for, or a lora_rank above max_rank.
        """
        self._check_segments(len(seg_slot))
        if len(seg_indptr) != len(seg_slot) + 1:
            raise ValueError(f"seg_indptr has {len(seg_indptr)} entries, want {len(seg_slot) + 1}")
        if int(seg_indptr[-1]) > self.max_rows:
            raise ValueError(f"{int(seg_indptr[-1])} rows, this plan was made for at most {self.max_rows}")
        staging = self._free_staging()
        indptr, slots, ranks = map(torch.from_numpy, (seg_indptr, seg_slot, slot_rank))
        self._send(plan_builder.build_plan(staging, indptr, slots, ranks, self.max_rank))

    def _check_segments(self, count: int) -> None:
        if count > self.max_segments:
            raise ValueError(f"{count} segments, this plan was made for at most {self.max_segments}")

    def _free_staging(self) -> Tensor:
        """The next staging buffer, once the copy that last read it has finished."""
        event = self._copied[self._next]
        if event is not None:
            event.synchronize()
        return self._staging[self._next]

    def _send(self, used: int) -> None:
        """Start the copy of the first ``used`` words of the next staging buffer, unless the device has them already."""
        if used < 0:
            raise ValueError(f"a slot has lora_rank {-used}, this plan was made for at most {self.max_rank}")
        words = self._arrays[self._next][:used]
        if np.array_equal(words, self._sent):
            return
        self.num_segments, self.num_rows = int(words[Header.NUM_SEGMENTS]), int(words[Header.NUM_ROWS])
        self.plan[:used].copy_(self._staging[self._next][:used], non_blocking=True)
        if self.device.type == "cuda":
            event = self._copied[self._next] or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._copied[self._next] = event
        self._sent = words
        self._next = (self._next + 1) % _NUM_STAGING
