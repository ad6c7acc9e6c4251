"""`punica bench NAME` hands over to the benchmark of that name."""

from __future__ import annotations

import subprocess
import sys

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "app", "bench", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("cpu", "--threads"),
        ("frontend", "--rate"),
        ("serve", "--popularity"),
        ("kernels", "--peers"),
        ("decode", "--batches"),
        ("throughput", "--sweep-adapters"),
    ],
)
def test_help_of_each_benchmark_names_its_flags(name: str, flag: str) -> None:
    done = bench(name, "--help")
    assert done.returncode == 0, done.stderr
    assert flag in done.stdout


def test_an_unknown_benchmark_is_an_error_that_names_the_known_ones() -> None:
    done = bench("kernel")
    assert done.returncode == 2
    assert all(name in done.stderr for name in ("cpu", "frontend", "serve", "kernels", "decode", "throughput"))
