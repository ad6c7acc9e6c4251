"""A step while it is being decided."""

from __future__ import annotations

from operator import attrgetter

from punica_core.scheduler.limits import SchedulerLimits
from punica_core.scheduler.plan import RowPlan, StepPlan
from punica_core.scheduler.sequence import Sequence


class StepBuilder:
    """Collects rows within a token budget, and one for tokens that need logits each. A row can be taken out again until
    the step is built."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.num_tokens_left = limits.max_num_batched_tokens
        self._num_scored_left = limits.max_scored_tokens
        self._block_size = limits.block_size
        self._counts: dict[Sequence, int] = {}

    def room_for(self, sequence: Sequence) -> int:
        """How many of the sequence's next tokens the step can still take."""
        if sequence.scores_next:
            return min(self.num_tokens_left, self._num_scored_left)
        return self.num_tokens_left

    def add(self, sequence: Sequence, count: int) -> None:
        """Compute the next `count` tokens of `sequence`; its block table must cover them when the step is built."""
        assert 0 < count <= self.num_tokens_left, f"{count} tokens do not fit {self.num_tokens_left}"
        self._counts[sequence] = count
        self.num_tokens_left -= count
        if sequence.wants_prompt_logprobs and sequence.scores_next:
            self._num_scored_left -= count

    def drop(self, sequence: Sequence) -> None:
        """Take the sequence's row out, if it has one, and give its tokens back to the budget."""
        count = self._counts.pop(sequence, 0)
        self.num_tokens_left += count
        if sequence.scores_next:
            self._num_scored_left += count

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
