"""CUDA graphs of steps: of decode steps, and of steps with a few short prompts beside decoding sequences.

Launching a step kernel by kernel takes the host longer than a short step takes the GPU. There is a graph for each of a
few sizes, to which steps are padded; without adapters and with them, in one order or two; and with the contexts of
decoding sequences in pieces and whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from punica_core.engine.step_batch import MIN_ROWS, BatchSizes
from punica_core.lora.table_step import LoRAOrder, lora_orders
from punica_core.scheduler.pacing import StepSizes

MAX_GRAPH_SEQS = 256
"""Sequences of the largest decode step that is captured."""

MAX_PROMPTS = 16
"""Prompts of a captured step with prompts, at most."""

PROMPT_ROWS = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Rows of prompts in captured steps. Longer steps take the GPU longer than the host."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """decode: batch sizes of decode steps. mixed: those beside prompts. prompt_rows: of these. All ascending.

    whole_mixed: contexts of sequences that decode beside prompts are attended whole too, not in pieces only.
    inside_rows: see `lora_orders`.
    """

    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    prompt_rows: tuple[int, ...] = ()
    whole_mixed: bool = False
    inside_rows: int = 0

    @classmethod
    def of(
        cls, max_num_seqs: int, max_num_batched_tokens: int, *, whole_mixed: bool = False, inside_rows: int = 0
    ) -> GraphSizes:
        """Dense where a step is short, so that padding costs little; the largest fits max_num_seqs."""
        limit = min(max_num_seqs, MAX_GRAPH_SEQS)
        sizes = [MIN_ROWS, 4, *range(8, 128, 8), *range(128, MAX_GRAPH_SEQS + 1, 32)]
        decode = tuple(sizes[: bisect_left(sizes, limit) + 1])
        quarters = {decode[bisect_left(decode, decode[-1] * quarter / 4)] for quarter in range(1, 5)}
        prompt_rows = tuple(rows for rows in PROMPT_ROWS if rows <= max_num_batched_tokens)
        return cls(decode, (0, *sorted(quarters)), prompt_rows, whole_mixed, inside_rows)

    def num_graphs(self, *, lora: bool) -> int:
        """Of all steps. lora: there may be adapters."""
        return sum(len(self.keys(step, lora=lora)) for step in self.steps())

    @property
    def largest(self) -> BatchSizes:
        """Sizes that no captured step's exceed, in any of them."""
        if not self.prompt_rows:
            return BatchSizes(max(self.decode, default=0))
        return BatchSizes(max(self.decode), self.prompt_rows[-1], MAX_PROMPTS, MAX_PROMPTS)

    def steps(self) -> list[BatchSizes]:
        """The steps to capture, the largest first, so that all can share its memory."""
        found = [BatchSizes(size) for size in self.decode]
        found += [mixed_sizes(size, rows) for size in self.mixed for rows in self.prompt_rows]
        return sorted(found, key=lambda sizes: -sizes.num_rows)

    def cuts(self, step: BatchSizes, order: LoRAOrder) -> tuple[bool, ...]:
        """How a step is captured: with the contexts of its decode rows in pieces (True), and whole (False)."""
        has_whole = step.num_decode > 0 and (self.whole_mixed or step.num_prompts == 0)
        # Few adapters keep large steps from the order ahead: their graphs are worth little of the start.
        is_rare = order is LoRAOrder.BESIDE and LoRAOrder.AHEAD in lora_orders(step.num_rows)
        return (True, False) if has_whole and not is_rare else (True,)

    def keys(self, step: BatchSizes, *, lora: bool) -> list[GraphKey]:
        """The graphs of a step. lora: there may be adapters."""
        orders = lora_orders(step.num_rows, lora=lora, inside_rows=self.inside_rows)
        return [GraphKey(step, order, cut) for order in orders for cut in self.cuts(step, order)]

    def step_sizes(self) -> StepSizes:
        """The same for who plans steps."""
        if not self.decode:
            return StepSizes()
        return StepSizes(self.decode, self.mixed, self.prompt_rows, MAX_PROMPTS if self.prompt_rows else None)

    def fit(self, num_decode: int, num_prompt_rows: int, num_prompts: int) -> BatchSizes | None:
        """The sizes of the smallest captured step that fits, None if there is none."""
        if num_prompts == 0:
            size = _first_at_least(self.decode, num_decode)
            return None if size is None else BatchSizes(size)
        size, rows = _first_at_least(self.mixed, num_decode), _first_at_least(self.prompt_rows, num_prompt_rows)
        if size is None or rows is None or num_prompts > MAX_PROMPTS:
            return None
        return mixed_sizes(size, rows)


def mixed_sizes(num_decode: int, num_prompt_rows: int) -> BatchSizes:
    """Of a captured step with prompts, each of which needs one row of logits at most."""
    return BatchSizes(num_decode, num_prompt_rows, MAX_PROMPTS, MAX_PROMPTS)


def _first_at_least(ascending: Sequence[int], value: int) -> int | None:
    at = bisect_left(ascending, value)
    return ascending[at] if at < len(ascending) else None


@dataclass(frozen=True, slots=True)
class GraphKey:
    """sizes: of the step. order: of the adapters' kernels. cut: attention works on pieces of contexts."""

    sizes: BatchSizes
    order: LoRAOrder
    cut: bool


class StepGraphs:
    """Captured steps. logits: [most rows of logits, V], where every graph leaves its logits."""

    def __init__(self, sizes: GraphSizes, logits: Tensor) -> None:
        self.sizes = sizes
        self._logits = logits
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, key: GraphKey, run: Callable[[], Tensor]) -> None:
        """Capture `run`, which computes logits [n, V]."""
        run()  # compiles, tunes and loads what the capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self._logits[: key.sizes.num_logits].copy_(run())
        except Exception:
            self._pool = torch.cuda.graph_pool_handle()  # a capture that broke off leaves the pool marked as in use
            raise
        self._graphs[key] = graph

    def replay(self, key: GraphKey) -> Tensor:
        """Queue a captured step; returns its logits [n, V], valid until the next replay is queued."""
        self._graphs[key].replay()
        return self._logits[: key.sizes.num_logits]
