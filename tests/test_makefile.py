"""What `make serve` would do on one machine and another: `make -n` with programs of our own on PATH."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTS_ONE = 'echo "GPU 0: NVIDIA H200 (UUID: GPU-0)"'

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def planned(folder: Path, *variables: str, nvidia_smi: str = "exit 9") -> str:
    """The commands of `make serve VARIABLES` in a fresh checkout. nvidia_smi: a line of shell that stands for it."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    program.chmod(0o755)
    done = subprocess.run(
        ["make", "-n", "serve", *variables],
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_without_a_gpu_nothing_for_one_is_installed(tmp_path: Path) -> None:
    plan = planned(tmp_path, "NVCC=/opt/nvcc")
    assert "-e '.[demo]'" in plan
    assert "gpu" not in plan
    assert "--device" not in plan


def test_a_driver_that_finds_no_gpu_is_none(tmp_path: Path) -> None:
    assert "-e '.[demo]'" in planned(tmp_path, "NVCC=/opt/nvcc", nvidia_smi="echo No devices found")


def test_on_a_gpu_its_extra_is_installed_and_auto_takes_it(tmp_path: Path) -> None:
    plan = planned(tmp_path, "NVCC=/opt/nvcc", nvidia_smi=LISTS_ONE)
    assert "-c constraints.txt -e '.[demo,gpu]'" in plan
    assert "--device" not in plan


def test_an_environment_for_the_cpu_is_added_to_when_there_is_a_gpu(tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    planned(tmp_path)  # puts the files there
    (tmp_path / ".venv" / ".serve").touch()
    assert "pip install" not in planned(tmp_path, "NVCC=/opt/nvcc", "-o", "pyproject.toml", "-o", "constraints.txt")
    plan = planned(tmp_path, "NVCC=/opt/nvcc", "-o", "pyproject.toml", "-o", "constraints.txt", nvidia_smi=LISTS_ONE)
    assert "-e '.[demo,gpu]'" in plan


def test_a_gpu_without_nvcc_is_left_alone_aloud_unless_a_device_is_named(tmp_path: Path) -> None:
    plan = planned(tmp_path, "NVCC=", nvidia_smi=LISTS_ONE)
    assert "-e '.[demo]'" in plan
    assert "no nvcc" in plan
    assert "serve --device cpu" in plan
    for named in ("ARGS=--device cuda", "ARGS=--config configs/single-gpu.yaml", "PUNICA_DEVICE=cuda"):
        plan = planned(tmp_path, "NVCC=", named, nvidia_smi=LISTS_ONE)
        assert "no nvcc" not in plan
        assert "--device cpu" not in plan


def test_a_port_in_use_is_told_before_anything_is_installed(tmp_path: Path) -> None:
    planned(tmp_path)  # puts the files there
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ntest "$1" = -c || {{ echo "runs $*"; exit 0; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    setup = [str(python.parents[1].relative_to(tmp_path) / ".serve"), "NVCC="]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(["make", *setup, f"PORT={port}"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode != 0
        assert f"Cannot listen on 127.0.0.1:{port}" in done.stdout
        assert "PORT=" in done.stdout
        assert "pip install" not in done.stdout
        elsewhere = [f"PORT={port}", "ARGS=--port 0"]
        done = subprocess.run(["make", *setup, *elsewhere], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "pip install" in done.stdout
    (tmp_path / ".venv" / ".serve").unlink()
    done = subprocess.run(["make", *setup, f"PORT={port}"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pip install" in done.stdout
