"""A fixed amount of something that all requests together may hold."""

from __future__ import annotations


class Budget:
    """Shares of `capacity`. used: what is taken now."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    def take(self, amount: int) -> Share | None:
        """A share, or None if that much is not there."""
        if self.used + amount > self.capacity:
            return None
        return Share(self, amount)


class Share:
    """What one request holds of a budget, until `end`. It grows with what is spent beyond it."""

    __slots__ = ("_amount", "_budget", "_has_ended", "_spent")

    def __init__(self, budget: Budget, amount: int) -> None:
        self._budget = budget
        self._amount = amount
        self._spent = 0
        self._has_ended = False
        budget.used += amount

    def spend(self, amount: int) -> bool:
        """Count something that is kept from now on. False if that takes more than there is, or the share has ended."""
        more = max(self._spent + amount - self._amount, 0)
        if self._has_ended or (more and self._budget.used + more > self._budget.capacity):
            return False
        self._spent += amount
        self._amount += more
        self._budget.used += more
        return True

    def end(self) -> None:
        """Give it back. Idempotent."""
        self._budget.used -= self._amount
        self._amount = 0
        self._has_ended = True
