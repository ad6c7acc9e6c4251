"""The scheduler under random clients, and schedulers broken on purpose that must not survive them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from punica_core.kv.prefix_cache import PrefixCache, PrefixMatch
from punica_core.protocol import NewSequence, SequenceOutput
from punica_core.scheduler.admission import AdmissionPass
from punica_core.scheduler.outcome import token_output
from punica_core.scheduler.plan import RowPlan, SkipReason, StepPlan, StepResult
from punica_core.scheduler.scheduler import Scheduler
from punica_core.scheduler.sequence import Sequence
from punica_core.scheduler.step_builder import StepBuilder
from tests.scheduler.test_adapter_room import AnyoneMakesWayInVain
from tests.support.scheduler_machine import LONG_PROMPTS, AheadMachine, SchedulerMachine
from tests.support.scheduling import Rig, make_rig

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)

TestSchedulerAhead = AheadMachine.TestCase
TestSchedulerAhead.settings = TestScheduler.settings


class LeaksBlocks(Scheduler):
    def _release(self, sequence: Sequence) -> None:
        self._pool.retain(sequence.block_table[:1])
        super()._release(sequence)


class KeepsAdapterOfCancelled(Scheduler):
    def _end(self, sequence: Sequence) -> None:
        sequence.grant = None
        super()._end(sequence)


class ReleasesWhileExecuting(Scheduler):
    def _end(self, sequence: Sequence) -> None:
        sequence.in_flight = 0
        super()._end(sequence)


class ForgetsTokensOfPreempted(Scheduler):
    def _preempt(self, sequence: Sequence, step: StepBuilder) -> None:
        del sequence.token_ids[sequence.num_prompt :]
        super()._preempt(sequence, step)


class KeepsKvOfPreempted(Scheduler):
    """Believes that released blocks still hold what was computed."""

    def _preempt(self, sequence: Sequence, step: StepBuilder) -> None:
        num_computed = sequence.num_computed
        super()._preempt(sequence, step)
        sequence.num_computed = num_computed


class LetsStreamsWait(Scheduler):
    def _extend_running(self, step: StepBuilder) -> None:
        super()._extend_running(step)
        step._pacer = None


class AnswersCancelledAgain(Scheduler):
    def _update_row(self, row: RowPlan, result: StepResult) -> object:  # type: ignore[override]
        row.sequence.status = row.sequence.status.RUNNING
        return super()._update_row(row, result)


class IgnoresSeats(Scheduler):
    def _full(self, step: StepBuilder) -> None:  # type: ignore[override]
        return None


class LetsAnyonePass(Scheduler):
    def _admit(self, sequence: Sequence, turn: AdmissionPass) -> SkipReason | None:
        skip = super()._admit(sequence, turn)
        return None if skip is SkipReason.NO_BLOCKS else skip


class LetsShortOnesPass(Scheduler):
    """A long prompt may be overtaken for ever."""

    def _admit(self, sequence: Sequence, turn: AdmissionPass) -> SkipReason | None:
        skip = super()._admit(sequence, turn)
        return None if skip is SkipReason.NO_TOKENS else skip


class FillsStepsOfStreams(Scheduler):
    def _begin_step(self, now: float) -> StepBuilder:
        step = super()._begin_step(now)
        step.room_for = partial(StepBuilder.room_for, step)  # type: ignore[method-assign]
        return step


class KeepsPiecesOfPreempted(Scheduler):
    def _preempt(self, sequence: Sequence, step: StepBuilder) -> None:
        long_ones = list(step._long)  # type: ignore[attr-defined]
        super()._preempt(sequence, step)
        step._long = long_ones  # type: ignore[attr-defined]


class ForgetsTenants(Scheduler):
    def _match(self, sequence: Sequence) -> PrefixMatch:
        assert self._prefix_cache is not None
        matches = [self._prefix_cache.match(sequence.adapter_key, t, sequence.token_ids) for t in ("", "t")]
        return max(matches, key=lambda match: match.num_tokens)


class ReadsCacheForPromptLogprobs(Scheduler):
    def _match(self, sequence: Sequence) -> PrefixMatch:
        assert self._prefix_cache is not None
        return self._prefix_cache.match(sequence.adapter_key, sequence.request.tenant, sequence.token_ids)


class ForgetsWhatIsScored(Scheduler):
    def _extend(self, sequence: Sequence, count: int, step: StepBuilder) -> None:
        step._num_scored_left = step.num_tokens_left
        super()._extend(sequence, count, step)


class ForgetsWhoGoesFirst(Scheduler):
    """Those for whom others made way wait for their turn as everybody does."""

    def _admit_in_order(self, turn: AdmissionPass) -> SkipReason | None:
        for sequence in self._waiting._first:
            sequence.goes_first = False
        self._waiting._first.clear()
        return super()._admit_in_order(turn)


class WaitsForAnOldPrefix(Scheduler):
    """Goes on waiting for a prompt that is not computed any more."""

    def _admit(self, sequence: Sequence, turn: AdmissionPass) -> SkipReason | None:
        if sequence.follows is not None:
            return SkipReason.PREFIX_COMPUTING
        return super()._admit(sequence, turn)


class LeavesNothingToCompute(PrefixCache):
    def match(self, adapter_key, tenant, token_ids):  # type: ignore[no-untyped-def]
        return super().match(adapter_key, tenant, [*token_ids, 0])


class OneKeyForAllAdapters(PrefixCache):
    def match(self, adapter_key, tenant, token_ids):  # type: ignore[no-untyped-def]
        return super().match("", tenant, token_ids)

    def chain(self, adapter_key, tenant):  # type: ignore[no-untyped-def]
        return super().chain("", tenant)


class HoldsOnlyForTheOldestStep(Scheduler):
    def _end(self, sequence: Sequence) -> None:
        sequence.in_flight -= 1
        super()._end(sequence)


class NeverReleasesWhatWasHeld(Scheduler):
    def _release_unused(self) -> None:
        pass


class PreemptsInFlight(Scheduler):
    def _preempt(self, sequence: Sequence, step: StepBuilder) -> None:
        plans, self._in_flight._plans = self._in_flight._plans, type(self._in_flight._plans)()
        super()._preempt(sequence, step)
        self._in_flight._plans = plans


class PlansBehindTheEnd(Scheduler):
    def _extend_running(self, step: StepBuilder) -> None:
        super()._extend_running(step)
        for sequence in self._running:
            if sequence.num_scheduled == sequence.num_tokens and not sequence.may_run_ahead:
                self._extend(sequence, 1, step)


class PlansPenalisedAhead(Scheduler):
    def add(self, request: NewSequence, now: float) -> None:
        super().add(request, now)
        self._live[request.request_id].needs_known_tokens = False


class SkipsWhatWasTakenBack(Scheduler):
    def abandon(self, plan: StepPlan) -> None:
        super().abandon(plan)
        for row in plan.rows:
            row.sequence.num_scheduled = row.start + row.count


class SendsTokensOfEnded(Scheduler):
    def _update_row(self, row: RowPlan, result: StepResult) -> SequenceOutput | None:
        output = super()._update_row(row, result)
        sampled = result.sampled.get(row.sequence.request_id)
        return token_output(row.sequence, sampled, None) if output is None and row.samples and sampled else output


READ_THE_CACHE = (ForgetsTenants, ReadsCacheForPromptLogprobs, WaitsForAnOldPrefix)
CUT_LONG_PROMPTS = (LetsShortOnesPass, FillsStepsOfStreams, KeepsPiecesOfPreempted)


def rig_with(scheduler: type[Scheduler] = Scheduler, cache: type[PrefixCache] = PrefixCache) -> Callable[..., Rig]:
    def build(**options: object) -> Rig:
        if cache is not PrefixCache or scheduler in READ_THE_CACHE:
            options["prefix_cache"] = True
        if scheduler in CUT_LONG_PROMPTS:
            options |= {"long_prompts": LONG_PROMPTS, "pacer": None}
        return make_rig(**options, scheduler_type=scheduler, cache_type=cache)  # type: ignore[arg-type]

    return build


BROKEN: list[tuple[type, type[SchedulerMachine]]] = [
    *(
        (broken, SchedulerMachine)
        for broken in (
            LeaksBlocks,
            KeepsAdapterOfCancelled,
            ReleasesWhileExecuting,
            ForgetsTokensOfPreempted,
            KeepsKvOfPreempted,
            LetsStreamsWait,
            AnswersCancelledAgain,
            IgnoresSeats,
            LetsAnyonePass,
            LetsShortOnesPass,
            FillsStepsOfStreams,
            KeepsPiecesOfPreempted,
            ForgetsTenants,
            ReadsCacheForPromptLogprobs,
            ForgetsWhatIsScored,
            ForgetsWhoGoesFirst,
            AnyoneMakesWayInVain,
            WaitsForAnOldPrefix,
            LeavesNothingToCompute,
            OneKeyForAllAdapters,
        )
    ),
    *(
        (broken, AheadMachine)
        for broken in (
            ReleasesWhileExecuting,
            HoldsOnlyForTheOldestStep,
            NeverReleasesWhatWasHeld,
            PreemptsInFlight,
            PlansBehindTheEnd,
            PlansPenalisedAhead,
            SkipsWhatWasTakenBack,
            SendsTokensOfEnded,
        )
    ),
]


@pytest.mark.parametrize(("broken", "machine"), BROKEN)
def test_a_broken_scheduler_does_not_survive(broken: type, machine: type[SchedulerMachine]) -> None:
    parts = {"cache": broken} if issubclass(broken, PrefixCache) else {"scheduler": broken}

    class Machine(machine):  # type: ignore[misc, valid-type]
        rig_factory = staticmethod(rig_with(**parts))

    search = settings(
        max_examples=300,
        stateful_step_count=50,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(Machine, settings=search)
