"""`punica bench cpu`: our server beside Hugging Face and PEFT `generate`, on one machine, in one run.

Both sides are loaded at the same time and take turns, so that what else the machine does meets both. Each figure is a
median over the repeats, in tokens a second of wall clock and in CPU milliseconds a token (all processes of that side).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from app import demo
from app.bench.load import run_load
from app.bench.process import Tree, python_server, resident_bytes
from app.settings import Settings
from punica_core.bench import record
from punica_core.bench.workload import PlannedRequest, Workload
from punica_core.errors import ConfigError

BASE = ""
"""Name of the base model in `Case.models`."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timing of one case."""

    generated_tokens: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Case:
    """Something to time: `requests` prompts over `models`, all at once for us, in its own way for the contender."""

    label: str
    way: str
    requests: int
    models: tuple[str, ...]


@dataclass(slots=True)
class Figures:
    """The timings of one case."""

    runs: list[Measurement] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(run.generated_tokens / run.seconds for run in self.runs)

    @property
    def cpu_ms_per_token(self) -> float:
        return statistics.median(run.cpu_seconds / run.generated_tokens * 1e3 for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens_per_second,
            "cpu_ms_per_token": self.cpu_ms_per_token,
            "runs": [msgspec.to_builtins(run) for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class Ours:
    """A running `punica serve`."""

    url: str
    tree: Tree
    base_name: str

    def measure(self, plan: Sequence[PlannedRequest]) -> Measurement:
        """All requests at once. Raises RuntimeError if one of them fails."""
        named = [PlannedRequest(r.model or self.base_name, r.prompt_ids, r.max_tokens) for r in plan]
        cpu = self.tree.cpu_seconds()
        run = asyncio.run(run_load(self.url, named, clients=len(named), max_seconds=3600.0))
        cpu = self.tree.cpu_seconds() - cpu
        failed = [outcome.error for outcome in run.outcomes if outcome.error]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(named)} requests failed: {failed[0]}.")
        return Measurement(sum(outcome.completion_tokens for outcome in run.outcomes), run.seconds, cpu)


@dataclass(frozen=True, slots=True)
class Contender:
    """A running `punica_core.bench.peft_generate`; its module says what the jobs mean."""

    process: subprocess.Popen[bytes]
    adapters: tuple[str, ...]

    def measure(self, way: str, plan: Sequence[PlannedRequest]) -> Measurement:
        job = {
            "way": way,
            "prompts": [request.prompt_ids for request in plan],
            "adapters": [request.model for request in plan],
            "new_tokens": plan[0].max_tokens,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(job) + b"\n")
        self.process.stdin.flush()
        return msgspec.convert(read_answer(self.process), Measurement)


def read_answer(process: subprocess.Popen[bytes]) -> Any:
    """The next line of a contender. Raises RuntimeError if it ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"The contender ended with exit code {process.wait()}.")
    return msgspec.json.decode(line)


def cases(streams: Sequence[int], adapters: Sequence[str], switched: int) -> list[Case]:
    """What is compared. One at a time, the number of prompts does not matter: `switched` of them are timed."""
    mixed, base = tuple(adapters), (BASE,)
    found = [
        Case("ours, base, 1 stream", "ours", 1, base),
        Case("transformers, base, 1 stream", "single", 1, base),
        Case("PEFT, 4 adapters, one at a time", "switching", switched, mixed),
    ]
    for count in streams:
        found += [
            Case(f"ours, 4 adapters, {count} streams", "ours", count, mixed),
            Case(f"PEFT, 4 adapters, batch of {count}", "mixed", count, mixed),
            Case(f"ours, base, {count} streams", "ours", count, base),
        ]
    return found


def aims(figures: dict[str, Figures], streams: Sequence[int]) -> dict[str, dict[str, float]]:
    """Ratios that the project aims at, by wall clock and by CPU time: > 1 is faster (or cheaper), except for costs.

    Those of which both sides were timed.
    """
    pairs = {"1 stream / transformers": ("ours, base, 1 stream", "transformers, base, 1 stream")}
    for count in streams:
        ours = f"ours, 4 adapters, {count} streams"
        pairs[f"{count} streams / PEFT one at a time"] = (ours, "PEFT, 4 adapters, one at a time")
        pairs[f"{count} streams / PEFT batch of {count}"] = (ours, f"PEFT, 4 adapters, batch of {count}")
        pairs[f"cost of 4 adapters, {count} streams"] = (ours, f"ours, base, {count} streams")
    found = {}
    for name, (ours, theirs) in pairs.items():
        if ours in figures and theirs in figures:
            a, b = figures[ours], figures[theirs]
            ratio = {"wall": a.tokens_per_second / b.tokens_per_second, "cpu": b.cpu_ms_per_token / a.cpu_ms_per_token}
            found[name] = {k: 1 / v - 1 for k, v in ratio.items()} if name.startswith("cost") else ratio
    return found


def table(figures: dict[str, Figures], ratios: dict[str, dict[str, float]]) -> str:
    """Both tables in Markdown."""
    lines = ["| | tokens/s | CPU ms a token |", "|---|---:|---:|"]
    lines += [f"| {label} | {f.tokens_per_second:.1f} | {f.cpu_ms_per_token:.1f} |" for label, f in figures.items()]
    lines += ["", "| ratio | wall clock | CPU time |", "|---|---:|---:|"]
    for name, ratio in ratios.items():
        cells = [
            f"{ratio[kind]:+.0%}" if name.startswith("cost") else f"{ratio[kind]:.2f}×" for kind in ("wall", "cpu")
        ]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `punica bench cpu`."""
    parser.add_argument("--model", default="", help="folder of the base model (default: the demo model)")
    parser.add_argument("--adapters", default="", help="folder of adapters; four are used (default: the demo's)")
    parser.add_argument("--streams", type=_counts, default=(8, 32), help="concurrent requests (default: 8,32)")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--switched", type=int, default=4, help="prompts timed one at a time (default: 4)")
    parser.add_argument("--only", default="", help="time only what has this in its name, such as '1 stream'")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="torch threads of either side (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/cpu.json"))


def main(options: argparse.Namespace) -> int:
    """Run the benchmark, print the tables, write the JSON. Raises ConfigError without model or adapters."""
    chosen = Settings(model=options.model, adapters=options.adapters)
    chosen = chosen if chosen.model else demo.with_demo(chosen)
    if not chosen.adapters:
        raise ConfigError("There are no adapters to compare with: pass --adapters.", param="adapters")
    before = record.provenance()
    with tempfile.TemporaryFile() as log, both_sides(chosen, options.threads, log) as (ours, contender):
        figures = measure_all(options, ours, contender)
        memory = {
            "ours_front_end_and_worker_bytes": ours.tree.resident_bytes(),
            "contender_bytes_two_bases": resident_bytes(contender.process.pid),
        }
    ratios = aims(figures, options.streams)
    settings = {key: value for key, value in vars(options).items() if isinstance(value, int | tuple) or key == "only"}
    report = {
        "provenance": before | {"load_average_after": record.provenance()["load_average"]},
        "settings": settings,
        "figures": {label: figure.to_json() for label, figure in figures.items()},
        "ratios": ratios,
        "memory": memory,
    }
    record.write(options.out, report)
    print(table(figures, ratios))
    print(f"\nresident: {memory}\nwritten to {options.out}")
    return 0


def measure_all(options: argparse.Namespace, ours: Ours, contender: Contender) -> dict[str, Figures]:
    """Every case `repeats` times, in turns, after one short untimed round. Prompts never repeat, so that no prefix
    cache helps."""
    every = cases(options.streams, contender.adapters[:4], options.switched)
    todo = [case for case in every if options.only in case.label]
    if not todo:
        raise ConfigError(f"No case has {options.only!r} in its name.", param="only")
    figures = {case.label: Figures() for case in todo}
    for repeat in range(-1, options.repeats):
        for index, case in enumerate(todo):
            tokens = options.new_tokens if repeat >= 0 else 2
            plan = Workload(
                models=case.models,
                requests=case.requests,
                popularity="distinct",
                lengths=f"fixed:{options.prompt_tokens}:{tokens}",
                seed=1000 * (repeat + 1) + index,
            ).plan()
            way: Callable[[Sequence[PlannedRequest]], Measurement] = ours.measure
            found = way(plan) if case.way == "ours" else contender.measure(case.way, plan)
            if repeat >= 0:
                figures[case.label].runs.append(found)
                print(f"{repeat + 1}/{options.repeats} {case.label}: {found.seconds:.1f} s", file=sys.stderr)
    return figures


@contextlib.contextmanager
def both_sides(chosen: Settings, threads: int, log: IO[bytes]) -> Iterator[tuple[Ours, Contender]]:
    """Our server and the contender, ready, until the block ends."""
    environment = {"OMP_NUM_THREADS": str(threads)}
    folders = ["--model", chosen.model, "--adapters", chosen.adapters]
    serve = ["-m", "app", "serve", *folders, "--served-model-name", "base"]
    command = [sys.executable, "-m", "punica_core.bench.peft_generate", *folders, "--threads", str(threads)]
    with (
        python_server(serve, environment=environment, log=log, ready_within=600.0) as (url, tree),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        try:
            adapters = tuple(read_answer(process)["ready"])
            yield Ours(url, tree, "base"), Contender(process, adapters)
        finally:
            process.terminate()


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
