"""Who gets the room for adapters, and who makes way for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from punica_core.protocol import AdapterRef
from punica_core.scheduler.admission import AdmissionPass
from punica_core.scheduler.limits import SchedulerLimits
from punica_core.scheduler.plan import AdapterGrant, Residency, SkipReason
from punica_core.scheduler.running import RunningSequences
from punica_core.scheduler.sequence import Sequence
from punica_core.scheduler.step_builder import StepBuilder


class AdapterRoom:
    """Asks the residency for the adapters of those whose turn it is.

    preempt: sends a running sequence back to wait and releases its adapter.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        residency: Residency,
        running: RunningSequences,
        preempt: Callable[[Sequence, StepBuilder], None],
    ) -> None:
        self._limits = limits
        self._residency = residency
        self._running = running
        self._preempt = preempt

    def acquire(self, sequence: Sequence, ref: AdapterRef, turn: AdmissionPass) -> AdapterGrant | SkipReason:
        """Pin the sequence's adapter, making way for it when it has waited long enough for room."""
        if turn.room_kept_for is not None and ref != turn.room_kept_for:
            verdict: AdapterGrant | SkipReason = SkipReason.ADAPTER_NO_ROOM
        else:
            verdict = turn.refused.get(ref) or self._residency.acquire(ref)
        if verdict is not SkipReason.ADAPTER_NO_ROOM:
            sequence.no_room_since = None
        elif sequence.no_room_since is None:
            sequence.no_room_since = turn.now
        elif turn.room_kept_for is None:
            verdict = self._insist(ref, sequence.serial, turn.now - sequence.no_room_since, turn)
        if isinstance(verdict, SkipReason):
            turn.refused[ref] = verdict
        return verdict

    def _insist(self, ref: AdapterRef, serial: int, waited: float, turn: AdmissionPass) -> AdapterGrant | SkipReason:
        """No room: after one limit nobody later in turn pins another adapter, after two newer sequences yield."""
        if waited < self._limits.adapter_wait_limit:
            return SkipReason.ADAPTER_NO_ROOM
        turn.room_kept_for = ref
        if waited >= 2 * self._limits.adapter_wait_limit:
            for group in yielding_groups(self._running, serial):
                for sequence in group:
                    self._preempt(sequence, turn.step)
                verdict = self._residency.acquire(ref)
                if verdict is not SkipReason.ADAPTER_NO_ROOM:
                    turn.room_kept_for = None
                    return verdict
        return SkipReason.ADAPTER_NO_ROOM


def yielding_groups(running: Iterable[Sequence], serial: int) -> list[list[Sequence]]:
    """Running sequences by adapter slot, for the slots that only sequences newer than `serial` use.

    Ending a whole group unpins its adapter. The group that loses least computed work comes first.
    """
    users: dict[int, list[Sequence]] = {}
    for sequence in running:
        if sequence.grant is not None:
            users.setdefault(sequence.grant.slot, []).append(sequence)
    newer = [group for group in users.values() if all(sequence.serial > serial for sequence in group)]
    return sorted(newer, key=lambda group: sum(sequence.num_computed for sequence in group))
