"""The seven projections of a whole model, with and without LoRA, as CUDA graphs."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from punica_core import ops
from punica_core.bench.lora_cases import (
    LLAMA_8B,
    Adapters,
    Group,
    Step,
    adapter_bytes,
    make_plan,
    random_arena,
    scratch_for,
)
from punica_core.lora.arena_layout import AdapterLayout, ModuleShape, Run, lay_out, record_words
from punica_core.lora.table_step import MAX_INSIDE_RANK, is_inside
from punica_core.lora.tables import AdapterTables
from punica_core.ops.layout import Header, row_pitch, scratch_elements

ENGINE_SLOTS: Final = 4096
ENGINE_RANK: Final = 256
LARGE: Final = 64
"""What A and B are multiplied with for a check: adapters add about as much as the base products then."""


class WrongResult(RuntimeError):
    """Kernels compute something else than they should."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Adapters as the engine has them: each in one range of the arena, tables of ENGINE_SLOTS, scratch for ENGINE_RANK.

    by_slot: the records of a slot lie together, else those of a module. own_rank: low-rank rows lie as far apart as
    the step's adapters need, else ENGINE_RANK. Both false is how it was until commit a08f736.
    """

    by_slot: bool = True
    own_rank: bool = True


class ModelCase:
    """Base products and LoRA of every fused group of ``num_layers`` layers, each with weights of its own.

    memory: where adapters, tables and scratch lie; default back to back, group by group, for this step alone.
    ``forked`` runs shrink on a second stream beside the base product, ``beside`` in one chain through a programmatic
    edge of the graph; otherwise one kernel runs after another. All but ``ahead`` and ``inside`` give the same bits.
    """

    def __init__(
        self,
        step: Step,
        *,
        num_layers: int = 32,
        groups: Sequence[Group] = LLAMA_8B,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        memory: EngineMemory | None = None,
    ) -> None:
        self.groups = groups
        self.num_layers = num_layers
        self.max_rank = self.inside_rank = row_pitch(max(step.ranks))
        self.plan = make_plan(step, device)
        rows = step.num_rows
        self.x = [torch.randn(rows, group.in_features, device=device).to(dtype) for group in groups]
        self.y = [torch.empty(rows, sum(group.out_features), dtype=dtype, device=device) for group in groups]
        self.weights = [self._draw_layer(dtype, device) for _ in range(num_layers)]
        if memory is None:
            self._place(step, dtype, device)
        else:
            self._place_as_engine(step, memory, dtype, device)

    def _place(self, step: Step, dtype: torch.dtype, device: str) -> None:
        self.v = [scratch_for(step, len(group.out_features), device) for group in self.groups]
        sizes = [self.num_layers * adapter_bytes(group, step.ranks) // 2 for group in self.groups]
        self.arena = random_arena(sum(sizes) + 4096, dtype, device)
        self.tables: list[list[Tensor]] = []
        start = 0
        for group in self.groups:
            adapters = Adapters(group, step, self.num_layers, self.arena, start)
            start += self.num_layers * adapters.elements
            self.tables.append(adapters.tables)

    def _place_as_engine(self, step: Step, memory: EngineMemory, dtype: torch.dtype, device: str) -> None:
        self.max_rank = ENGINE_RANK
        self.inside_rank = max(self.inside_rank, MAX_INSIDE_RANK) if memory.own_rank else ENGINE_RANK
        if not memory.own_rank:
            self.plan.plan[Header.RANK_PITCH] = ENGINE_RANK
        rows = step.num_rows
        self.v = [
            torch.empty(scratch_elements(rows, len(group.out_features), ENGINE_RANK), device=device)
            for group in self.groups
        ]
        slices = [len(group.out_features) for group in self.groups]
        layouts = {rank: self._layout(rank) for rank in set(step.ranks)}
        self.arena = random_arena(sum(layouts[rank].num_elements for rank in step.ranks), dtype, device)
        tables = AdapterTables(self.num_layers * sum(slices), ENGINE_SLOTS, device=device)
        start = 0
        for slot, rank in enumerate(step.ranks):
            layout = layouts[rank]
            run = (Run(0, layout.num_elements, start),)
            words = [record_words(place, 0.01, run) for place in layout.places.values()]
            tables.records[:, slot].copy_(torch.tensor(words))
            start += layout.num_elements
        if not memory.by_slot:
            tables.records = tables.records.contiguous()
        firsts = [sum(slices[:index]) for index in range(len(slices))]
        self.tables = [
            [tables.group(layer * sum(slices) + first, count) for layer in range(self.num_layers)]
            for first, count in zip(firsts, slices, strict=True)
        ]

    def _layout(self, lora_rank: int) -> AdapterLayout[int]:
        """Of an adapter of all modules, layer by layer."""
        shapes = [
            ModuleShape(lora_rank, group.in_features, width)
            for _ in range(self.num_layers)
            for group in self.groups
            for width in group.out_features
        ]
        return lay_out(dict(enumerate(shapes)))

    def _draw_layer(self, dtype: torch.dtype, device: str) -> list[Tensor]:
        return [
            random_arena(sum(group.out_features) * group.in_features, dtype, device).view(-1, group.in_features)
            for group in self.groups
        ]

    def base(self) -> None:
        """The base products alone."""
        for layer in range(self.num_layers):
            for index in range(len(self.groups)):
                self._product(layer, index)

    def chained(self) -> None:
        """Base product, shrink, expand, one after another."""
        for layer in range(self.num_layers):
            for index in range(len(self.groups)):
                self._product(layer, index)
                self._shrink(layer, index)
                self._expand(layer, index)

    def early(self) -> None:
        """Shrink, base product, expand, one after another."""
        for layer in range(self.num_layers):
            for index in range(len(self.groups)):
                self._shrink(layer, index)
                self._product(layer, index)
                self._expand(layer, index)

    @functools.cached_property
    def side(self) -> torch.cuda.Stream:
        """Where ``forked`` runs shrink."""
        return torch.cuda.Stream()

    def forked(self) -> None:
        """Shrink beside the base product, then expand."""
        main, side = torch.cuda.current_stream(), self.side
        for layer in range(self.num_layers):
            for index in range(len(self.groups)):
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    self._shrink(layer, index)
                self._product(layer, index)
                main.wait_stream(side)
                self._expand(layer, index)

    def beside(self, *, summed: bool = True) -> None:
        """Shrink beside the base product in one chain, then expand."""
        for layer in range(self.num_layers):
            for index in range(len(self.groups)):
                self._beside(layer, index, summed=summed)

    def ahead(self) -> None:
        """Shrink, expand, and the base product, which adds to what expand wrote, one after another."""
        for layer in range(self.num_layers):
            for index in range(len(self.groups)):
                self._shrink(layer, index, summed=True)
                self._expand(layer, index, summed=True, overwrite=True)
                ops.add_product(self.y[index], self.x[index], self.weights[layer][index])

    def inside(self) -> None:
        """Base product, shrink and expand in one kernel, as in ``beside`` where the engine does that too."""
        for layer in range(self.num_layers):
            for index, group in enumerate(self.groups):
                if not is_inside(self.plan.num_rows, group.out_features):
                    self._beside(layer, index)
                    continue
                tables = (self.arena, self.tables[index][layer], self.plan.plan)
                weight = self.weights[layer][index]
                sizes = (list(group.out_features), self.inside_rank)
                ops.lora_linear(self.y[index], self.v[index], self.x[index], weight, None, *tables, *sizes)

    def check(self, run: Callable[[], None]) -> None:
        """Compare ``ahead`` or ``inside`` with ``chained`` on adapters that add much.

        Raises:
            WrongResult: a row differs by more than what rounding in other places explains.
        """
        self.arena.mul_(LARGE)
        results = []
        for each in (self.base, self.chained, run):
            for y in self.y:
                y.fill_(torch.nan)
            each()
            results.append([y.float() for y in self.y])
        self.arena.div_(LARGE)
        for group, base, want, got in zip(self.groups, *results, strict=True):
            # Each rounds what it computes first and the sum: relative to the sizes of both, and of the sum twice.
            sizes = base.norm(dim=-1) + (want - base).norm(dim=-1) + 2 * want.norm(dim=-1)
            error = (got - want).norm(dim=-1) / sizes
            if not bool((error <= torch.finfo(self.y[0].dtype).eps / 2).all()):
                raise WrongResult(f"{group.name}: not what chained gives, off by {float(error.max()):.2g} of the sizes")

    def _beside(self, layer: int, index: int, *, summed: bool = True) -> None:
        self._shrink(layer, index, summed=summed, beside=True)
        self._product(layer, index)
        self._expand(layer, index, summed=summed)

    def _product(self, layer: int, index: int) -> None:
        torch.mm(self.x[index], self.weights[layer][index].t(), out=self.y[index])

    def _shrink(self, layer: int, index: int, *, summed: bool = False, beside: bool = False) -> None:
        tables = (self.arena, self.tables[index][layer], self.plan.plan)
        ops.lora_shrink(self.v[index], self.x[index], *tables, self.max_rank, summed=summed, beside=beside)

    def _expand(self, layer: int, index: int, *, summed: bool = False, overwrite: bool = False) -> None:
        group, x = self.groups[index], self.x[index]
        tables = (self.arena, self.tables[index][layer], self.plan.plan)
        sizes = (group.out_features, group.in_features, self.max_rank)
        ops.lora_expand(self.y[index], self.v[index], *tables, *sizes, summed=summed, x=x, overwrite=overwrite)


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``run``, replayed once."""
    torch.cuda.synchronize()  # what the case consists of may still be written on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_ms(graphs: Sequence[torch.cuda.CUDAGraph], *, replays: int = 9) -> list[float]:
    """Median milliseconds of each graph. They take turns, so that a change of clocks meets all of them."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays):
        for graph, own in zip(graphs, times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            own.append(begin.elapsed_time(end))
    return [float(statistics.median(own)) for own in times]
