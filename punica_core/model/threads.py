"""How many threads torch may use: no more than the CPUs this process is given."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def limit_threads(cpu_max: Path = CPU_MAX) -> int:
    """Lower torch's thread count to the CPUs available and return it; what OMP_NUM_THREADS asked for stays a bound.

    In a container with a CPU quota torch sees every core of the host, and threads that wait for a core hold up all
    others at the end of each product.
    """
    threads: int = max(1, min(torch.get_num_threads(), available_cpus(cpu_max)))
    torch.set_num_threads(threads)
    return threads


def available_cpus(cpu_max: Path = CPU_MAX) -> int:
    """CPUs of the affinity mask, within the quota of the control group, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _quota(cpu_max, default=affinity)))


def _quota(cpu_max: Path, default: int) -> int:
    """Whole CPUs of a cgroup v2 quota ("quota period" in µs), rounded up; `default` if there is none."""
    try:
        quota, period = cpu_max.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return default  # no cgroup v2, or "max"
