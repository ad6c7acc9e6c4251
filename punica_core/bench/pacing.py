"""What the bound on a step (`target_step_ms`) does to streams and to throughput, in simulation.

    python -m punica_core.bench.pacing

The scheduler and its pacer are the real ones, the GPU is a formula: what steps of Llama-3.1-8B were measured to take on
an H200 (docs/benchmarks.md), linear between the measured sizes. Steps are padded to the sizes that the GPU runner
captures; launching one that is not captured takes the host 17 ms. Needs no GPU and no model.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from punica_core.bench.latency import percentiles
from punica_core.bench.scheduler import WarmAndCold
from punica_core.bench.workload import request_lengths
from punica_core.engine.graphs import GraphSizes
from punica_core.kv.block_pool import BlockPool
from punica_core.protocol import NewSequence, SamplingParams, SequenceOutput
from punica_core.scheduler.limits import SchedulerLimits
from punica_core.scheduler.pacing import Pacer, StepSizes
from punica_core.scheduler.plan import SampledToken, StepPlan, StepResult, StepWork
from punica_core.scheduler.scheduler import Scheduler
from punica_core.stdout import until_unread

BASE: Final = ((0, 4.66), (8, 4.8), (64, 5.8), (128, 6.8), (1024, 23.0), (2048, 44.0))
"""Rows of a step without adapters, and the GPU's ms for it."""

DISTINCT: Final = ((0, 5.5), (8, 6.2), (64, 9.4), (128, 10.1), (1024, 29.5), (2048, 57.6))
"""With an adapter of its own for each sequence: prompts then take 1.28 to 1.31 times as long."""

ATTENDED_SECONDS: Final = 4 * 32 * 128 * 32 / 300e12
"""For one token of a prompt to attend to one other: 32 heads of 128 in 32 layers, at 300 TFLOP/s."""

LAUNCH_SECONDS: Final = 0.001
UNCAPTURED_LAUNCH_SECONDS: Final = 0.017
HOST_SECONDS: Final = 0.0005
"""Of the host for a step, besides its launch: planning it and sending its tokens."""

TARGETS_MS: Final = (0.0, 40.0, 35.0, 30.0, 25.0, 20.0, 15.0)

StepTable = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Case:
    """A load. lengths: (prompt, output) tokens of its requests. clients: how many of them are under way at once, each
    followed by the next when it ends; 0: all arrive at once. step_ms: what steps take, by their rows. turns: how many
    requests in turn are without adapters, then as many with; a step takes what BASE and step_ms say, by the shares of
    its rows. noise: standard deviation of the logarithm of what they take; stalls: share that takes 100 ms more.
    """

    what: str
    lengths: Sequence[tuple[int, int]]
    max_num_seqs: int
    clients: int = 0
    step_ms: StepTable = BASE
    turns: int = 0
    noise: float = 0.0
    stalls: float = 0.0

    @property
    def max_model_len(self) -> int:
        return max(prompt + output for prompt, output in self.lengths)

    def has_adapter(self, request_id: int) -> bool:
        return not self.turns or request_id // self.turns % 2 == 1


def cases() -> dict[str, Case]:
    """The loads, by name."""
    conversation = "lognormal:90:1.2:150:1.0"
    burst, closed = request_lengths(conversation, 512), request_lengths(conversation, 384)
    # Every eighth client reads a book to its model.
    long = [(16_000, 64) if i % 8 == 7 else (90, 150) for i in range(256)]
    return {
        "burst": Case("512 requests at once, at most 128 running", burst, 128),
        "burst-distinct": Case("the same, each with an adapter of its own", burst, 128, step_ms=DISTINCT),
        "clients": Case("64 clients in a closed loop, 384 requests", closed, 64, clients=64),
        "clients-distinct": Case("the same, each with an adapter of its own", closed, 64, clients=64, step_ms=DISTINCT),
        "clients-mixed": Case(
            "the same, 64 requests with adapters after 64 without",
            closed,
            64,
            clients=64,
            step_ms=DISTINCT,
            turns=64,
        ),
        "documents": Case("64 clients, prompts of 2,000 tokens, 100 generated", [(2000, 100)] * 384, 64, clients=64),
        "documents-distinct": Case(
            "the same, each with an adapter of its own", [(2000, 100)] * 384, 64, clients=64, step_ms=DISTINCT
        ),
        "documents-mixed": Case(
            "the same, 64 requests with adapters after 64 without",
            [(2000, 100)] * 384,
            64,
            clients=64,
            step_ms=DISTINCT,
            turns=64,
        ),
        "long": Case("32 clients in a closed loop, every eighth prompt 16,000 tokens long", long, 32, clients=32),
    }


@dataclass
class Trace:
    """When tokens came, in seconds, by request. asked: when requests arrived. long_chunks: the tokens of the first
    prompt beyond the token budget, step by step."""

    asked: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    long_chunks: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self.tokens.values())

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens.values())) / self.seconds

    @property
    def gaps(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.concatenate([np.diff(times) for times in self.tokens.values()])

    @property
    def first(self) -> list[float]:
        return [times[0] - self.asked[request_id] for request_id, times in self.tokens.items()]


class SimulatedGpu:
    """A host that launches steps and a GPU that executes them in order; seconds since the start."""

    def __init__(self, sizes: StepSizes, case: Case) -> None:
        self.host = 0.0
        self._sizes = sizes
        self._case = case
        self._noise, self._stalls = case.noise, case.stalls
        self._generator = np.random.Generator(np.random.PCG64(0))
        self._busy_until = 0.0

    def launch(self, plan: StepPlan) -> float:
        """When the step ends."""
        work = plan.work
        sizes, begin = self._sizes, max(self.host, self._busy_until)
        is_captured = work.prompts == 0 or (
            work.prompt_rows <= sizes.prompt_rows[-1] and work.prompts <= (sizes.max_prompts or work.prompts)
        )
        self.host += LAUNCH_SECONDS if is_captured else UNCAPTURED_LAUNCH_SECONDS
        adapted = sum(row.count for row in plan.rows if self._case.has_adapter(row.sequence.request_id))
        seconds = self._seconds(sizes.padded(work) if is_captured else work, adapted / plan.num_tokens)
        self._busy_until = max(begin + seconds, self.host)
        return self._busy_until

    def _seconds(self, work: StepWork, share: float) -> float:
        """share: of rows with adapters."""
        rows = work.decode_rows + work.prompt_rows
        linear = (1 - share) * _interpolated(BASE, rows) + share * _interpolated(self._case.step_ms, rows)
        stall = 0.1 if self._generator.random() < self._stalls else 0.0
        noise = self._generator.lognormal(0.0, self._noise)
        return noise * (linear / 1e3 + work.attended * ATTENDED_SECONDS) + stall


def _interpolated(table: StepTable, rows: int) -> float:
    sizes, milliseconds = zip(*table, strict=True)
    return float(np.interp(rows, sizes, milliseconds))


class Simulation:
    """A case, served by a scheduler that runs one step ahead of a simulated GPU."""

    def __init__(self, case: Case, target_ms: float, max_num_batched_tokens: int = 2048) -> None:
        limits = SchedulerLimits(
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=case.max_model_len,
            max_scored_tokens=1024,
        )
        sizes = GraphSizes.of(case.max_num_seqs, max_num_batched_tokens).step_sizes()
        pacer = Pacer(target_ms / 1e3, max_num_batched_tokens, sizes) if target_ms else None
        pool = BlockPool(case.max_num_seqs * limits.blocks_for(case.max_model_len + 64))
        self.trace = Trace()
        self._scheduler = Scheduler(limits, pool, None, WarmAndCold([]), pacer)
        self._gpu = SimulatedGpu(sizes, case)
        self._last_end = 0.0
        self._left = iter(enumerate(case.lengths))
        long = (i for i, (prompt, _output) in enumerate(case.lengths) if prompt > max_num_batched_tokens)
        self._first_long = next(long, None)
        self._clients = case.clients
        for _ in range(case.clients or len(case.lengths)):
            self._ask()

    def run(self) -> Trace:
        in_flight: tuple[StepPlan, float, float] | None = None
        while in_flight is not None or self._scheduler.has_unfinished():
            before, in_flight = in_flight, None
            plan = self._scheduler.schedule(self._gpu.host)
            if plan.rows:
                started = self._gpu.host
                in_flight = plan, started, self._gpu.launch(plan)
            if before is not None:
                self._collect(*before)
            self._gpu.host += HOST_SECONDS
        return self.trace

    def _collect(self, plan: StepPlan, started: float, end: float) -> None:
        now = self._gpu.host = max(self._gpu.host, end)
        seconds = now - max(started, self._last_end)
        self._last_end = now
        for row in plan.rows:
            if row.sequence.request_id == self._first_long and row.count > 1:
                self.trace.long_chunks.append(row.count)
        self._scheduler.measured(plan, seconds)
        sampled = {row.sequence.request_id: SampledToken(5) for row in plan.rows if row.samples}
        self._emit(self._scheduler.update(plan, StepResult(sampled), now), now)

    def _emit(self, outputs: Iterable[SequenceOutput], now: float) -> None:
        for output in outputs:
            self.trace.tokens[output.request_id].append(now)
            if output.finish_reason is not None and self._clients:
                self._ask()

    def _ask(self) -> None:
        """The next request arrives, if there is one."""
        request_id, (prompt, output) = next(self._left, (-1, (0, 0)))
        if request_id < 0:
            return
        self.trace.asked[request_id] = self._gpu.host
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        self._scheduler.add(
            NewSequence(request_id=request_id, prompt_ids=[1] * prompt, sampling=sampling), self._gpu.host
        )


def table(case: Case, targets_ms: Sequence[float]) -> str:
    """Markdown: a row for each target."""
    columns = ("target ms", "tokens/s", "", "between tokens p50", "p99", "max ms", "TTFT p50", "p99 ms")
    lines = [f"{case.what}:", "", f"| {' | '.join(columns)} |", "|" + "---:|" * len(columns)]
    reference = 0.0
    for target in targets_ms:
        trace = Simulation(case, target).run()
        speed = trace.tokens_per_second
        reference = reference or speed
        gaps, first = percentiles(trace.gaps), percentiles(trace.first)
        assert gaps is not None
        assert first is not None
        cells = [f"{target:g}" if target else "off", f"{speed:,.0f}", f"{speed / reference - 1:+.1%}"]
        cells += [f"{gaps[p]:.1f}" for p in ("p50", "p99", "max")] + [f"{first[p]:,.0f}" for p in ("p50", "p99")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each case."""
    known = cases()
    parser = argparse.ArgumentParser(prog="punica bench pacing", description=__doc__)
    parser.add_argument("--targets-ms", type=float, nargs="+", default=TARGETS_MS, help="0 is off")
    parser.add_argument("--cases", nargs="+", choices=list(known), default=list(known))
    options = parser.parse_args(arguments)
    print("\n\n".join(table(known[name], options.targets_ms) for name in options.cases))
    return 0


if __name__ == "__main__":
    sys.exit(until_unread(main))
