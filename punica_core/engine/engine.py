"""The engine: one scheduler, one adapter cache, one runner, and the step that ties them together.

It does no I/O and owns no thread; the worker's loop calls it. Time is an argument.

With a runner that runs ahead, step n + 1 is planned and launched while n executes; then n's result is waited for and
its tokens are sent, so that the device always has the next step before it needs it.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from punica_core.errors import InternalError, PunicaError, RequestError
from punica_core.lora.cache import CacheStats
from punica_core.protocol import AdapterRef, NewSequence, SequenceOutput, StepStats
from punica_core.scheduler.outcome import error_output
from punica_core.scheduler.plan import PendingStep, RowPlan, StepPlan, StepResult
from punica_core.scheduler.scheduler import Scheduler
from punica_core.scheduler.sequence import Status

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 5
"""Steps in a row in which computing every row raised, after which the worker gives up."""


class Runner(Protocol):
    """Executes plans, in the order in which they are launched. Changes no policy state: rows may be computed again."""

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is computed, so that the next one can be launched behind it."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start computing the plan's rows. This and `PendingStep.result` raise only for faults that are not one
        row's own. A row that is in `StepResult.failed` has still left a token for a `pending` row behind it, any
        one of the vocabulary."""


class AdapterTier(Protocol):
    """The tier that grants adapters: an `AdapterCache` (host memory), or a `GpuAdapterTier` on top of one."""

    def poll(self, now: float) -> list[tuple[AdapterRef, PunicaError]]:
        """Versions whose load failed since the last poll."""

    def forget(self, path: str) -> None:
        """Nobody will ask for the adapter in this folder again."""

    def stats(self) -> CacheStats:
        """Gauges and counters; loads are told once."""


@dataclass(slots=True)
class _Launched:
    """A step in flight. step: the error if launching it raised. started: seconds of `time.perf_counter`."""

    plan: StepPlan
    step: PendingStep | Exception
    started: float

    def result(self) -> StepResult:
        if isinstance(self.step, Exception):
            raise self.step
        return self.step.result()


class Engine:
    """Every submitted sequence ends in exactly one terminal output, whatever fails on the way."""

    def __init__(self, scheduler: Scheduler, adapters: AdapterTier, runner: Runner) -> None:
        self._scheduler = scheduler
        self._adapters = adapters
        self._runner = runner
        self._in_flight: _Launched | None = None
        self._steps = 0
        self._failed_steps = 0
        self._last_end = 0.0
        self._last_step = 0.0
        self._slowest_step = 0.0

    def has_unfinished(self) -> bool:
        """Whether a sequence is waiting or running, or a step in flight has not been collected."""
        return self._scheduler.has_unfinished() or self._in_flight is not None

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

    def forget(self, paths: Iterable[str]) -> None:
        """Give back what is kept of the adapters in these folders, as soon as no sequence uses it."""
        for path in paths:
            self._adapters.forget(path)

    def poll(self, now: float) -> list[SequenceOutput]:
        """Give up loads that hang. Returns terminal outputs of sequences whose adapter could not be loaded."""
        failures = self._adapters.poll(now)
        return [output for ref, error in failures for output in self._scheduler.fail_adapter(ref, error)]

    def step(self, now: float) -> tuple[list[SequenceOutput], bool]:
        """One schedule–execute–update round; of a runner that runs ahead, the next step's start and this one's end.

        Returns the outputs and whether a step was launched or collected; if not, only an adapter load, a command or
        the passing of time can change that.
        """
        outputs = self.poll(now)
        plan = self._scheduler.schedule(now)
        before, self._in_flight = self._in_flight, self._launch(plan) if plan.rows else None
        if before is not None:
            outputs += self._collect(before, now)
        after = self._in_flight
        if after is not None and (isinstance(after.step, Exception) or not self._runner.runs_ahead):
            self._in_flight = None
            outputs += self._collect(after, now)
        return outputs, bool(plan.rows) or before is not None

    def _launch(self, plan: StepPlan) -> _Launched:
        started = time.perf_counter()
        try:
            step: PendingStep | Exception = self._runner.launch(plan)
        except Exception as error:
            step = error
        return _Launched(plan, step, started)

    def _collect(self, launched: _Launched, now: float) -> list[SequenceOutput]:
        """Wait for a step and apply its result; what was launched behind a step that raised is taken back."""
        plan = launched.plan
        try:
            result = launched.result()
        except Exception as error:
            self._discard_step_behind()
            result = self._one_by_one(plan, error)
            self._end_step(launched)
        else:
            self._failed_steps = 0
            self._scheduler.measured(plan, self._end_step(launched))
        return self._scheduler.update(plan, result, now)

    def _end_step(self, launched: _Launched) -> float:
        """Count a step that has ended; returns its seconds."""
        ended = time.perf_counter()
        self._last_step = ended - max(launched.started, self._last_end)  # a step begins when the one before has ended
        self._slowest_step = max(self._slowest_step, self._last_step)
        self._last_end = ended
        self._steps += 1
        return self._last_step

    def _discard_step_behind(self) -> None:
        """Let the step behind a failed one end, and plan its rows again: its inputs are not to be trusted."""
        behind, self._in_flight = self._in_flight, None
        if behind is None:
            return
        try:
            behind.result()
        except Exception as error:
            logger.warning("the step behind a failed one failed as well: %s", error)
        self._scheduler.abandon(behind.plan)

    def _one_by_one(self, plan: StepPlan, error: Exception) -> StepResult:
        """Find the rows at fault by executing each alone, so that the others go on.

        Computing a row twice is safe: its KV entries are written again with the same values. Raises `InternalError`
        when this has failed for every row of several steps in a row: that device will not recover, and a new worker
        must replace it. Rows without finite numbers do not count: those are an adapter's fault, and who owns it must
        not be able to end everybody's worker.
        """
        logger.error("step failed; requests %s", [row.sequence.request_id for row in plan.rows], exc_info=error)
        _forget_locals(error)
        rows = [row for row in plan.rows if row.sequence.status is not Status.FINISHED]
        merged, num_raised = StepResult(), 0
        for row in rows:
            fault = error if len(plan.rows) == 1 else self._compute_alone(row, merged)
            if fault is not None:
                merged.failed[row.sequence.request_id] = f"{type(fault).__name__}: {fault}"
                num_raised += 1
        self._failed_steps = self._failed_steps + 1 if num_raised == len(rows) else 0
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise InternalError(
                f"every request of {self._failed_steps} steps in a row failed: {type(error).__name__}: {error}"
            )
        return merged

    def _compute_alone(self, row: RowPlan, merged: StepResult) -> Exception | None:
        """Execute one row and add its result to `merged`; returns what that raised."""
        alone = msgspec.structs.replace(row, pending=False)  # the step before has ended, so its token is known
        try:
            part = self._runner.launch(StepPlan((alone,))).result()
        except Exception as fault:
            logger.exception("request %s failed alone", row.sequence.request_id)
            return fault
        merged.sampled.update(part.sampled)
        merged.prompt_logprobs.update(part.prompt_logprobs)
        merged.failed.update(part.failed)
        return None

    def stats(self) -> StepStats:
        """A snapshot of gauges and counters; adapter loads are reported once."""
        cache = self._adapters.stats()
        return msgspec.structs.replace(
            self._scheduler.stats(),
            steps=self._steps,
            last_step_seconds=self._last_step,
            slowest_step_seconds=self._slowest_step,
            adapters_host=cache.resident,
            adapters_gpu=cache.gpu_resident,
            adapter_host_bytes_used=cache.bytes_used,
            adapter_gpu_bytes_used=cache.gpu_bytes_used,
            adapter_evictions=cache.evictions,
            adapter_loads=cache.loads,
        )


def _forget_locals(error: BaseException) -> None:
    """Let go of what the functions held that an error went through: their tensors may be why memory ran out."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
