"""Runners of the fake model for the engine: at once or running ahead, with faults on demand."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from punica_core.scheduler.plan import CompletedStep, PendingStep, StepPlan, StepResult
from tests.support.scheduling import FakeModel, FakeStep


@dataclass(frozen=True)
class Faults:
    """When steps fail. launch, result: request_ids whose rows make that raise. overflow: request_ids whose numbers
    are not finite. flaky_launch, flaky_result: numbers of launches of several rows in which that raises, once (a row
    alone in its step counts as the one at fault)."""

    launch: Collection[int] = ()
    result: Collection[int] = ()
    overflow: Collection[int] = ()
    flaky_launch: Collection[int] = ()
    flaky_result: Collection[int] = ()


@dataclass
class AheadRunner:
    """A device with a queue: a step is executed when its result, or that of a later one, is asked for.

    plans: what was launched. num_ahead: launches while another step was in flight. in_flight: results not asked for.
    """

    model: FakeModel
    faults: Faults = Faults()
    runs_ahead: bool = True
    plans: list[StepPlan] = field(default_factory=list)
    num_ahead: int = 0
    in_flight: int = 0

    def launch(self, plan: StepPlan) -> PendingStep:
        number = len(self.plans)
        self.plans.append(plan)
        assert self.in_flight <= 1, "a third step was launched"
        ids = {row.sequence.request_id for row in plan.rows}
        is_flaky = len(plan.rows) > 1
        if (is_flaky and number in self.faults.flaky_launch) or not ids.isdisjoint(self.faults.launch):
            raise RuntimeError("launch failed")
        step = self.model.launch(plan)
        raises = (is_flaky and number in self.faults.flaky_result) or not ids.isdisjoint(self.faults.result)
        if not self.runs_ahead:
            return CompletedStep(self._result(step, raises))
        self.num_ahead += self.in_flight
        self.in_flight += 1
        return _QueuedStep(self, step, raises)

    def _result(self, step: FakeStep, raises: bool) -> StepResult:
        result = step.result()
        if raises:
            raise RuntimeError("device error")
        for request_id in {row.sequence.request_id for row in step.plan.rows}.intersection(self.faults.overflow):
            result.sampled.pop(request_id, None)
            result.failed[request_id] = "not finite"
        return result


@dataclass
class _QueuedStep:
    runner: AheadRunner
    step: FakeStep
    raises: bool

    def result(self) -> StepResult:
        self.runner.in_flight -= 1
        return self.runner._result(self.step, self.raises)
