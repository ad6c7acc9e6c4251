"""The LoRA of a batch whose rows each have a fixed number of tokens, for any layer and any such number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from punica_core import ops
from punica_core.lora.adapter_set import AdapterSet
from punica_core.lora.layers import LinearGroup
from punica_core.lora.segments import Int32Array, SegmentPlan

MAX_PLANS = 4
"""Row counts that have a plan at once: a prompt's, a decode step's, the rows that need logits, and one more."""

_MAX_SPLITS = 16
_SPLIT_ELEMENTS = 1 << 22
"""Scratch of shrink up to which it may leave its sum in more than one part: 16 MiB."""


@dataclass(slots=True)
class _Runs:
    """Runs of batch rows that use one slot. starts: [S+1], the last is B; slots: [S]. int32."""

    starts: Int32Array
    slots: Int32Array

    @classmethod
    def of(cls, lora_indices: Int32Array) -> _Runs:
        changes = np.flatnonzero(lora_indices[1:] != lora_indices[:-1]) + 1
        starts = np.concatenate(([0], changes, [len(lora_indices)])).astype(np.int32)
        return cls(starts, lora_indices[starts[:-1]])


class BatchStep:
    """Implements `StepLoRA` for a batch `[B, L, ...]` flattened to `[B*L, ...]`; row b uses adapter lora_indices[b].

    L may differ between layers (the head sees fewer tokens) and calls. Plans are built on first need and kept while
    lora_indices stay, so that decoding builds one, once.
    """

    def __init__(self, adapters: AdapterSet) -> None:
        self._adapters = adapters
        self._lora_indices: Int32Array = np.zeros(0, np.int32)
        self._runs = _Runs(np.zeros(1, np.int32), self._lora_indices)
        self._plans: dict[int, Tensor] = {}
        self._used: dict[int, SegmentPlan] = {}
        self._idle: list[SegmentPlan] = []

    def set_indices(self, lora_indices: Int32Array) -> None:
        """The adapter of each batch row, int32 [B] with B > 0, -1 = base model; checked by the caller."""
        if np.array_equal(lora_indices, self._lora_indices):
            return
        self._lora_indices = lora_indices
        self._runs = _Runs.of(lora_indices)
        self._idle.extend(self._used.values())
        self._used.clear()
        self._plans.clear()

    def prepare(self, num_rows: int) -> None:
        """Have the plan for `num_rows` = B*L rows; compiled code then only looks it up.

        Raises ValueError unless num_rows is a multiple of B.
        """
        if num_rows in self._plans:
            return
        batch = len(self._lora_indices)
        if num_rows % batch:
            raise ValueError(f"a layer with adapters got {num_rows} rows, which {batch} lora_indices do not divide")
        plan = self._free_plan(num_rows)
        plan.set_segments(self._runs.starts * (num_rows // batch), self._runs.slots, self._adapters.slot_rank)
        self._used[num_rows] = plan
        self._plans[num_rows] = plan.plan

    def add(self, group: LinearGroup, x: Tensor, y: Tensor) -> None:
        """See `StepLoRA.add`; group.index is the module's index in the set. Raises RuntimeError if y has a gradient."""
        num_rows = x.size(0)
        if num_rows not in self._plans:
            self.prepare(num_rows)
        if y.requires_grad:
            raise RuntimeError("adapters under BatchLoRA have no gradient: call the layer under torch.no_grad()")
        adapters = self._adapters
        v = torch.empty(_scratch_elements(num_rows, adapters.max_rank), dtype=torch.float32, device=x.device)
        table = adapters.table(group.index)
        ops.lora_apply(y, x, v, adapters.arena, table, self._plans[num_rows], group.out_features, adapters.max_rank)

    def _free_plan(self, num_rows: int) -> SegmentPlan:
        """A plan with room for the batch: an idle one, else a new one; the oldest in use makes room."""
        segments = len(self._runs.slots)
        if not self._idle and len(self._used) >= MAX_PLANS:
            oldest = next(iter(self._used))
            self._idle.append(self._used.pop(oldest))
            del self._plans[oldest]
        for index, plan in enumerate(self._idle):
            if plan.max_rows >= num_rows and plan.max_segments >= segments:
                return self._idle.pop(index)
        if len(self._idle) + len(self._used) >= MAX_PLANS:
            self._idle.pop()
        max_rows = 1 << max(num_rows - 1, 15).bit_length()
        max_segments = min(max_rows, 1 << max(segments - 1, 15).bit_length())
        device = self._adapters.arena.device
        # Made in inference mode, its buffer could not be refilled outside of it.
        with torch.inference_mode(False):
            return SegmentPlan(max_rows, max_rank=self._adapters.max_rank, device=device, max_segments=max_segments)


def _scratch_elements(num_rows: int, max_rank: int) -> int:
    """Elements of shrink's output: one part at least, more while the batch is small."""
    one = num_rows * max_rank
    return max(one, min(_MAX_SPLITS * one, _SPLIT_ELEMENTS))
