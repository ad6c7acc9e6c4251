"""Every submitted sequence ends once, whatever fails: a broken device ends the worker, an adapter does not."""

from __future__ import annotations

import weakref

import pytest
import torch

from punica_core.engine.engine import MAX_FAILED_STEPS, Engine
from punica_core.errors import InternalError
from punica_core.lora.cache import AdapterCache
from punica_core.protocol import FinishReason, SequenceOutput
from punica_core.scheduler.plan import CompletedStep, StepPlan
from tests.support.scheduling import Rig, expected_tokens, make_rig, new_sequence

RAISING, OVERFLOWING = 900, 901
"""request_id of a row that raises; request_id from which on rows have numbers that are not finite."""


class FaultyRunner:
    """The fake model, with rows that fail. plan_sizes: rows of each plan executed."""

    runs_ahead = False

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.plan_sizes: list[int] = []
        self.is_broken = False

    def launch(self, plan: StepPlan) -> CompletedStep:
        self.plan_sizes.append(len(plan.rows))
        ids = {row.sequence.request_id for row in plan.rows}
        if self.is_broken or RAISING in ids:
            raise RuntimeError("device error")
        result = self._rig.model.execute(StepPlan(tuple(r for r in plan.rows if r.sequence.request_id < OVERFLOWING)))
        result.failed.update({request_id: "not finite" for request_id in ids if request_id >= OVERFLOWING})
        return CompletedStep(result)


@pytest.fixture
def rig() -> Rig:
    return make_rig(max_num_batched_tokens=64)


@pytest.fixture
def runner(rig: Rig) -> FaultyRunner:
    return FaultyRunner(rig)


@pytest.fixture
def engine(rig: Rig, runner: FaultyRunner) -> Engine:
    return Engine(rig.scheduler, AdapterCache({}, torch.float32, 1), runner)


def run(engine: Engine) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while engine.has_unfinished():
        outputs += engine.step(0.0)[0]
    return outputs


def ends(outputs: list[SequenceOutput]) -> dict[int, FinishReason | None]:
    terminal = [output for output in outputs if output.finish_reason is not None]
    assert len({output.request_id for output in terminal}) == len(terminal), "a sequence ended twice"
    return {output.request_id: output.finish_reason for output in terminal}


def test_a_row_that_raises_ends_alone_and_the_others_go_on(engine: Engine, runner: FaultyRunner, rig: Rig) -> None:
    healthy = [new_sequence(request_id) for request_id in (1, 2)]
    engine.submit([healthy[0], new_sequence(RAISING), healthy[1]], 0.0)
    outputs = run(engine)
    assert ends(outputs) == {RAISING: FinishReason.ERROR, 1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
    for request in healthy:
        tokens = [token for o in outputs if o.request_id == request.request_id for token in o.token_ids]
        assert tokens == expected_tokens(request)
    assert runner.plan_sizes[:4] == [3, 1, 1, 1]
    rig.assert_idle()


class Activations:
    """What a step has in memory."""


def test_the_scheduler_learns_what_steps_take_but_not_from_those_that_failed(
    engine: Engine, runner: FaultyRunner, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[int, float]] = []
    monkeypatch.setattr(rig.scheduler, "measured", lambda plan, seconds: measured.append((len(plan.rows), seconds)))
    engine.submit([new_sequence(1), new_sequence(RAISING)], 0.0)
    run(engine)
    assert [rows for rows, _seconds in measured] == [1, 1, 1], "the first of four steps had the row that raises"
    assert runner.plan_sizes[0] == 2
    assert all(0 < seconds < 10 for _rows, seconds in measured)


class CrowdedRunner(FaultyRunner):
    """Runs out of memory in steps of several rows. leftovers: steps whose memory was still taken at a later launch."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.leftovers = 0
        self._steps: list[weakref.ref[Activations]] = []

    def launch(self, plan: StepPlan) -> CompletedStep:
        self.leftovers += sum(step() is not None for step in self._steps)
        try:
            self._compute(plan)
        except MemoryError as error:
            raise RuntimeError("out of memory") from error
        return super().launch(plan)

    def _compute(self, plan: StepPlan) -> None:
        held = Activations()
        self._steps.append(weakref.ref(held))
        if len(plan.rows) > 1:
            raise MemoryError


def test_rows_are_executed_alone_without_what_the_failed_step_held(rig: Rig) -> None:
    runner = CrowdedRunner(rig)
    engine = Engine(rig.scheduler, AdapterCache({}, torch.float32, 1), runner)
    engine.submit([new_sequence(request_id) for request_id in range(3)], 0.0)
    assert set(ends(run(engine)).values()) == {FinishReason.LENGTH}
    assert len(runner.plan_sizes) > 3
    assert runner.leftovers == 0


def test_a_device_that_fails_everything_ends_the_worker(engine: Engine, runner: FaultyRunner) -> None:
    runner.is_broken = True
    for request_id in range(MAX_FAILED_STEPS - 1):
        engine.submit([new_sequence(request_id)], 0.0)
        assert ends(run(engine)) == {request_id: FinishReason.ERROR}
    engine.submit([new_sequence(MAX_FAILED_STEPS)], 0.0)
    with pytest.raises(InternalError, match=r"5 steps in a row.*device error"):
        run(engine)


def test_an_adapter_that_overflows_never_ends_the_worker(engine: Engine, rig: Rig) -> None:
    for request_id in range(OVERFLOWING, OVERFLOWING + 3 * MAX_FAILED_STEPS):
        engine.submit([new_sequence(request_id)], 0.0)
        assert ends(run(engine)) == {request_id: FinishReason.ERROR}
    rig.assert_idle()


def test_a_sequence_that_can_never_run_ends_at_once(engine: Engine, rig: Rig) -> None:
    (output,) = engine.submit([new_sequence(1, 1000)], 0.0)
    assert (output.finish_reason, output.error_code) == (FinishReason.ERROR, "context_length_exceeded")
    rig.assert_idle()


def test_cancelling_answers_for_live_sequences_only(engine: Engine, rig: Rig) -> None:
    engine.submit([new_sequence(1)], 0.0)
    assert ends(engine.cancel([1, 1, 2], 0.0)) == {1: FinishReason.CANCELLED}
    rig.assert_idle()
