"""The LoRA of a step from the arena and its tables, through the SGMV ops: fixed buffers that a graph can replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from punica_core import ops
from punica_core.lora.layers import LoRALinear
from punica_core.lora.segments import Int32Array, SegmentPlan
from punica_core.lora.table_modules import TableModules
from punica_core.lora.tables import AdapterTables, Arena
from punica_core.ops.layout import row_pitch, scratch_elements


class TableLoRA:
    """Implements `TableStep` for one model and all adapters in the tables.

    max_rows: T of the largest step. max_rank: bound of every lora_rank. beside: in captured graphs the base product
    runs beside shrink; may be turned off before they are captured.
    """

    def __init__(
        self,
        tables: AdapterTables,
        arena: Arena,
        *,
        max_rows: int,
        max_rank: int,
        beside: bool = False,
    ) -> None:
        device = arena.buffer.device
        self._max_rank = row_pitch(max_rank)
        self._arena = arena.buffer
        self._slot_rank = tables.slot_rank
        self.beside = beside
        self._segments = SegmentPlan(max_rows, max_rank=self._max_rank, device=device)
        self._plan = self._segments.plan

    @property
    def plan(self) -> Tensor:
        """Of the step begun last, as the ops take it; the same tensor for all steps."""
        return self._plan

    @property
    def max_rank(self) -> int:
        """As the ops take it."""
        return self._max_rank

    @property
    def nbytes(self) -> int:
        """Bytes of the plan on the device."""
        return int(self._plan.nbytes)

    def begin(self, row_slots: Int32Array) -> None:
        """Describe the next step: int32 [T], the slot of each row, -1 without adapter. Nothing waits for the device."""
        self._segments.set_rows(row_slots, self._slot_rank)

    def shrink(self, table: Tensor, out_features: Sequence[int], x: Tensor) -> Tensor:
        """See `TableStep.shrink`; T is the number of rows of the step begun last."""
        # Compiled and captured code gives every layer the same memory for v.
        elements = scratch_elements(x.size(0), len(out_features), self._max_rank)
        v = torch.empty(elements, dtype=torch.float32, device=x.device)
        ops.lora_shrink(v, x, self._arena, table, self._plan, self._max_rank, beside=self.beside)
        return v

    def expand(self, table: Tensor, out_features: Sequence[int], x: Tensor, shrunk: Tensor | None, y: Tensor) -> None:
        """See `TableStep.expand`."""
        assert shrunk is not None, "shrink came before"
        tables = (self._arena, table, self._plan)
        kept = x if self.beside else None
        ops.lora_expand(y, shrunk, *tables, out_features, x.size(1), self._max_rank, x=kept)


def bind_tables(model: nn.Module, modules: TableModules, tables: AdapterTables) -> None:
    """Give each layer of `model`, and its head, their part of `tables`."""
    for layer in model.modules():
        if isinstance(layer, LoRALinear):
            first = modules.first_of(layer.group)
            layer.table = None if first is None else tables.group(first, len(layer.group.paths))


def has_adapters(row_slots: Int32Array) -> bool:
    """Whether any row uses an adapter."""
    return bool(np.any(row_slots >= 0))
