"""torch uses no more threads than there are CPUs for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from punica_core.model.threads import available_cpus, limit_threads


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)), raising=False)


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("content", "cpus"), [("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("max 100000", 4), ("", 4)]
)
def test_a_quota_lowers_the_number_of_cpus(tmp_path: Path, content: str, cpus: int) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(content)
    assert available_cpus(path) == cpus


@pytest.mark.usefixtures("four_cpus")
def test_without_a_control_group_the_affinity_counts(tmp_path: Path) -> None:
    assert available_cpus(tmp_path / "absent") == 4


@pytest.mark.usefixtures("four_cpus")
def test_threads_are_lowered_and_never_raised(tmp_path: Path) -> None:
    torch.set_num_threads(3)
    assert limit_threads(tmp_path / "absent") == 3
    path = tmp_path / "cpu.max"
    path.write_text("200000 100000")
    assert limit_threads(path) == 2
    assert torch.get_num_threads() == 2
