"""`punica bench frontend`: what the HTTP front end alone can do, with a worker that computes nothing.

Throughput: tokens a second through one front-end process to many streams, by wall clock and by CPU second of that
process, at an offered rate. Latency: round trips of one-token requests, one at a time, with a worker that answers at
once: all of HTTP, JSON, tokenizer, batcher, the socket to the worker and back.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from app import demo
from app.bench.process import CLOCK_TICK, Tree, cpu_seconds, python_server
from app.bench.raw_client import round_trips, stream_all
from app.bench.stream import Outcome
from app.settings import Settings
from punica_core.bench import record
from punica_core.bench.latency import percentiles
from punica_core.bench.workload import PlannedRequest, Workload


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `punica bench frontend`."""
    parser.add_argument("--model", default="", help="folder of the tokenizer (default: the demo model)")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--rate", type=_rates, default=(30_000.0, 60_000.0), help="tokens a second offered, a list")
    parser.add_argument("--round-trips", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/frontend.json"))


def main(options: argparse.Namespace) -> int:
    """Run the benchmark, print its figures, write the JSON."""
    model = options.model or demo.with_demo(Settings()).model
    plan = Workload(models=("base",), requests=options.streams, lengths=f"fixed:16:{options.tokens}").plan()
    report: dict[str, Any] = {"provenance": record.provenance(), "throughput": []}
    for rate in options.rate:
        found = with_server(model, rate, lambda url, tree: throughput(url, tree, plan))
        report["throughput"].append({"offered_tokens_per_second": rate, **found})
    report["latency"] = with_server(model, 0.0, lambda url, tree: latency(url, tree, options.round_trips))
    record.write(options.out, report)
    print("\n".join([*map(throughput_line, report["throughput"]), latency_line(report["latency"])]))
    return 0


def with_server(model: str, rate: float, measure: Any) -> dict[str, Any]:
    """What `measure` says of a front end whose worker sends `rate` tokens a second."""
    arguments = ["-m", "app.bench.front_server", "--model-dir", model, "--tokens-per-second", str(rate)]
    with (
        tempfile.TemporaryFile() as log,
        python_server(arguments, environment={}, log=log, ready_within=120.0) as (url, tree),
    ):
        found: dict[str, Any] = measure(url, tree)
        return found


def throughput(url: str, tree: Tree, plan: Sequence[PlannedRequest]) -> dict[str, Any]:
    """Figures of all streams at once, after a short round to warm up. Raises RuntimeError if one fails."""
    _streamed(url, [PlannedRequest(request.model, request.prompt_ids, 4) for request in plan])
    cpu, client_cpu, began = cpu_seconds(tree.pid), time.process_time(), time.perf_counter()
    outcomes = _streamed(url, plan)
    wall = time.perf_counter() - began
    cpu, client_cpu = cpu_seconds(tree.pid) - cpu, time.process_time() - client_cpu
    tokens = sum(outcome.completion_tokens for outcome in outcomes)
    first = min(outcome.arrivals[0] for outcome in outcomes)
    return {
        "streams": len(outcomes),
        "tokens": tokens,
        "tokens_per_second": tokens / (max(outcome.ended for outcome in outcomes) - first),
        "tokens_per_cpu_second": tokens / max(cpu, CLOCK_TICK),
        "tokens_per_event": tokens / sum(outcome.events for outcome in outcomes),
        "front_end_cpu": cpu / wall,
        "client_cpu": client_cpu / wall,
        "gap_ms": percentiles([gap for outcome in outcomes for gap in outcome.gaps]),
    }


def _streamed(url: str, plan: Sequence[PlannedRequest]) -> list[Outcome]:
    outcomes = uvloop.run(stream_all(url, plan))
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(plan)} streams failed: {failed[0]}.")
    return outcomes


def latency(url: str, tree: Tree, count: int) -> dict[str, Any]:
    """Round trips of one-token completions, and CPU milliseconds of the front end for each."""
    body = msgspec.json.encode({"model": "base", "prompt": "Once upon a time", "max_tokens": 1})
    asyncio.run(round_trips(url, "/v1/completions", body, 20))
    cpu = cpu_seconds(tree.pid)
    found = uvloop.run(round_trips(url, "/v1/completions", body, count))
    cpu = cpu_seconds(tree.pid) - cpu
    return {"round_trips": count, "round_trip_ms": percentiles(found), "front_end_cpu_ms": cpu / count * 1e3}


def throughput_line(found: dict[str, Any]) -> str:
    return (
        f"offered {found['offered_tokens_per_second']:.0f} tokens/s to {found['streams']} streams: "
        f"{found['tokens_per_second']:.0f} tokens/s, {found['tokens_per_cpu_second']:.0f} per CPU second of the front "
        f"end, {found['tokens_per_event']:.2f} tokens an event"
    )


def latency_line(found: dict[str, Any]) -> str:
    return (
        f"one-token request: {found['round_trip_ms']['p50']:.2f} ms at p50, "
        f"{found['front_end_cpu_ms']:.2f} ms of front-end CPU"
    )


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))
