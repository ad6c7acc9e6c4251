"""A step's worth of adapters, inputs and expected outputs for the LoRA ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from punica_core import ops
from punica_core.lora.segments import SegmentPlan
from punica_core.lora.tables import AdapterTables, Arena, ModuleWeights
from punica_core.ops.layout import Field, row_pitch
from tests.support.numerics import assert_as_exact_as_torch

MIXED_RANKS = (1, 2, 3, 5, 8, 16, 33, 64, 128, 256)


@dataclass
class LoraBatch:
    """One fused group of slices, its adapters, and a step's rows."""

    x: Tensor
    y: Tensor
    row_slots: np.ndarray
    out_features: list[int]
    adapters: dict[int, list[ModuleWeights | None]]
    arena: Arena
    tables: AdapterTables
    plan: SegmentPlan
    v: Tensor
    max_rank: int
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.table = self.tables.group(0, len(self.out_features))

    def apply(
        self, y: Tensor | None = None, x: Tensor | None = None, *, summed: bool = False, overwrite: bool = False
    ) -> Tensor:
        """Run shrink and expand on a copy of y (or on the y given) and return it."""
        out = self.y.clone() if y is None else y
        rows = self.x if x is None else x
        tables = (self.arena.buffer, self.table, self.plan.plan)
        summed = summed or overwrite
        ops.lora_shrink(self.v, rows, *tables, self.max_rank, summed=summed)
        sizes = (self.out_features, rows.size(1), self.max_rank)
        ops.lora_expand(out, self.v, *tables, *sizes, summed=summed, overwrite=overwrite)
        return out

    def expected(self, dtype: torch.dtype = torch.float64, *, overwrite: bool = False) -> Tensor:
        """The same maths, adapter by adapter and without the ops, with every intermediate in ``dtype``."""
        out = torch.zeros_like(self.y, dtype=dtype) if overwrite else self.y.to(dtype, copy=True)
        for slot, modules in self.adapters.items():
            rows = torch.from_numpy(np.flatnonzero(self.row_slots == slot)).to(out.device)
            column = 0
            for width, module in zip(self.out_features, modules, strict=True):
                cols = torch.arange(column, column + width, device=out.device)
                column += width
                if module is None:
                    continue
                hidden = self.x[rows].to(dtype) @ module.a.to(dtype).T
                value = out[rows[:, None], cols] + module.scale * (hidden @ module.b.to(dtype).T)
                if module.row_gain is not None and not overwrite:
                    value = value * module.row_gain.to(dtype)
                if module.bias is not None and not overwrite:
                    value = value + module.bias.to(dtype)
                out[rows[:, None], cols] = value
        return out


def make_module(
    lora_rank: int,
    in_features: int,
    out_features: int,
    *,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
    dora: bool = False,
) -> ModuleWeights:
    """Random weights with non-zero B, scaled so that the adapter's output is about as large as y."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    a = draw(lora_rank, in_features) / in_features**0.5
    b = draw(out_features, lora_rank) / lora_rank**0.5
    gain = 1 + 0.1 * draw(out_features) if dora else None
    return ModuleWeights(a, b, 0.5 + lora_rank % 7 / 4, gain, draw(out_features) if dora else None)


def make_batch(
    row_slots: Sequence[int],
    *,
    ranks: Sequence[int] = MIXED_RANKS,
    in_features: int = 64,
    out_features: Sequence[int] = (48,),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    num_splits: int = 16,
    dora_slots: Sequence[int] = (),
    missing: Sequence[tuple[int, int]] = (),
    y_padding: int = 0,
    max_rank: int | None = None,
) -> LoraBatch:
    """Build a batch: slot s has lora_rank ``ranks[s % len(ranks)]``; max_rank: default the largest, rounded up to 8.

    The arena, the scratch and ``y_padding`` columns beside y are poisoned with NaN. ``missing`` lists (slot, slice)
    pairs that the adapter does not target.
    """
    generator = torch.Generator(device).manual_seed(seed)
    num_slots = max(max(row_slots), 0) + 1
    used = sorted({slot for slot in row_slots if slot >= 0})
    max_rank = row_pitch(max(ranks)) if max_rank is None else max_rank
    adapters: dict[int, list[ModuleWeights | None]] = {}
    for slot in used:
        adapters[slot] = [
            None
            if (slot, index) in missing
            else make_module(
                ranks[slot % len(ranks)],
                in_features,
                width,
                dtype=dtype,
                device=device,
                generator=generator,
                dora=slot in dora_slots,
            )
            for index, width in enumerate(out_features)
        ]
    per_slot = sum((in_features + width + 8) * (max_rank + 8) + 4 * width for width in out_features)
    arena = Arena(max(len(used), 1) * per_slot, dtype=dtype, device=device)
    arena.buffer.fill_(torch.nan)
    tables = AdapterTables(len(out_features), num_slots, device=device)
    for slot, modules in adapters.items():
        tables.write(slot, {i: m for i, m in enumerate(modules) if m is not None}, arena)
        _poison_padding(tables, arena, slot, modules)
    rows = np.asarray(row_slots, np.int32)
    plan = SegmentPlan(max(len(rows), 1), max_rank=max_rank, device=device)
    plan.set_rows(rows, tables.slot_rank)
    total = sum(out_features)
    storage = torch.full((len(rows), total + y_padding), torch.nan, dtype=dtype, device=device)
    y = storage[:, :total]
    y.copy_(torch.randn(len(rows), total, generator=generator, device=device))
    x = torch.randn(len(rows), in_features, generator=generator, device=device).to(dtype)
    v = torch.full((num_splits * len(rows) * len(out_features) * max_rank,), torch.nan, device=device)
    return LoraBatch(x, y, rows, list(out_features), adapters, arena, tables, plan, v, max_rank)


def _poison_padding(tables: AdapterTables, arena: Arena, slot: int, modules: Sequence[ModuleWeights | None]) -> None:
    """Write NaN into the columns by which B's row pitch exceeds its lora_rank."""
    for index, module in enumerate(modules):
        if module is not None:
            width, rank = module.b.shape
            offset = int(tables.records[index, slot, Field.B_OFFSET])
            arena.buffer[offset : offset + width * row_pitch(rank)].view(width, -1)[:, rank:] = torch.nan


def rows_of(counts: Sequence[int], *, base_rows: int = 0, first_slot: int = 0) -> list[int]:
    """Slots of a step's rows: ``counts[i]`` rows of slot first_slot + i, after ``base_rows`` rows without adapter."""
    return [-1] * base_rows + [first_slot + i for i, count in enumerate(counts) for _ in range(count)]


def check_applied(batch: LoraBatch, got: Tensor) -> None:
    """That `got` is y with the adapters' part added; rows of the base keep their bits."""
    assert_as_exact_as_torch(got, batch.expected(), batch.expected(batch.y.dtype))
    base = torch.from_numpy(batch.row_slots < 0)
    assert torch.equal(got[base].view(torch.uint8), batch.y[base].view(torch.uint8))
    assert not torch.equal(got[~base], batch.y[~base])


def check_overwritten(batch: LoraBatch, got: Tensor) -> None:
    """That `got` is the adapters' part alone, zero where there is none."""
    want = batch.expected(overwrite=True)
    assert_as_exact_as_torch(got, want, batch.expected(batch.y.dtype, overwrite=True))
    assert not got[want == 0].any()
