"""CUDA graphs of decode steps: for each batch size of a list, with and without adapters, of two kinds of attention."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from punica_core.engine.step_batch import MIN_ROWS

MAX_GRAPH_SEQS = 256
"""Sequences of the largest step that is captured."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, dense where a step is short, so that padding costs little; the last fits max_num_seqs."""
    limit = min(max_num_seqs, MAX_GRAPH_SEQS)
    sizes = [MIN_ROWS, 4, *range(8, 128, 8), *range(128, MAX_GRAPH_SEQS + 1, 32)]
    return sizes[: bisect_left(sizes, limit) + 1]


@dataclass(frozen=True, slots=True)
class GraphKey:
    """size: batch. with_lora: with the adapters' kernels. cut: attention works on pieces of contexts."""

    size: int
    with_lora: bool
    cut: bool


class DecodeGraphs:
    """Captured decode steps. sizes: ascending. logits: [max size, V], where every graph leaves its logits."""

    def __init__(self, sizes: list[int], logits: Tensor) -> None:
        self.logits = logits
        self._sizes = sizes
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def size_for(self, num_seqs: int) -> int | None:
        """The smallest captured size that fits, None if there is none."""
        at = bisect_left(self._sizes, num_seqs)
        return self._sizes[at] if at < len(self._sizes) else None

    def capture(self, key: GraphKey, run: Callable[[], Tensor]) -> None:
        """Capture `run`, which computes logits [size, V]; the largest size first, so that all share its memory."""
        run()  # compiles, tunes and loads what the capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self.logits[: key.size].copy_(run())
        self._graphs[key] = graph

    def replay(self, key: GraphKey) -> Tensor:
        """Queue a captured step; returns its logits [size, V], valid until the next replay is queued."""
        self._graphs[key].replay()
        return self.logits[: key.size]
