"""What every test may use: what this machine has, and skips that say what is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.demo import ADAPTERS, demo_model
from tests.support.server import LiveServer, serve

if "PYTEST_XDIST_WORKER" in os.environ:
    # Those who run tests side by side share the cores, and so do the servers they start: more threads than cores spend
    # their time waiting for each other. Read when torch is first imported.
    _cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))

LONGEST_FIRST = (
    "parity/test_parity.py",
    "live/test_faults.py",
    "live/test_mixed_requests.py",
    "live/test_openai_client.py",
    "scheduler/test_scheduler_machine.py",
    "live/test_tiny_engine.py",
    "app/test_bench_command.py",
    "live/test_tenants.py",
    "engine/test_format_precision.py",
    "ops/test_emulated_linear.py",
    "ops/test_emulated_prompt.py",
)
"""Files under tests/ that take tens of seconds. Those who share the work take one file after another in this order, and
then the others, and so end at about the same time."""


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`gpu` tests skip without a GPU; `slow` ones run only when `-m` asks for them. LONGEST_FIRST come first."""
    root = Path(__file__).parent
    turn = {root / name: index for index, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: turn.get(item.path, len(turn)))
    wants_slow = "slow" in config.getoption("-m")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    for item in items:
        if item.get_closest_marker("slow") and not wants_slow:
            item.add_marker(pytest.mark.skip(reason="minutes of work: run it with -m slow (make parity)"))


@pytest.fixture(scope="session")
def nvcc() -> str:
    """Path of the CUDA compiler. Skips without one, unless TESTS_REQUIRE names it."""
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        reason = "needs nvcc (the CUDA toolkit's compiler), which is not on PATH"
        if "nvcc" in os.environ.get("TESTS_REQUIRE", "").split(","):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A real server on the demo model, with its adapters."""
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--model", str(demo_model()), "--adapters", str(ADAPTERS), "--served-model-name", "base")
    with serve(log, *flags) as server:
        yield server
