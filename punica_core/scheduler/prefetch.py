"""Adapters of sequences that wait for something else are brought in meanwhile."""

from __future__ import annotations

from punica_core.scheduler.admission import AdmissionPass
from punica_core.scheduler.plan import Residency, SkipReason
from punica_core.scheduler.waiting import WaitingQueue

MAX_AHEAD = 16
"""Adapters that are looked at, of those that will be wanted next."""

INTERVAL_SECONDS = 0.02
"""Between two looks: the line is long and changes little from step to step."""


class Prefetcher:
    """Asks the residency for what will be wanted. How much of its memory that may take is the residency's matter."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._next_look = 0.0

    def look_ahead(self, waiting: WaitingQueue, turn: AdmissionPass) -> None:
        """After a pass that ended before everybody's turn. Room that somebody waits for is left alone."""
        if turn.now < self._next_look or SkipReason.ADAPTER_NO_ROOM in turn.refused.values():
            return
        self._next_look = turn.now + INTERVAL_SECONDS
        soonest = waiting.next_adapters(MAX_AHEAD)
        if soonest:
            wanted = frozenset(adapter for adapter, _queue in waiting.queues() if adapter is not None)
            self._residency.prefetch(soonest, wanted)
