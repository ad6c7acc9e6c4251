"""A step while it is being decided."""

from __future__ import annotations

from operator import attrgetter

from punica_core.scheduler.limits import SchedulerLimits
from punica_core.scheduler.pacing import Pacer
from punica_core.scheduler.plan import RowPlan, StepPlan, StepWork, attended_tokens
from punica_core.scheduler.sequence import Sequence


class StepBuilder:
    """Collects rows within a token budget, one for tokens that need logits each and, once `pace` was called, one for
    prompts. A row can be taken out again until the step is built."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.num_tokens_left = limits.max_num_batched_tokens
        self._num_scored_left = limits.max_scored_tokens
        self._block_size = limits.block_size
        self._counts: dict[Sequence, int] = {}
        self._pacer: Pacer | None = None
        self._prompt_rows = self._prompts = self._attended = 0

    @property
    def work(self) -> StepWork:
        """Of the rows so far."""
        return StepWork(len(self._counts) - self._prompts, self._prompt_rows, self._prompts, self._attended)

    @property
    def is_full(self) -> bool:
        """Whether no more prompt would find room."""
        return self.num_tokens_left == 0 or (self._pacer is not None and self._pacer.room(self.work, 0) == 0)

    def pace(self, pacer: Pacer) -> None:
        """Streams wait for this step: from now on prompts share the room that `pacer` gives them."""
        self._pacer = pacer

    def room_for(self, sequence: Sequence, start: int | None = None) -> int:
        """How many of the sequence's next tokens the step can still take. start: the first of them, if it is not the
        first that no step computes yet."""
        room = self.num_tokens_left
        if sequence.scores_next:
            room = min(room, self._num_scored_left + sequence.num_scored_next)
        if self._pacer is not None and room:
            room = min(room, self._pacer.room(self.work, sequence.num_scheduled if start is None else start))
        return room

    def is_beside_long_ones(self, sequence: Sequence) -> bool:
        """Whether this is a long prompt and others are being computed in pieces (`LongPrompts`), so that it is no later
        if it waits to find their tokens in the cache."""
        return False

    def add(self, sequence: Sequence, count: int) -> None:
        """Compute the next `count` tokens of `sequence`; its block table must cover them when the step is built."""
        assert 0 < count <= self.num_tokens_left, f"{count} tokens do not fit {self.num_tokens_left}"
        self._counts[sequence] = count
        self.num_tokens_left -= count
        if count > 1:
            self._count_prompt(sequence, count, 1)
        if sequence.wants_prompt_logprobs and sequence.scores_next:
            self._num_scored_left -= max(count - sequence.num_scored_next, 0)

    def drop(self, sequence: Sequence) -> None:
        """Take the sequence's row out, if it has one, and give its tokens back to the budget."""
        count = self._counts.pop(sequence, 0)
        self.num_tokens_left += count
        if count > 1:
            self._count_prompt(sequence, count, -1)
        if sequence.scores_next:
            self._num_scored_left += max(count - sequence.num_scored_next, 0)

    def _count_prompt(self, sequence: Sequence, count: int, sign: int) -> None:
        """Count a row of a prompt (sign 1), or no longer (-1)."""
        self._prompt_rows += sign * count
        self._prompts += sign
        self._attended += sign * attended_tokens(sequence.num_scheduled, count)

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
        return StepPlan(tuple(rows), self.work)
