"""Who may come in: places for sequences and for the prompt tokens of those that wait, in all and by tenant.

Where there are several tenants, one may hold at most SHARE times what is free of either, whatever it has asked for
before: alone four fifths, of two greedy ones four ninths each. So there is always room for one that has nothing yet,
however fast another asks for more (dynamic thresholds, Choudhury and Hahne 1998).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from punica_core.errors import InvalidRequest, QueueFull

SHARE = 4


class Seats:
    """num_seats: of sequences. max_queue_tokens: prompt tokens of sequences without an output; a single longer prompt
    is admitted when no other is queued. has_tenants: whether there are several tenants now.

    queued_tokens: how many such tokens there are.
    """

    def __init__(self, num_seats: int, max_queue_tokens: int, has_tenants: Callable[[], bool]) -> None:
        self._num_seats = num_seats
        self._max_queue_tokens = max_queue_tokens
        self._has_tenants = has_tenants
        self._taken = 0
        self._taken_by: Counter[str] = Counter()
        self._queued_by: Counter[str] = Counter()
        self.queued_tokens = 0

    def check(self, tenant: str, count: int, tokens: int) -> None:
        """Raise QueueFull unless so many sequences, with so many prompt tokens together, may come in now;
        InvalidRequest if they never could."""
        shares = bool(tenant) and self._has_tenants()
        most = self._num_seats
        if shares:
            most = max(1, SHARE * self._num_seats // (SHARE + 1))
        if count > most:
            raise InvalidRequest(
                f"The request asks for {count} sequences (prompts x n); at most {most} fit. Split the request."
            )
        if tokens > self._max_queue_tokens and count > 1:
            raise InvalidRequest(
                f"The request has {tokens} prompt tokens (prompts x n); at most {self._max_queue_tokens} may wait. "
                "Split the request."
            )
        if self._taken + count > self._num_seats:
            raise QueueFull(
                f"{self._taken} sequences are running or waiting and {count} more would exceed the limit of "
                f"{self._num_seats}. Try again later."
            )
        if self.queued_tokens and self.queued_tokens + tokens > self._max_queue_tokens:
            raise QueueFull(
                f"{self.queued_tokens} prompt tokens are waiting and {tokens} more would exceed the limit of "
                f"{self._max_queue_tokens}. Try again later."
            )
        if shares:
            self._check_share(tenant, count, tokens)

    def _check_share(self, tenant: str, count: int, tokens: int) -> None:
        held, free = self._taken_by[tenant], self._num_seats - self._taken
        if held + count > max(1, SHARE * (free - count)):
            raise QueueFull(
                f"This key has {held} sequences running or waiting and asks for {count} more; what is free of "
                f"{self._num_seats} places is kept for others. Try again later."
            )
        queued, room = self._queued_by[tenant], self._max_queue_tokens - self.queued_tokens
        if queued and queued + tokens > SHARE * (room - tokens):
            raise QueueFull(
                f"This key has {queued} prompt tokens waiting and asks for {tokens} more; what is free of "
                f"{self._max_queue_tokens} is kept for others. Try again later."
            )

    def take(self, tenant: str, tokens: int) -> None:
        """A sequence came in, and waits for its first output."""
        self._taken += 1
        self._taken_by[tenant] += 1
        self._queued_by[tenant] += tokens
        self.queued_tokens += tokens

    def leave_queue(self, tenant: str, tokens: int) -> None:
        """A sequence has its first output, or never will."""
        self.queued_tokens -= tokens
        _subtract(self._queued_by, tenant, tokens)

    def give_back(self, tenant: str) -> None:
        """A sequence that has left the queue has ended."""
        self._taken -= 1
        _subtract(self._taken_by, tenant, 1)


def _subtract(counter: Counter[str], name: str, amount: int) -> None:
    counter[name] -= amount
    if not counter[name]:
        del counter[name]
