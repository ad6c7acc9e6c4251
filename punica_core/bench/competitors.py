"""What a user without these kernels would write: two matrix products an adapter, or gathered weights and bmm."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from punica_core.bench.lora_cases import COLD_BYTES, GroupCase
from punica_core.ops.layout import row_pitch
from punica_core.ops.reference import read_record

_MAX_SETS = 32


class Competitors:
    """The work of a :class:`GroupCase` in plain torch, and the base product it comes on top of."""

    def __init__(self, case: GroupCase) -> None:
        self._case = case
        group, step = case.group, case.step
        ends = list(accumulate(step.counts))
        self._rows = [slice(end - count, end) for end, count in zip(ends, step.counts, strict=True)]
        self._row_slot = torch.repeat_interleave(torch.arange(len(step.counts)), torch.tensor(step.counts)).to(
            case.x.device
        )
        self._sets = [self._matrices(table.cpu()) for table in case.adapters.tables[:_MAX_SETS]]
        shape = (sum(group.out_features), group.in_features)
        copies = max(1, COLD_BYTES // (2 * shape[0] * shape[1]))
        self._base = [torch.randn(shape, device=case.x.device).to(case.x.dtype) for _ in range(copies)]

    def _matrices(self, table: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
        """A and B of each slot and slice of one set."""
        case = self._case
        slots = range(len(case.step.ranks))
        return [[self._pair(table, index, slot) for index in range(len(case.group.out_features))] for slot in slots]

    def _pair(self, table: Tensor, index: int, slot: int) -> tuple[Tensor, Tensor]:
        arena, group = self._case.adapters.arena, self._case.group
        record = read_record(table, index, slot)
        rank, width = record.lora_rank, group.out_features[index]
        a = arena[record.a_offset :][: rank * group.in_features].view(rank, group.in_features)
        b = arena[record.b_offset :][: width * row_pitch(rank)].view(width, row_pitch(rank))[:, :rank]
        return a, b

    def base(self, index: int) -> None:
        """The base product alone."""
        torch.mm(self._case.x, self._base[index % len(self._base)].t(), out=self._case.y)

    def loop(self, index: int) -> None:
        """Two cuBLAS calls an adapter and slice."""
        case = self._case
        for rows, pairs in zip(self._rows, self._sets[index % len(self._sets)], strict=True):
            column = 0
            for (a, b), width in zip(pairs, case.group.out_features, strict=True):
                case.y[rows, column : column + width].addmm_(case.x[rows] @ a.T, b.T, alpha=0.01)
                column += width

    def gather_bmm(self, index: int) -> None:
        """Gather each row's A and B, then two batched products. One slice and one lora_rank only.

        Raises:
            ValueError: several slices or ranks.
        """
        case = self._case
        if len(case.group.out_features) != 1 or len(set(case.step.ranks)) != 1:
            raise ValueError("gather + bmm needs one slice and one lora_rank")
        arena = case.adapters.arena
        rank, width, inner = case.step.ranks[0], case.group.out_features[0], case.group.in_features
        per_slot = row_pitch(rank * inner) + width * row_pitch(rank)
        start = (index % case.num_sets) * case.adapters.elements
        count = len(case.step.ranks)
        a = arena.as_strided((count, rank, inner), (per_slot, inner, 1), start)
        b_start = start + row_pitch(rank * inner)
        b = arena.as_strided((count, width, rank), (per_slot, row_pitch(rank), 1), b_start)
        hidden = torch.bmm(a[self._row_slot], case.x[:, :, None])
        case.y += 0.01 * torch.bmm(b[self._row_slot], hidden)[:, :, 0]
