"""The engine: one scheduler, one adapter cache, one runner, and the step that ties them together.

It does no I/O and owns no thread; the worker's loop calls it. Time is an argument.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Protocol

import msgspec

from punica_core.errors import InternalError, RequestError
from punica_core.lora.cache import AdapterCache
from punica_core.protocol import NewSequence, SequenceOutput, StepStats
from punica_core.scheduler.outcome import error_output
from punica_core.scheduler.plan import StepPlan, StepResult
from punica_core.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 5
"""Steps in a row in which computing every row raised, after which the worker gives up."""


class Runner(Protocol):
    """Executes plans. Changes no policy state: the same plan may be executed again."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows; raises only for faults that are not one row's own."""


class Engine:
    """Every submitted sequence ends in exactly one terminal output, whatever fails on the way."""

    def __init__(self, scheduler: Scheduler, adapters: AdapterCache, runner: Runner) -> None:
        self._scheduler = scheduler
        self._adapters = adapters
        self._runner = runner
        self._steps = 0
        self._failed_steps = 0
        self._last_step = 0.0
        self._slowest_step = 0.0

    def has_unfinished(self) -> bool:
        """Whether a sequence is waiting or running."""
        return self._scheduler.has_unfinished()

    def submit(self, sequences: Iterable[NewSequence], now: float) -> list[SequenceOutput]:
        """Queue sequences. Returns terminal outputs of those that can never run."""
        outputs: list[SequenceOutput] = []
        for sequence in sequences:
            try:
                self._scheduler.add(sequence, now)
            except RequestError as error:
                outputs.append(error_output(sequence.request_id, error))
        return outputs

    def cancel(self, request_ids: Iterable[int], now: float) -> list[SequenceOutput]:
        """End sequences; unknown ids are ignored. Returns their terminal outputs."""
        outputs = (self._scheduler.cancel(request_id, now) for request_id in request_ids)
        return [output for output in outputs if output is not None]

    def step(self, now: float) -> tuple[list[SequenceOutput], bool]:
        """One schedule–execute–update round.

        Returns the outputs and whether anything was executed; if not, only an adapter load, a command or the
        passing of time can change that.
        """
        outputs: list[SequenceOutput] = []
        for ref, error in self._adapters.poll(now):
            outputs += self._scheduler.fail_adapter(ref, error)
        plan = self._scheduler.schedule(now)
        if not plan.rows:
            return outputs, False
        started = time.perf_counter()
        result, num_raised = self._execute(plan)
        self._give_up_if_broken(plan, result, num_raised)
        self._last_step = time.perf_counter() - started
        self._slowest_step = max(self._slowest_step, self._last_step)
        self._steps += 1
        outputs += self._scheduler.update(plan, result, now)
        return outputs, True

    def _execute(self, plan: StepPlan) -> tuple[StepResult, int]:
        """Execute; if that raises, find the rows at fault by executing each alone, so that the others go on.

        Returns the result and the number of rows that raised also alone. Executing a row twice is safe: its KV entries
        are written again with the same values.
        """
        try:
            return self._runner.execute(plan), 0
        except Exception as error:
            ids = [row.sequence.request_id for row in plan.rows]
            logger.exception("step failed; requests %s", ids)
            if len(plan.rows) == 1:
                return StepResult(failed={ids[0]: f"{type(error).__name__}: {error}"}), 1
        merged, num_raised = StepResult(), 0
        for row in plan.rows:
            part, raised = self._execute(StepPlan((row,)))
            num_raised += raised
            merged.sampled.update(part.sampled)
            merged.prompt_logprobs.update(part.prompt_logprobs)
            merged.failed.update(part.failed)
        return merged, num_raised

    def _give_up_if_broken(self, plan: StepPlan, result: StepResult, num_raised: int) -> None:
        """A device that fails every row of several steps in a row will not recover: a new worker must replace it.

        Rows without finite numbers do not count: those are an adapter's fault, and who owns it must not be able to
        end everybody's worker.
        """
        self._failed_steps = self._failed_steps + 1 if num_raised == len(plan.rows) else 0
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise InternalError(
                f"every request of {self._failed_steps} steps in a row failed: {next(iter(result.failed.values()))}"
            )

    def stats(self) -> StepStats:
        """A snapshot of gauges and counters; adapter loads are reported once."""
        cache = self._adapters.stats()
        return msgspec.structs.replace(
            self._scheduler.stats(),
            steps=self._steps,
            last_step_seconds=self._last_step,
            slowest_step_seconds=self._slowest_step,
            adapters_host=cache.resident,
            adapter_host_bytes_used=cache.bytes_used,
            adapter_evictions=cache.evictions,
            adapter_loads=cache.loads,
        )
