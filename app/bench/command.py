"""`punica bench NAME …`."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence

from app.bench import cpu, frontend, serve

WORKER_BENCHMARKS = {
    "kernels": "the CUDA kernels beside cuBLAS loops and gather + bmm (needs a GPU)",
    "decode": "steady-state decode steps by batch and popularity of adapters",
    "throughput": "a whole workload through the engine, adapters by popularity",
    "quick": "decode, throughput, PEFT and a check of answers on one engine, for a GPU at hand for minutes",
    "scheduler": "what the scheduler's decisions cost",
    "pacing": "what the bound on a step does to streams and throughput, in simulation",
}
"""Benchmarks that live in `punica_core.bench`, since they need what the front end must not import."""


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark; the exit code. Raises PunicaError if it cannot start."""
    parser = argparse.ArgumentParser(prog="punica bench", description="Measure this installation on this machine.")
    names = parser.add_subparsers(required=True, metavar="name")
    for name, benchmark, text in (
        ("cpu", cpu, "our server beside Hugging Face and PEFT generate"),
        ("frontend", frontend, "the HTTP front end with a worker that computes nothing"),
        ("serve", serve, "load over HTTP on any OpenAI-compatible server"),
    ):
        sub = names.add_parser(name, help=text, description=benchmark.__doc__)
        benchmark.add_flags(sub)
        sub.set_defaults(run=benchmark.main)
    for name, text in WORKER_BENCHMARKS.items():
        names.add_parser(name, help=text, add_help=False)
    if arguments and arguments[0] in WORKER_BENCHMARKS:
        return subprocess.call([sys.executable, "-m", f"punica_core.bench.{arguments[0]}", *arguments[1:]])
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends what it has started, too
    return int(options.run(options))
