"""What one pass over the waiting sequences carries along."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from punica_core.protocol import AdapterRef
from punica_core.scheduler.plan import Residency, SkipReason
from punica_core.scheduler.sequence import Sequence
from punica_core.scheduler.step_builder import StepBuilder
from punica_core.scheduler.waiting import WaitingQueue

OVERTAKEN = frozenset({SkipReason.NO_BLOCKS, SkipReason.NO_TOKENS, SkipReason.PREFIX_COMPUTING})
"""Why a sequence may be passed by those behind it (`AdmissionPass.may_be_overtaken`). One that needs an adapter always
may."""


MAX_EARLY = 8
"""Sequences of a pass whose adapters are asked for although there are no blocks for them yet."""


@dataclass(slots=True)
class AdmissionPass:
    """State of one pass.

    overdue_since: who arrived then or earlier is not overtaken any more. refused: adapters that were asked for in this
    pass in vain, never None. room_kept_for: once set, no other adapter is pinned in the rest of the pass. passed:
    adapter and reason of each sequence that others may overtake meanwhile. num_early: see `is_too_early`.
    """

    step: StepBuilder
    now: float
    overdue_since: float
    refused: dict[AdapterRef | None, SkipReason] = field(default_factory=dict)
    room_kept_for: AdapterRef | None = None
    passed: list[tuple[AdapterRef | None, SkipReason]] = field(default_factory=list)
    num_early: int = 0

    def is_overdue(self, sequence: Sequence) -> bool:
        """Whether nothing overtakes it, but while it waits for its adapter or for an older long prompt's tokens."""
        return sequence.is_overdue(self.overdue_since)

    def may_be_overtaken(self, sequence: Sequence, reason: SkipReason) -> bool:
        """Whether those behind a sequence that does not start, for a reason of `OVERTAKEN`, have their turns."""
        return reason is SkipReason.PREFIX_COMPUTING or not self.is_overdue(sequence)

    def may_wait_for_tokens(self, sequence: Sequence) -> bool:
        """Whether it rather waits for tokens that another one computes: when it is overdue only beside long prompts and
        for an older one, and not if others made way for it."""
        return not self.is_overdue(sequence) or (not sequence.goes_first and self.step.is_beside_long_ones(sequence))

    def is_too_early(self, sequence: Sequence, num_blocks: int, num_spare: int, residency: Residency) -> bool:
        """Whether a sequence is passed without asking for its adapter, which is not there, for it could not start if it
        were: it needs `num_blocks` of `num_spare`. The first few are asked for all the same. A line of hundreds of cold
        adapters would else take the place of all others before anybody can use them."""
        if sequence.adapter is None or num_blocks <= num_spare or sequence.no_room_since is not None:
            return False
        self.num_early += 1
        if self.num_early <= MAX_EARLY or residency.has(sequence.adapter):
            return False
        self.passed.append((sequence.adapter, SkipReason.ADAPTER_LOADING))
        return True


def waiting_by_reason(waiting: WaitingQueue, turn: AdmissionPass, stop: SkipReason | None) -> Counter[SkipReason]:
    """Why each sequence waits after a pass that `stop` ended. Sequences that were preempted during the pass made
    room for an adapter. One that was passed before its adapter was refused waits for that, as all of its queue do."""
    reasons = Counter(reason for adapter, reason in turn.passed if adapter not in turn.refused)
    if turn.refused:
        for adapter, queue in waiting.queues():
            if adapter in turn.refused:
                reasons[turn.refused[adapter]] += len(queue)
    num_explained = reasons.total()
    if len(waiting) > num_explained:
        reasons[stop or SkipReason.ADAPTER_NO_ROOM] += len(waiting) - num_explained
    return reasons
