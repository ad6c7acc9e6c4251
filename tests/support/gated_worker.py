"""`python -m tests.support.gated_worker GATES --fd N`: the real worker, which waits where a test wants to look at it.

A file GATES/NAME holds whoever reads the weights of adapter NAME; GATES/prefill holds steps that continue a prompt.
Who is held makes GATES/NAME.reached, and goes on when the gate's file is removed. While GATES/slow is there, every step
takes longer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from punica_core import worker
from punica_core.adapters.files import SourceFile

PREFILL = "prefill"
SLOW = "slow"
SLOWER = 0.02
"""Seconds."""


def wait_at(gate: Path) -> None:
    while gate.exists():
        gate.with_suffix(".reached").touch()
        time.sleep(0.005)


def hold_reads(gates: Path) -> None:
    init = SourceFile.__init__

    def held(file: SourceFile, path: str, *arguments: Any) -> None:
        if path.endswith(".safetensors"):
            wait_at(gates / Path(path).parent.name)
        init(file, path, *arguments)

    SourceFile.__init__ = held  # type: ignore[method-assign, assignment]


def hold_steps(gates: Path) -> None:
    from punica_core.engine.runner import ModelRunner
    from punica_core.scheduler.plan import StepPlan, StepResult

    execute = ModelRunner.execute

    def held(runner: ModelRunner, plan: StepPlan) -> StepResult:
        if any(0 < row.start < row.sequence.num_prompt for row in plan.rows):
            wait_at(gates / PREFILL)
        if (gates / SLOW).exists():
            time.sleep(SLOWER)
        return execute(runner, plan)

    ModelRunner.execute = held  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    hold_reads(folder)
    hold_steps(folder)
    raise SystemExit(worker.main(sys.argv[2:]))
