"""The LoRA of a batch whose rows each have a fixed number of tokens, for any layer and any such number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from punica_core import ops
from punica_core.lora.adapter_set import AdapterSet
from punica_core.lora.layers import LinearGroup
from punica_core.lora.segments import Int32Array, SegmentPlan
from punica_core.lora.tables import ModuleWeights
from punica_core.ops.plan import sums_in_shrink

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

    In fp32 on a CPU the rows of an adapter are multiplied together wherever they are in the batch, outside of the ops:
    those go segment by segment, and look everything up anew in each layer.
    """

    def __init__(self, adapters: AdapterSet) -> None:
        self._adapters = adapters
        self._lora_indices: Int32Array = np.zeros(0, np.int32)
        self._runs = _Runs(np.zeros(1, np.int32), self._lora_indices)
        self._rows: dict[int, list[tuple[int, Tensor]]] = {}
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
        self._rows.clear()

    def prepare(self, num_rows: int) -> None:
        """Have the plan for `num_rows` = B*L rows; compiled code then only looks it up.

        Raises ValueError unless num_rows is a multiple of B.
        """
        if num_rows in self._plans:
            return
        tokens = self._tokens_a_row(num_rows)
        plan = self._free_plan(num_rows)
        plan.set_segments(self._runs.starts * tokens, self._runs.slots, self._adapters.slot_rank)
        self._used[num_rows] = plan
        self._plans[num_rows] = plan.plan

    def add(self, group: LinearGroup, x: Tensor, y: Tensor) -> None:
        """See `StepLoRA.add`; group.index is the module's index in the set. Raises RuntimeError if y has a gradient."""
        num_rows = x.size(0)
        if y.requires_grad:
            raise RuntimeError("adapters under BatchLoRA have no gradient: call the layer under torch.no_grad()")
        adapters = self._adapters
        if _is_direct(y):
            self._add_by_adapter(adapters.modules(group.index), x, y)
            return
        if num_rows not in self._plans:
            self.prepare(num_rows)
        v = torch.empty(_scratch_elements(num_rows, adapters.max_rank), dtype=torch.float32, device=x.device)
        table = adapters.table(group.index)
        tables = (adapters.arena, table, self._plans[num_rows])
        # Of the rows at hand, but compiled code serves any mix.
        rank = adapters.max_rank if torch.compiler.is_compiling() else self._used[num_rows].rank_pitch
        summed = sums_in_shrink(num_rows, rank)
        ops.lora_apply(y, x, v, *tables, group.out_features, adapters.max_rank, summed=summed)

    def _add_by_adapter(self, modules: Mapping[int, ModuleWeights], x: Tensor, y: Tensor) -> None:
        """modules: the layer's, by slot."""
        for slot, rows in self._rows_of(x.size(0)):
            weights = modules.get(slot)
            if weights is not None:
                v = torch.mm(x.index_select(0, rows), weights.a.t())
                y.index_add_(0, rows, torch.mm(v, weights.b.t()), alpha=weights.scale)

    def _rows_of(self, num_rows: int) -> list[tuple[int, Tensor]]:
        """(slot, its rows, int64) of each adapter in use, among `num_rows` = B*L."""
        found = self._rows.get(num_rows)
        if found is None:
            tokens = self._tokens_a_row(num_rows)
            slots = self._lora_indices.repeat(tokens)
            used = np.unique(slots[slots >= 0]).tolist()
            found = self._rows[num_rows] = [(slot, torch.from_numpy(np.flatnonzero(slots == slot))) for slot in used]
        return found

    def _tokens_a_row(self, num_rows: int) -> int:
        """L. Raises ValueError unless num_rows is a multiple of B."""
        batch = len(self._lora_indices)
        if num_rows % batch:
            raise ValueError(f"a layer with adapters got {num_rows} rows, which {batch} lora_indices do not divide")
        return num_rows // batch

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


def _is_direct(y: Tensor) -> bool:
    """Whether to multiply without the ops. In 16 bits these keep the middle in fp32, and compiled code needs them."""
    return y.is_cpu and y.dtype == torch.float32 and not torch.compiler.is_compiling()


def _scratch_elements(num_rows: int, max_rank: int) -> int:
    """Elements of shrink's output: one part at least, more while the batch is small."""
    one = num_rows * max_rank
    return max(one, min(_MAX_SPLITS * one, _SPLIT_ELEMENTS))
