"""A step while it is being decided."""

from __future__ import annotations

from operator import attrgetter

from punica_core.scheduler.plan import RowPlan, StepPlan
from punica_core.scheduler.sequence import Sequence


class StepBuilder:
    """Collects rows within a token budget. A row can be taken out again until the step is built."""

    def __init__(self, max_num_tokens: int, block_size: int) -> None:
        self.num_tokens_left = max_num_tokens
        self._block_size = block_size
        self._counts: dict[Sequence, int] = {}

    def add(self, sequence: Sequence, count: int) -> None:
        """Compute the next `count` tokens of `sequence`; its block table must cover them when the step is built."""
        assert 0 < count <= self.num_tokens_left, f"{count} tokens do not fit {self.num_tokens_left}"
        self._counts[sequence] = count
        self.num_tokens_left -= count

    def drop(self, sequence: Sequence) -> None:
        """Take the sequence's row out, if it has one, and give its tokens back to the budget."""
        self.num_tokens_left += self._counts.pop(sequence, 0)

    def build(self) -> StepPlan:
        """The plan: rows by slot (the base model's first), in order of addition within a slot."""
        block_size = self._block_size
        rows = []
        for sequence, count in self._counts.items():
            start, num_known = sequence.num_scheduled, len(sequence.token_ids)
            end = start + count
            # Of a tuple, a slice with all its items is itself: most tables are not copied.
            table = sequence.block_table[: -(-end // block_size)]
            rows.append(RowPlan(sequence, start, count, table, sequence.slot, end >= num_known, start == num_known))
        rows.sort(key=attrgetter("slot"))
        return StepPlan(tuple(rows))
