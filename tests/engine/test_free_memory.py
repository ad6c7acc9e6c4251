"""The memory a worker plans with: what its control group leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from punica_core.engine.build import free_host_bytes

MIB = 1 << 20


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    (tmp_path / "memory.max").write_text(f"{64 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{60 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {8 * MIB}\nfile {52 * MIB}\ninactive_file {50 * MIB}\n")
    return tmp_path


def test_files_that_were_read_do_not_count_as_used(cgroup: Path) -> None:
    assert free_host_bytes(cgroup) == 54 * MIB


def test_a_full_control_group_leaves_nothing(cgroup: Path) -> None:
    (cgroup / "memory.stat").write_text("inactive_file 0\n")
    (cgroup / "memory.current").write_text(f"{65 * MIB}\n")
    assert free_host_bytes(cgroup) == 0


def test_without_a_limit_the_machine_counts(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("max\n")
    assert free_host_bytes(cgroup) > 64 * MIB
    assert free_host_bytes(cgroup / "absent") > 64 * MIB
