"""The LoRA of a step from the arena and its tables, through the SGMV ops: fixed buffers that a graph can replay."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from punica_core import ops
from punica_core.lora.layers import LinearGroup, LoRALinear
from punica_core.lora.linear import linear
from punica_core.lora.segments import Int32Array, SegmentPlan
from punica_core.lora.table_modules import TableModules
from punica_core.lora.tables import AdapterTables, Arena
from punica_core.ops.layout import row_pitch, scratch_elements
from punica_core.ops.linear import FEW_LINEAR_ROWS, MAX_LINEAR_ROWS, hides_shrink, takes_layer
from punica_core.ops.plan import MAX_DECODE_ROWS


class LoRAOrder(Enum):
    """Where a step's LoRA kernels run relative to its base products."""

    NONE = auto()
    """No row has an adapter: the base products alone."""
    BESIDE = auto()
    """Shrink; the base product, beside it in captured graphs; expand adds to it."""
    AHEAD = auto()
    """Shrink and expand; the base product is added to what they wrote, which saves reading and writing it once more."""
    INSIDE = auto()
    """Shrink and expand in the base product's kernel, for few rows of few adapters; `BESIDE` in layers not taken."""


class InsideLimits(NamedTuple):
    """What a step may have to be in the order `INSIDE`. With more, `BESIDE` is faster on an H200, or may be.

    runs: of rows of one adapter. sum_of_lora_ranks: theirs. lora_rank: of each.
    """

    runs: int
    sum_of_lora_ranks: int
    lora_rank: int


FEW_ROWS_INSIDE = InsideLimits(runs=16, sum_of_lora_ranks=256, lora_rank=64)
MANY_ROWS_INSIDE = InsideLimits(runs=12, sum_of_lora_ranks=192, lora_rank=32)
"""With more than FEW_LINEAR_ROWS rows. Low-rank rows of larger lora_ranks do not fit the place of weights."""

MAX_INSIDE_RANK = FEW_ROWS_INSIDE.lora_rank


def lora_orders(num_rows: int, *, lora: bool = True, inside_rows: int = 0) -> tuple[LoRAOrder, ...]:
    """The orders that steps of `num_rows` rows are computed in, padding counted.

    lora: there may be adapters. inside_rows: of the largest step that may be in `LoRAOrder.INSIDE`, 0 if none may.
    """
    if not lora:
        return (LoRAOrder.NONE,)
    if num_rows > MAX_DECODE_ROWS:
        return (LoRAOrder.AHEAD, LoRAOrder.BESIDE, LoRAOrder.NONE)
    if num_rows <= inside_rows:
        return (LoRAOrder.INSIDE, LoRAOrder.BESIDE, LoRAOrder.NONE)
    return (LoRAOrder.BESIDE, LoRAOrder.NONE)


def most_inside_rows(groups: Sequence[LinearGroup], device: torch.device) -> int:
    """Rows of the largest step that one kernel computes with few adapters: 0 if it does not take each layer of a model,
    FEW_LINEAR_ROWS if beyond them it does not take those that `is_inside` names, or they are few."""
    inside = [group for group in groups if is_inside(MAX_LINEAR_ROWS, group.out_features)]
    if not all(_takes(group, rows, device) for rows in (1, 16, 32, FEW_LINEAR_ROWS) for group in groups):
        return 0
    is_most = 2 * len(inside) > len(groups) and all(_takes(group, MAX_LINEAR_ROWS, device) for group in inside)
    return MAX_LINEAR_ROWS if is_most else FEW_LINEAR_ROWS


def is_inside(num_rows: int, out_features: Sequence[int]) -> bool:
    """Whether a layer of slices O wide is one kernel in a step of `num_rows` rows in `LoRAOrder.INSIDE`."""
    return hides_shrink(num_rows, len(out_features))


def _takes(group: LinearGroup, num_rows: int, device: torch.device) -> bool:
    sizes = (num_rows, sum(group.out_features), group.in_features)
    return takes_layer(*sizes, slices=len(group.out_features), max_rank=MAX_INSIDE_RANK, device=device)


class TableLoRA:
    """Implements `TableStep` for one model and all adapters in the tables.

    max_rows: T of the largest step. max_rank: bound of every lora_rank. beside: in captured graphs the base product
    runs beside shrink. running: the order of the next step, `NONE` apart; set by who runs it. In `AHEAD` layers with a
    bias are computed as in `BESIDE`. inside_rows: see `lora_orders`. dropped: `AHEAD` or `INSIDE`, if no step may be in
    that order. Who runs steps may turn off `beside`, lower `inside_rows` and add to `dropped` before they are captured.
    """

    def __init__(
        self,
        tables: AdapterTables,
        arena: Arena,
        *,
        max_rows: int,
        max_rank: int,
        beside: bool = False,
        inside_rows: int = 0,
    ) -> None:
        device = arena.buffer.device
        self._max_rank = row_pitch(max_rank)
        self._arena = arena.buffer
        self._slot_rank = tables.slot_rank
        self._slot_affine = tables.slot_affine
        self.beside = beside
        self.inside_rows = inside_rows
        self.dropped: set[LoRAOrder] = set()
        self.running = LoRAOrder.BESIDE
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

    def can_run(self, order: LoRAOrder, num_rows: int) -> bool:
        """Whether steps of `num_rows` rows may be in that order."""
        return order in lora_orders(num_rows, inside_rows=self.inside_rows) and order not in self.dropped

    def order(self, row_slots: Int32Array) -> LoRAOrder:
        """Of a step given by the slot of each row, int32 [T], -1 without adapter.

        A gain multiplies the base product too, so it must be there before; that decides for the whole step.
        """
        adapted = row_slots >= 0
        used = row_slots[adapted]
        if not len(used):
            return LoRAOrder.NONE
        orders = lora_orders(len(row_slots), inside_rows=self.inside_rows)
        best = next(order for order in orders if order not in self.dropped)
        if np.any(self._slot_affine[used]):
            return LoRAOrder.BESIDE
        if best is LoRAOrder.INSIDE:
            begins = adapted.copy()
            begins[1:] &= row_slots[1:] != row_slots[:-1]
            runs = row_slots[begins]
            ranks = self._slot_rank[runs]
            limits = FEW_ROWS_INSIDE if len(row_slots) <= FEW_LINEAR_ROWS else MANY_ROWS_INSIDE
            is_few = len(runs) <= limits.runs and ranks.sum() <= limits.sum_of_lora_ranks
            return best if is_few and ranks.max() <= limits.lora_rank else LoRAOrder.BESIDE
        return best

    def begin(self, row_slots: Int32Array, order: LoRAOrder = LoRAOrder.BESIDE) -> None:
        """Describe the next step: int32 [T], the slot of each row, -1 without adapter. Nothing waits for the device.

        order: in which it will be computed, by a graph that is replayed too.

        Raises:
            ValueError: a lora_rank is above the max_rank that the order's kernels are given.
        """
        self._segments.set_rows(row_slots, self._slot_rank)
        largest = self._segments.rank_pitch
        if order is LoRAOrder.INSIDE and largest > MAX_INSIDE_RANK:
            raise ValueError(f"the step has lora_ranks up to {largest}, {order.name} takes at most {MAX_INSIDE_RANK}")

    def product(
        self, table: Tensor, out_features: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """See `TableStep.product`; T is the number of rows of the step begun last."""
        if self.running is LoRAOrder.INSIDE and is_inside(x.size(0), out_features):
            y = x.new_empty(x.size(0), weight.size(0))
            v = self._scratch(out_features, x)
            tables = (self._arena, table, self._plan)
            ops.lora_linear(y, v, x, weight, bias, *tables, out_features, min(self._max_rank, MAX_INSIDE_RANK))
        elif self.running is LoRAOrder.AHEAD and bias is None:
            y = x.new_empty(x.size(0), weight.size(0))
            v = self._shrink(table, out_features, x, summed=True)
            self._expand(table, out_features, x, v, y, summed=True, overwrite=True)
            ops.add_product(y, x, weight)
        else:
            v = self._shrink(table, out_features, x, summed=self.beside, beside=self.beside)
            y = linear(x, weight, bias)
            self._expand(table, out_features, x, v, y, summed=self.beside, kept=x if self.beside else None)
        return y

    def _shrink(
        self, table: Tensor, out_features: Sequence[int], x: Tensor, *, summed: bool, beside: bool = False
    ) -> Tensor:
        v = self._scratch(out_features, x)
        ops.lora_shrink(v, x, self._arena, table, self._plan, self._max_rank, summed=summed, beside=beside)
        return v

    def _scratch(self, out_features: Sequence[int], x: Tensor) -> Tensor:
        # Compiled and captured code gives every layer the same memory for it.
        elements = scratch_elements(x.size(0), len(out_features), self._max_rank)
        return torch.empty(elements, dtype=torch.float32, device=x.device)

    def _expand(
        self,
        table: Tensor,
        out_features: Sequence[int],
        x: Tensor,
        v: Tensor,
        y: Tensor,
        *,
        summed: bool,
        kept: Tensor | None = None,
        overwrite: bool = False,
    ) -> None:
        tables = (self._arena, table, self._plan)
        sizes = (out_features, x.size(1), self._max_rank)
        ops.lora_expand(y, v, *tables, *sizes, summed=summed, x=kept, overwrite=overwrite)


def bind_tables(model: nn.Module, modules: TableModules, tables: AdapterTables) -> None:
    """Give each layer of `model`, and its head, their part of `tables`."""
    for layer in model.modules():
        if isinstance(layer, LoRALinear):
            first = modules.first_of(layer.group)
            layer.table = None if first is None else tables.group(first, len(layer.group.paths))
