"""What the in-process benchmarks share: systems by name, and the part of a run that needs a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from punica_core.bench.popularity import POPULARITIES
from punica_core.errors import ConfigError

OFF: Final = "off"
"""LoRA is off: an engine that knows no adapters."""
BASE: Final = "base"
"""LoRA is on, and no request asks for an adapter."""

SYSTEMS: Final = (OFF, BASE, *POPULARITIES)


def check_systems(systems: Sequence[str], num_adapters: int) -> None:
    """Raise ConfigError for a system that is not known, or that would need adapters if there are none."""
    for name in systems:
        if name not in SYSTEMS:
            raise ConfigError(f"systems has {name!r}; each must be one of {', '.join(SYSTEMS)}.", param="systems")
    if num_adapters < 1 and any(name != OFF for name in systems):
        raise ConfigError(f"adapters is {num_adapters}; every system but {OFF!r} needs one.", param="adapters")


def measured_apart(benchmark: str, arguments: Sequence[str], system: str) -> dict[str, Any]:
    """The report of `python -m punica_core.bench.BENCHMARK ARGUMENTS` for one system alone.

    A process of its own gives all of its memory back: two engines do not fit a GPU that one fills. Raises RuntimeError
    if it fails; what it says on stderr is shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        module = f"punica_core.bench.{benchmark}"
        command = [sys.executable, "-m", module, *arguments, "--systems", system, "--out", str(out)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"measuring {system!r} in a process of its own failed with code {done.returncode}.")
        report: dict[str, Any] = json.loads(out.read_text())
        return report


def device_name(device: str) -> str:
    """What the layout's device is called: a GPU by its product name."""
    return str(torch.cuda.get_device_name()) if device.startswith("cuda") else device
