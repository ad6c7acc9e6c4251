"""The seven projections of a whole model, with and without LoRA, as CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

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
from punica_core.ops.layout import row_pitch


class ModelCase:
    """Base products and LoRA of every fused group of ``num_layers`` layers, each with weights of its own.

    ``forked`` runs shrink on a second stream beside the base product, ``beside`` in one chain through a programmatic
    edge of the graph; otherwise one kernel runs after another.
    """

    def __init__(
        self,
        step: Step,
        *,
        num_layers: int = 32,
        groups: Sequence[Group] = LLAMA_8B,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
    ) -> None:
        self.groups = groups
        self.num_layers = num_layers
        self.max_rank = row_pitch(max(step.ranks))
        self.plan = make_plan(step, device)
        self.side = torch.cuda.Stream()
        rows = step.num_rows
        self.x = [torch.randn(rows, group.in_features, device=device).to(dtype) for group in groups]
        self.y = [torch.empty(rows, sum(group.out_features), dtype=dtype, device=device) for group in groups]
        self.v = [scratch_for(step, len(group.out_features), device) for group in groups]
        self.weights = [self._draw_layer(dtype, device) for _ in range(num_layers)]
        sizes = [num_layers * adapter_bytes(group, step.ranks) // 2 for group in groups]
        arena = random_arena(sum(sizes) + 4096, dtype, device)
        self.adapters: list[Adapters] = []
        start = 0
        for group in groups:
            adapters = Adapters(group, step, num_layers, arena, start)
            start += num_layers * adapters.elements
            self.adapters.append(adapters)

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

    def forked(self) -> None:
        """Shrink beside the base product, then expand."""
        main = torch.cuda.current_stream()
        for layer in range(self.num_layers):
            for index in range(len(self.groups)):
                self.side.wait_stream(main)
                with torch.cuda.stream(self.side):
                    self._shrink(layer, index)
                self._product(layer, index)
                main.wait_stream(self.side)
                self._expand(layer, index)

    def beside(self) -> None:
        """Shrink beside the base product in one chain, then expand."""
        for layer in range(self.num_layers):
            for index in range(len(self.groups)):
                self._shrink(layer, index, beside=True)
                self._product(layer, index)
                self._expand(layer, index)

    def _product(self, layer: int, index: int) -> None:
        torch.mm(self.x[index], self.weights[layer][index].t(), out=self.y[index])

    def _shrink(self, layer: int, index: int, *, beside: bool = False) -> None:
        adapters = self.adapters[index]
        table, plan = adapters.tables[layer], self.plan.plan
        ops.lora_shrink(self.v[index], self.x[index], adapters.arena, table, plan, self.max_rank, beside=beside)

    def _expand(self, layer: int, index: int) -> None:
        adapters, group = self.adapters[index], self.groups[index]
        table, plan = adapters.tables[layer], self.plan.plan
        y, v = self.y[index], self.v[index]
        ops.lora_expand(y, v, adapters.arena, table, plan, group.out_features, group.in_features, self.max_rank)


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``run``, replayed once."""
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
