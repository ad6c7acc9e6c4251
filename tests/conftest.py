"""What every test may use: what this machine has, and skips that say what is missing."""

from __future__ import annotations

import os
import shutil

import pytest


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`gpu` tests skip without a GPU; `slow` ones run only when `-m` asks for them.

    The files that take longest come first, so that those who share the work end at about the same time.
    """
    items.sort(key=lambda item: item.path.parent.name not in ("parity", "live"))
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
