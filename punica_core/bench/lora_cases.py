"""What the kernel benchmark runs: fused groups of a model, adapters in memory, a step, and a CUDA graph of calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from punica_core import ops
from punica_core.bench.popularity import request_counts
from punica_core.lora.arena_layout import rank_and_scale
from punica_core.lora.segments import SegmentPlan
from punica_core.lora.tables import AdapterTables
from punica_core.ops.layout import Field, row_pitch, scratch_elements
from punica_core.ops.plan import sums_in_shrink

COLD_BYTES: Final = 256 << 20
"""Weights that the calls of one graph rotate through: several times the L2 cache of any GPU so far."""
FLOOR_BYTES_PER_US: Final = 4.18e6
"""Memory bandwidth that floors are computed with (H200)."""


@dataclass(frozen=True, slots=True)
class Group:
    """A fused group of slices that share their input."""

    name: str
    in_features: int
    out_features: tuple[int, ...]


LLAMA_8B: Final = (
    Group("qkv", 4096, (4096, 1024, 1024)),
    Group("o", 4096, (4096,)),
    Group("gate_up", 4096, (14336, 14336)),
    Group("down", 14336, (4096,)),
)


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of a step: rows of each adapter and each adapter's lora_rank."""

    counts: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, popularity: str, batch: int, ranks: Sequence[int]) -> Step:
        """``batch`` rows; adapter i has lora_rank ``ranks[i % len(ranks)]``."""
        counts = request_counts(popularity, batch)
        return cls(tuple(counts), tuple(ranks[i % len(ranks)] for i in range(len(counts))))

    @property
    def num_rows(self) -> int:
        return sum(self.counts)


def adapter_bytes(group: Group, ranks: Sequence[int]) -> int:
    """Bytes of the matrices of adapters with these lora_ranks in one group, 16-bit."""
    return sum(
        2 * (rank * group.in_features * len(group.out_features) + row_pitch(rank) * sum(group.out_features))
        for rank in ranks
    )


def moved_bytes(group: Group, step: Step) -> int:
    """Bytes of the active adapters once, x once, and y twice (read and written), 16-bit."""
    activations = 2 * step.num_rows * (group.in_features + 2 * sum(group.out_features))
    return adapter_bytes(group, step.ranks) + activations


def floor_us(group: Group, step: Step) -> float:
    """Time to move the :func:`moved_bytes` of a call."""
    return moved_bytes(group, step) / FLOOR_BYTES_PER_US


class Adapters:
    """``num_sets`` copies of a step's adapters for one group, back to back in one arena, one table each."""

    def __init__(self, group: Group, step: Step, num_sets: int, arena: Tensor, start: int = 0) -> None:
        slices = len(group.out_features)
        self.arena = arena
        records = np.zeros((num_sets * slices, len(step.ranks), 6), np.int64)
        template = torch.zeros(slices, len(step.ranks), 6, dtype=torch.int64)
        cursor = 0
        for slot, rank in enumerate(step.ranks):
            for index, width in enumerate(group.out_features):
                record = template[index, slot]
                record[Field.A_OFFSET] = cursor
                record[Field.B_OFFSET] = cursor + row_pitch(rank * group.in_features)
                cursor += row_pitch(rank * group.in_features) + width * row_pitch(rank)
                record[Field.GAIN_OFFSET] = record[Field.BIAS_OFFSET] = -1
                record[Field.RANK_AND_SCALE] = rank_and_scale(rank, 0.01)
        self.elements = cursor
        for number in range(num_sets):
            block = records[number * slices : (number + 1) * slices]
            block[:] = template.numpy()
            block[:, :, (Field.A_OFFSET, Field.B_OFFSET)] += start + number * cursor
        tables = AdapterTables(num_sets * slices, len(step.ranks), device=arena.device)
        tables.records.copy_(torch.from_numpy(records))
        self.tables = [tables.group(number * slices, slices) for number in range(num_sets)]


def make_plan(step: Step, device: torch.device | str) -> SegmentPlan:
    """The plan of a step whose adapters lie in slots 0, 1, …"""
    rows = np.repeat(np.arange(len(step.counts), dtype=np.int32), step.counts)
    plan = SegmentPlan(step.num_rows, max_rank=row_pitch(max(step.ranks)), device=device)
    plan.set_rows(rows, np.asarray(step.ranks, np.int32))
    return plan


def random_arena(num_elements: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Small random weights; a block of them repeated, as drawing gigabytes would take longer than the benchmark."""
    block = (torch.randn(min(num_elements, 1 << 24), device=device) / 64).to(dtype)
    return block.repeat(-(-num_elements // len(block)))[:num_elements]


def scratch_for(step: Step, slices: int, device: torch.device | str) -> Tensor:
    """Scratch that lets a small batch use the whole GPU."""
    return torch.empty(scratch_elements(step.num_rows, slices, row_pitch(max(step.ranks))), device=device)


class GroupCase:
    """One group and step, ready to be called with cold weights and warm activations.

    summed: as for ``lora_shrink``; None: as is faster, which is what the library does.
    """

    def __init__(
        self,
        group: Group,
        step: Step,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
        *,
        summed: bool | None = None,
    ) -> None:
        size = adapter_bytes(group, step.ranks)
        self.num_sets = max(1, min(512, -(-COLD_BYTES // size)))
        self.group = group
        self.step = step
        self.max_rank = row_pitch(max(step.ranks))
        elements = sum(
            (row_pitch(rank * group.in_features) + width * row_pitch(rank))
            for rank in step.ranks
            for width in group.out_features
        )
        arena = random_arena(elements * self.num_sets, dtype, device)
        self.adapters = Adapters(group, step, self.num_sets, arena)
        self.plan = make_plan(step, device)
        self.summed = sums_in_shrink(step.num_rows, self.max_rank) if summed is None else summed
        self.v = scratch_for(step, len(group.out_features), device)
        self.x = torch.randn(step.num_rows, group.in_features, device=device).to(dtype)
        self.y = torch.zeros(step.num_rows, sum(group.out_features), dtype=dtype, device=device)

    def __call__(self, index: int) -> None:
        """One shrink and expand with the index-th set of adapters."""
        self.shrink(index)
        self.expand(index)

    def shrink(self, index: int) -> None:
        """The first half of a call."""
        table, plan = self.adapters.tables[index % self.num_sets], self.plan.plan
        ops.lora_shrink(self.v, self.x, self.adapters.arena, table, plan, self.max_rank, summed=self.summed)

    def expand(self, index: int) -> None:
        """The second half of a call, of whatever the scratch holds."""
        table, plan = self.adapters.tables[index % self.num_sets], self.plan.plan
        group = self.group
        sizes = (group.out_features, group.in_features, self.max_rank)
        ops.lora_expand(self.y, self.v, self.adapters.arena, table, plan, *sizes, summed=self.summed)


def time_graph_us(call: Callable[[int], None], calls: int, *, replays: int = 11) -> float:
    """Median microseconds of one of ``calls`` dependent calls captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(min(calls, 3)):
            call(index)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            call(index)
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return float(statistics.median(times))
