"""`punica bench NAME` hands over to the benchmark of that name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.bench.command import WORKER_BENCHMARKS
from tests.support.unread import unread


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
        ("scheduler", "punica bench scheduler"),
    ],
)
def test_help_of_each_benchmark_names_its_flags(name: str, flag: str) -> None:
    done = bench(name, "--help")
    assert done.returncode == 0, done.stderr
    assert flag in done.stdout


@pytest.mark.parametrize("name", ["scheduler", "pacing"])
def test_a_flag_that_a_benchmark_does_not_have_is_refused(name: str) -> None:
    done = bench(name, "--no-such-flag")
    assert done.returncode == 2
    assert f"punica bench {name}: error: unrecognized arguments: --no-such-flag" in done.stderr


def test_help_lists_every_benchmark_with_what_it_measures() -> None:
    done = bench("--help")
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert all(f"{name} {text}" in told for name, text in WORKER_BENCHMARKS.items())
    assert all(f" {name} " in told for name in ("cpu", "frontend", "serve"))


def test_without_a_name_the_known_ones_are_asked_for() -> None:
    done = bench()
    assert done.returncode == 2
    assert "name" in done.stderr


def test_an_unknown_benchmark_is_an_error_that_names_the_known_ones() -> None:
    done = bench("kernel")
    assert done.returncode == 2
    assert all(name in done.stderr for name in ("cpu", "frontend", "serve", "kernels", "decode", "throughput"))


@pytest.mark.parametrize("name", WORKER_BENCHMARKS)
def test_output_of_the_workers_benchmarks_may_lose_its_reader(name: str) -> None:
    assert unread("bench", name, "--help", buffered=True) == (141, "")
