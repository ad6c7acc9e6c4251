"""Who waits, and whose turn it is: fair between tenants, in order of arrival within one."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Container, Iterable, Iterator

from punica_core.protocol import AdapterRef
from punica_core.scheduler.sequence import Sequence

PROMPT_TOKEN_SERVICE = 1.0
GENERATED_TOKEN_SERVICE = 2.0
"""What a token costs its tenant: a generated one takes a row of its own step (weights of the VTC paper)."""

_Queue = list[Sequence]

_MAX_IDLE = 64
"""Idle tenants remembered before those without a debt are looked for."""


class WaitingQueue:
    """Waiting sequences of all tenants, in queues by tenant and adapter so that a pass costs the queues it meets.

    Between tenants: virtual token counters (Sheng et al., OSDI'24, arXiv 2401.00588). Each tenant has a counter of
    the service it got (`charge`), and the turn is always of the waiting tenant with the lowest one. A tenant that
    comes back from being idle starts at the lowest counter of the active ones, so that it cannot save up.
    """

    def __init__(self) -> None:
        self._queues: dict[str, dict[AdapterRef | None, _Queue]] = {}
        self._served: dict[str, float] = {}
        self._unfinished: dict[str, int] = {}
        self._first: _Queue = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for _adapter, queue in self.queues():
            yield from queue

    def queues(self) -> Iterator[tuple[AdapterRef | None, _Queue]]:
        """Every queue with its adapter, oldest sequence first; an adapter that several tenants use comes repeatedly."""
        for queues in self._queues.values():
            yield from queues.items()

    def next_adapters(self, count: int) -> list[AdapterRef]:
        """At most so many adapters of those that wait, about in the order in which they will be wanted: each tenant's
        first one, then each one's second; the tenant with the least service first, and a tenant's oldest sequence."""
        ranked = []
        for tenant, queues in self._queues.items():
            heads = sorted((queue for adapter, queue in queues.items() if adapter is not None), key=_head_serial)
            ranked += [(place, self._served[tenant], _head_serial(queue), queue) for place, queue in enumerate(heads)]
        ranked.sort(key=lambda entry: entry[:3])
        found = dict.fromkeys(queue[0].adapter for *_rank, queue in ranked)
        return [adapter for adapter in found if adapter is not None][:count]

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
        elif len(self._served) > 2 * len(self._unfinished) + _MAX_IDLE:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Drop idle tenants that owe nothing: the lowest active counter never falls, and they would start at it."""
        floor = min(self._served[tenant] for tenant in self._unfinished)
        for tenant in [t for t, served in self._served.items() if served <= floor and t not in self._unfinished]:
            del self._served[tenant]

    def charge(self, tenant: str, service: float) -> None:
        """The tenant got this much service."""
        self._served[tenant] += service

    def had_less(self, tenant: str, other: str) -> bool:
        """Whether an active tenant got less service than another one."""
        return self._served[tenant] < self._served[other]

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at the place its arrival gives it; also one that was preempted."""
        queues = self._queues.setdefault(sequence.tenant, {})
        insort(queues.setdefault(sequence.adapter, []), sequence, key=_serial)
        self._length += 1

    def put_first(self, sequence: Sequence) -> None:
        """Let a sequence that waits come before all others until it is removed; of several such the oldest first."""
        if not sequence.goes_first:
            sequence.goes_first = True
            insort(self._first, sequence, key=_serial)

    def remove(self, sequence: Sequence) -> None:
        if sequence.goes_first:
            sequence.goes_first = False
            self._first.remove(sequence)
        queues = self._queues[sequence.tenant]
        queue = queues[sequence.adapter]
        index = bisect_left(queue, sequence.serial, key=_serial)
        assert queue[index] is sequence, f"sequence {sequence.request_id} does not wait"
        del queue[index]
        if not queue:
            del queues[sequence.adapter]
        if not queues:
            del self._queues[sequence.tenant]
        self._length -= 1

    def order(
        self,
        arrived_until: float,
        in_use: Collection[AdapterRef | None],
        refused: Container[AdapterRef | None],
    ) -> Iterator[Sequence]:
        """The sequences that wait now, in the order in which they may start.

        Before all others those that were put first, whatever their tenants had. Within a tenant those that arrived at
        or before `arrived_until` come first, in order of arrival; then those whose adapter is `in_use`; then the rest.
        `charge` and `refused` take effect while iterating: the turn moves on, and the other sequences of a refused
        adapter are left out. The queue may change meanwhile; a sequence pushed meanwhile is not part of this order,
        unless it was one of the first who had it pushed.
        """
        for sequence in self._first.copy():
            if sequence.adapter not in refused:
                yield sequence
        turns: list[tuple[float, int, Sequence, Iterator[Sequence]]] = []
        for tenant, queues in self._queues.items():
            line = _line(list(queues.values()), arrived_until, in_use, refused)
            head = next(line, None)
            if head is not None:
                turns.append((self._served[tenant], head.serial, head, line))
        heapq.heapify(turns)
        while turns:
            _served_before, _head_serial, head, line = turns[0]
            yield head
            following = next(line, None)
            if following is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (self._served[head.tenant], following.serial, following, line))


def _line(
    queues: list[_Queue],
    arrived_until: float,
    in_use: Collection[AdapterRef | None],
    refused: Container[AdapterRef | None],
) -> Iterator[Sequence]:
    """One tenant's order: overdue, grouped with what runs, rest."""
    overdue: list[_Queue] = []
    grouped: list[_Queue] = []
    rest: list[_Queue] = []
    for queue in queues:
        num_overdue = bisect_right(queue, arrived_until, key=_arrival)
        overdue.append(queue[:num_overdue])
        (grouped if queue[0].adapter in in_use else rest).append(queue[num_overdue:])
    for part in (overdue, grouped, rest):
        yield from _merge(part, refused)


def _merge(queues: Iterable[_Queue], refused: Container[AdapterRef | None]) -> Iterator[Sequence]:
    """The queues' sequences, oldest first, without those that go before all, and without the rest of a queue once its
    adapter is refused."""
    heads = [(queue[0].serial, 0, queue) for queue in queues if queue]
    heapq.heapify(heads)
    while heads:
        _head_serial, index, queue = heads[0]
        if queue[index].adapter in refused:
            heapq.heappop(heads)
            continue
        if not queue[index].goes_first:
            yield queue[index]
        index += 1
        if index < len(queue):
            heapq.heapreplace(heads, (queue[index].serial, index, queue))
        else:
            heapq.heappop(heads)


def _head_serial(queue: _Queue) -> int:
    return queue[0].serial


def _serial(sequence: Sequence) -> int:
    return sequence.serial


def _arrival(sequence: Sequence) -> float:
    return sequence.arrival
