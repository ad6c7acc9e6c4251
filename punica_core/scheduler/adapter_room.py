"""Who gets the room for adapters, and who makes way for whom."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from punica_core.protocol import AdapterRef
from punica_core.scheduler.admission import AdmissionPass
from punica_core.scheduler.limits import SchedulerLimits
from punica_core.scheduler.plan import AdapterGrant, Residency, SkipReason
from punica_core.scheduler.running import RunningSequences
from punica_core.scheduler.sequence import Sequence
from punica_core.scheduler.step_builder import StepBuilder
from punica_core.scheduler.waiting import WaitingQueue


class AdapterRoom:
    """Asks the residency for the adapters of those whose turn it is.

    A sequence for which others made way goes first until it starts. The room would else be theirs again whenever their
    turn comes before its adapter does.

    preempt: sends a running sequence back to wait and releases its adapter.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        residency: Residency,
        running: RunningSequences,
        waiting: WaitingQueue,
        preempt: Callable[[Sequence, StepBuilder], None],
    ) -> None:
        self._limits = limits
        self._residency = residency
        self._running = running
        self._waiting = waiting
        self._preempt = preempt

    def acquire(self, sequence: Sequence, ref: AdapterRef, turn: AdmissionPass) -> AdapterGrant | SkipReason:
        """Pin the sequence's adapter, making way for it when it has waited long enough for room."""
        if turn.room_kept_for is not None and ref != turn.room_kept_for:
            verdict: AdapterGrant | SkipReason = SkipReason.ADAPTER_NO_ROOM
        else:
            verdict = turn.refused.get(ref) or self._residency.acquire(ref)
        if verdict is not SkipReason.ADAPTER_NO_ROOM:
            if not sequence.goes_first:
                sequence.no_room_since = None
        elif sequence.no_room_since is None:
            sequence.no_room_since = turn.now
        elif turn.room_kept_for is None:
            verdict = self._insist(sequence, ref, turn.now - sequence.no_room_since, turn)
        if isinstance(verdict, SkipReason):
            turn.refused[ref] = verdict
        return verdict

    def _insist(
        self, sequence: Sequence, ref: AdapterRef, waited: float, turn: AdmissionPass
    ) -> AdapterGrant | SkipReason:
        """No room: after one limit nobody later in turn pins another adapter, after two newer sequences yield."""
        if waited < self._limits.adapter_wait_limit:
            return SkipReason.ADAPTER_NO_ROOM
        turn.room_kept_for = ref
        yielding = self._who_yields(sequence, ref) if waited >= 2 * self._limits.adapter_wait_limit else []
        if not yielding:
            return SkipReason.ADAPTER_NO_ROOM
        for newer in yielding:
            self._preempt(newer, turn.step)
        verdict = self._residency.acquire(ref)
        if verdict is not SkipReason.ADAPTER_NO_ROOM:
            self._waiting.put_first(sequence)
            turn.room_kept_for = None
        return verdict

    def _who_yields(self, sequence: Sequence, ref: AdapterRef) -> list[Sequence]:
        """As many of those who yield to this one as it takes; nobody if all are not enough."""
        groups = self._yielding_groups(sequence)
        if not self._residency.fits_without(ref, _adapters(itertools.chain(*groups))):
            return []
        yielding: list[Sequence] = []
        for group in groups:
            yielding += group
            if self._residency.fits_without(ref, _adapters(yielding)):
                break
        return yielding

    def _yielding_groups(self, sequence: Sequence) -> list[list[Sequence]]:
        """Running sequences by adapter slot, for the slots that only such sequences use that yield to this one: newer
        ones, of its own tenant or one that had no less than that.

        Ending a whole group unpins its adapter. The group that loses least computed work comes first.
        """
        users: dict[int, list[Sequence]] = {}
        for other in self._running:
            if other.grant is not None:
                users.setdefault(other.grant.slot, []).append(other)
        had_less, tenant = self._waiting.had_less, sequence.tenant
        yielding = [
            group
            for group in users.values()
            if all(other.serial > sequence.serial and not had_less(other.tenant, tenant) for other in group)
        ]
        return sorted(yielding, key=lambda group: sum(other.num_computed for other in group))


def _adapters(sequences: Iterable[Sequence]) -> set[AdapterRef]:
    return {sequence.adapter for sequence in sequences if sequence.adapter is not None}
