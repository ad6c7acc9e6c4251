"""Who waits, and whose turn it is: fair between tenants, in order of arrival within one."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator

from punica_core.scheduler.sequence import Sequence


class WaitingQueue:
    """Waiting sequences of all tenants.

    Between tenants: virtual token counters (Sheng et al., OSDI'24, arXiv 2401.00588). Each tenant has a counter of
    the service it got (`charge`), and the turn is always of the waiting tenant with the lowest one. A tenant that
    comes back from being idle starts at the lowest counter of the active ones, so that it cannot save up.
    """

    def __init__(self) -> None:
        self._queues: dict[str, list[Sequence]] = {}
        self._served: dict[str, float] = {}
        self._unfinished: dict[str, int] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def enter(self, tenant: str) -> None:
        """A sequence of this tenant came to the scheduler. Undone by `leave` when it ends."""
        if tenant not in self._unfinished:
            floor = min((self._served[other] for other in self._unfinished), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        self._unfinished[tenant] = self._unfinished.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A sequence of this tenant ended. When all tenants are idle, past service is forgotten."""
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]
        if not self._unfinished:
            self._served.clear()

    def charge(self, tenant: str, service: float) -> None:
        """The tenant got this much service."""
        self._served[tenant] += service

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at the place its arrival gives it; also one that was preempted."""
        insort(self._queues.setdefault(sequence.request.tenant, []), sequence, key=_serial)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        queue = self._queues[tenant]
        index = bisect_left(queue, sequence.serial, key=_serial)
        assert queue[index] is sequence, f"sequence {sequence.request_id} does not wait"
        del queue[index]
        if not queue:
            del self._queues[tenant]
        self._length -= 1

    def order(self, arrived_until: float, prefer: Callable[[Sequence], bool]) -> Iterator[Sequence]:
        """Every sequence that waits now, in the order in which they may start.

        The turn follows `charge` while iterating. Within a tenant those that arrived at or before `arrived_until`
        come first, in order of arrival; then the rest, preferred ones first. The queue may change meanwhile; a
        sequence pushed meanwhile is not part of this order.
        """
        turns: list[tuple[float, int, Sequence, Iterator[Sequence]]] = []
        for tenant, queue in self._queues.items():
            line = _line(queue.copy(), arrived_until, prefer)
            head = next(line)
            turns.append((self._served[tenant], head.serial, head, line))
        heapq.heapify(turns)
        while turns:
            _served, _head_serial, head, line = turns[0]
            yield head
            following = next(line, None)
            if following is None:
                heapq.heappop(turns)
            else:
                served = self._served[head.request.tenant]
                heapq.heapreplace(turns, (served, following.serial, following, line))


def _line(queue: list[Sequence], arrived_until: float, prefer: Callable[[Sequence], bool]) -> Iterator[Sequence]:
    num_overdue = bisect_right(queue, arrived_until, key=_arrival)
    yield from queue[:num_overdue]
    fresh = queue[num_overdue:]
    if fresh:
        preferred = {sequence for sequence in fresh if prefer(sequence)}
        yield from (sequence for sequence in fresh if sequence in preferred)
        yield from (sequence for sequence in fresh if sequence not in preferred)


def _serial(sequence: Sequence) -> int:
    return sequence.serial


def _arrival(sequence: Sequence) -> float:
    return sequence.arrival
