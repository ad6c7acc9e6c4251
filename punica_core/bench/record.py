"""What makes a figure reproducible: date, commit, sources, hardware, versions, command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from punica_core.bench.source import source_hash

_PACKAGES = ("punica", "torch", "transformers", "peft", "flashinfer-python", "uvicorn", "httpx")
_FOLDER = Path(__file__).resolve().parent


def provenance(command: Sequence[str] = ()) -> dict[str, Any]:
    """Where and how this process measures. Of paths in the command only the last part is kept.

    command: of `punica`, its words; by default the process's own arguments.
    commit: "unknown" where git does not track these files; `source` (see `punica_core.bench.source`) finds it then.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "source": source_hash(),
        "command": "punica " + " ".join(Path(word).name for word in command or sys.argv[1:]),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def write(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def _commit(folder: Path = _FOLDER) -> str:
    """What git calls the commit of the sources in `folder`; "unknown" without git or outside of their repository."""
    git = ["git", "-C", str(folder)]
    # An environment inside another project's repository lies in that one, but its files are not tracked there.
    tracked = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
    try:
        subprocess.run(tracked, capture_output=True, check=True)
        described = [*git, "describe", "--always", "--abbrev=10"]
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
