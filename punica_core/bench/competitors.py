"""What a user without these kernels would write: two matrix products an adapter, or gathered weights and bmm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

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
        copies = max(1, min(_MAX_SETS, COLD_BYTES // (2 * shape[0] * shape[1])))
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
        """Gather each row's A and B, then two batched products, slice by slice."""
        case = self._case
        column = 0
        for (a, b), width in zip(self._stacks[index % len(self._stacks)], case.group.out_features, strict=True):
            hidden = torch.bmm(a[self._row_slot], case.x[:, :, None])
            case.y[:, column : column + width] += 0.01 * torch.bmm(b[self._row_slot], hidden)[:, :, 0]
            column += width

    @cached_property
    def _stacks(self) -> list[list[tuple[Tensor, Tensor]]]:
        """All A [N, R, I] and all B [N, O, R] of each set and slice; lower lora_ranks are padded to R, the largest.

        Made at the first call, which is never one that a graph captures.
        """
        return [[_stacked(pairs) for pairs in zip(*slots, strict=True)] for slots in self._sets]


def _stacked(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A [N, R, I] and B [N, O, R] of N adapters' A [r, I] and B [O, r], R being the largest r."""
    rank = max(len(a) for a, _ in pairs)
    a = torch.stack([pad(a, (0, 0, 0, rank - len(a))) for a, _ in pairs])
    b = torch.stack([pad(b, (0, rank - b.shape[1])) for _, b in pairs])
    return a, b
