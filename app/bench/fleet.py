"""A run by several client processes: one process of `httpx` gets through some 20,000 small pieces a second."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import zip_longest
from typing import Final

import uvloop

from app.bench.load import Run, run_load
from punica_core.bench.workload import PlannedRequest

HEAD_START: Final = 0.2
"""Seconds from when all processes are there to the start, which all of them are to meet."""


def run_plan(
    base_url: str, plan: Sequence[PlannedRequest], *, clients: int, max_seconds: float, processes: int = 1
) -> Run:
    """`run_load` by so many processes, at most one a client; each has every processes-th request and its share of
    `clients`.

    Outcomes come in order of the plan; those of a closed loop may have been taken in another order than by one
    process. client_cpu is that of the busiest.
    """
    processes = min(processes, clients, len(plan))
    if processes <= 1:
        return uvloop.run(run_load(base_url, plan, clients=clients, max_seconds=max_seconds))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for started in [pool.submit(_import) for _ in range(processes)]:
            started.result()
        start = time.perf_counter() + HEAD_START
        parts = [
            pool.submit(
                _run_part, base_url, list(plan[i::processes]), _share(clients, processes, i), max_seconds, start
            )
            for i in range(processes)
        ]
        return merged([part.result() for part in parts])


def merged(runs: Sequence[Run]) -> Run:
    """One run of those of the processes, the i-th of which had every len(runs)-th request from the i-th on."""
    turns = zip_longest(*(run.outcomes for run in runs))
    return Run(
        [outcome for turn in turns for outcome in turn if outcome is not None],
        sum(run.not_sent for run in runs),
        max(run.seconds for run in runs),
        max(run.client_cpu for run in runs),
        [lag for run in runs for lag in run.client_lags],
    )


def _share(count: int, processes: int, index: int) -> int:
    return count // processes + (index < count % processes)


def _import() -> None:
    """Reaching this, a process has imported what a part needs. The pause leaves the next one to another process."""
    time.sleep(0.05)


def _run_part(base_url: str, plan: Sequence[PlannedRequest], clients: int, max_seconds: float, start: float) -> Run:
    """start: of `time.perf_counter()`, which all processes of a machine share."""
    time.sleep(max(start - time.perf_counter(), 0.0))
    return uvloop.run(run_load(base_url, plan, clients=clients, max_seconds=max_seconds))
