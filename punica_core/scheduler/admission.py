"""What one pass over the waiting sequences carries along, and who makes way for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from punica_core.protocol import AdapterRef
from punica_core.scheduler.plan import SkipReason
from punica_core.scheduler.sequence import Sequence
from punica_core.scheduler.step_builder import StepBuilder
from punica_core.scheduler.waiting import WaitingQueue


@dataclass(slots=True)
class AdmissionPass:
    """State of one pass.

    refused: adapters that were asked for in this pass in vain, never None. room_kept_for: once set, no other adapter
    is pinned in the rest of the pass. num_without_blocks: sequences that others may overtake meanwhile.
    """

    step: StepBuilder
    now: float
    refused: dict[AdapterRef | None, SkipReason] = field(default_factory=dict)
    room_kept_for: AdapterRef | None = None
    num_without_blocks: int = 0


def waiting_by_reason(waiting: WaitingQueue, turn: AdmissionPass, stop: SkipReason | None) -> Counter[SkipReason]:
    """Why each sequence waits after a pass that `stop` ended. Sequences that were preempted during the pass made
    room for an adapter."""
    reasons: Counter[SkipReason] = Counter()
    num_explained = turn.num_without_blocks
    if turn.num_without_blocks:
        reasons[SkipReason.NO_BLOCKS] = turn.num_without_blocks
    if turn.refused:
        for adapter, queue in waiting.queues():
            if adapter in turn.refused:
                reasons[turn.refused[adapter]] += len(queue)
                num_explained += len(queue)
    if len(waiting) > num_explained:
        reasons[stop or SkipReason.ADAPTER_NO_ROOM] += len(waiting) - num_explained
    return reasons


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
