"""The script that runs all measurements knows its parts, and names what failed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "load_tests" / "gpu_session.sh"


def test_an_unknown_part_fails_and_is_named(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path / "out")}
    done = subprocess.run([SCRIPT, "nonsense"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "known: decode throughput serve decode-7b sweep punica" in done.stderr
    assert "failed: nonsense" in done.stderr


def test_without_time_no_part_is_started(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path / "out"), "LIMIT": "0"}
    done = subprocess.run([SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.count("(no time left)") == 6
    assert list((tmp_path / "out").iterdir()) == []
