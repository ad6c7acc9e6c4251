"""How long the GPU works in a step, from a profile of its kernels; the rest of a step's time it waits for the host."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

_WORK: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def profile_steps(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Run `step` so often under the profiler and account for the time of the device.

    busy_ms: of one step, in which at least one kernel or copy ran. idle_share: of the time between the first and the
    last of them. The profiler itself slows the host down, so the share is an upper bound.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return device_share(events, steps)


def device_share(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """See `profile_steps`; events: of a Chrome trace, times in microseconds."""
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e.get("cat") in _WORK)
    if not spans:
        return {"busy_ms": 0.0, "idle_share": 1.0, "kernels": 0.0}
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    whole = reached - spans[0][0]
    return {
        "busy_ms": busy / steps / 1e3,
        "idle_share": 1 - busy / whole if whole else 0.0,
        "kernels": len(spans) / steps,
    }
