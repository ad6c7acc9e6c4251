"""Steps that were planned and whose results are still to come, and what may be planned while they run."""

from __future__ import annotations

from collections import deque

from punica_core.scheduler.plan import StepPlan
from punica_core.scheduler.sequence import Sequence, Status

MAX_STEPS_IN_FLIGHT = 2
"""The step that executes and the one launched behind it."""


class StepInFlight(Exception):
    """What was about to be decided must wait for the step in flight."""


class InFlight:
    """Owner of the plans that were made and not updated yet, oldest first, and of what must be held for them.

    A sequence that ends while a plan has a row of it keeps its blocks and its adapter until that plan is over: the
    device may be reading and writing them.
    """

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()
        self._ended: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def ended(self) -> tuple[Sequence, ...]:
        """Finished sequences that a plan in flight still uses, in the order in which they ended."""
        return tuple(self._ended)

    def require_none(self) -> None:
        """Raise `StepInFlight` unless every plan was updated: what a step uses cannot be given to others, and the
        tokens that it samples are still to come."""
        if self._plans:
            raise StepInFlight

    def begin(self, plan: StepPlan) -> None:
        """The plan is made; its step is launched behind the others."""
        self._plans.append(plan)
        for row in plan.rows:
            sequence = row.sequence
            sequence.in_flight += 1
            sequence.num_scheduled = row.start + row.count

    def end(self, plan: StepPlan) -> None:
        """The oldest plan was executed."""
        assert self._plans, "no plan is in flight"
        assert plan is self._plans[0], "an older plan is in flight"
        self._plans.popleft()
        for row in plan.rows:
            row.sequence.in_flight -= 1

    def undo(self, plan: StepPlan) -> None:
        """The newest plan is as if it had never been made."""
        assert self._plans, "no plan is in flight"
        assert plan is self._plans[-1], "a newer plan is in flight"
        self._plans.pop()
        for row in plan.rows:
            row.sequence.in_flight -= 1
            row.sequence.num_scheduled = row.start

    def hold(self, sequence: Sequence) -> None:
        """The sequence ended, but what it has is in use."""
        assert sequence.in_flight, f"sequence {sequence.request_id} is in no plan"
        self._ended.append(sequence)

    def take_unused(self) -> list[Sequence]:
        """The sequences held that no plan uses any more."""
        if not self._ended:
            return []
        unused = [sequence for sequence in self._ended if not sequence.in_flight]
        self._ended = [sequence for sequence in self._ended if sequence.in_flight]
        return unused

    def check(self) -> None:
        """Assert the invariants: every sequence knows how many plans use it, and only ended ones are held."""
        assert len(self._plans) <= MAX_STEPS_IN_FLIGHT
        sequences = {row.sequence for plan in self._plans for row in plan.rows}
        for sequence in sequences:
            uses = sum(row.sequence is sequence for plan in self._plans for row in plan.rows)
            assert sequence.in_flight == uses, f"{uses} plans use sequence {sequence.request_id}"
            assert sequence.status is Status.RUNNING or sequence in self._ended, "a sequence in flight was let go"
        assert all(s in sequences and s.status is Status.FINISHED for s in self._ended), "held for nothing"
