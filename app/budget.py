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
    """What one request holds of a budget, until `end`."""

    __slots__ = ("_amount", "_budget")

    def __init__(self, budget: Budget, amount: int) -> None:
        self._budget = budget
        self._amount = amount
        budget.used += amount

    def end(self) -> None:
        """Give it back. Idempotent."""
        self._budget.used -= self._amount
        self._amount = 0
