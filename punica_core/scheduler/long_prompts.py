"""Steps of a CPU, where a long prompt must not hold up others: it is computed in pieces while somebody else waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from punica_core.config import EngineConfig
from punica_core.scheduler.limits import SchedulerLimits
from punica_core.scheduler.plan import StepPlan
from punica_core.scheduler.sequence import Sequence
from punica_core.scheduler.step_builder import StepBuilder

MAX_SERVED = 2
"""Long prompts that get a piece of one step: the oldest and the one with the fewest tokens left."""


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """Which prompts are cut in pieces, and how. All others join steps as if there were no such thing.

    min_tokens: a prompt with so many tokens to compute is long; those that were generated before a preemption count.
    piece: most tokens of it in a step that somebody else waits for. max_started: most long prompts that run before they
    are through, and no more than half of the seats are theirs: each holds its KV blocks.
    """

    min_tokens: int = 257
    piece: int = 128
    max_started: int = 4

    @classmethod
    def of(cls, config: EngineConfig, device: str) -> LongPrompts | None:
        """What a server does on a device of this type: on a GPU it is the `Pacer` that cuts prompts."""
        return cls() if device == "cpu" and config.target_step_ms > 0 else None

    def begin_step(self, limits: SchedulerLimits, running: Iterable[Sequence], now: float) -> StepBuilder:
        """An empty step. running: oldest first."""
        return _Step(self, limits, running, overdue_since=now - limits.overtake_limit)

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prompt with so many tokens to compute is cut."""
        return num_tokens >= self.min_tokens


class _Step(StepBuilder):
    """A step in which long prompts get pieces first, so that those behind them find room, and then what nobody wants.

    Only two get pieces: the oldest, so that none starves, and the one with the fewest tokens left, so that none waits
    for longer ones. Of prompts that start at one time the first is both, and they are computed one after the other. A
    sequence that waits starts if it has fewer tokens left than all of them. It starts, too, with no more than a block,
    when it is overdue: nobody may overtake it then, but those behind it that are short need not wait for its turn.
    """

    def __init__(
        self, policy: LongPrompts, limits: SchedulerLimits, running: Iterable[Sequence], overdue_since: float
    ) -> None:
        super().__init__(limits)
        self._policy = policy
        self._max_started = min(policy.max_started, (limits.max_num_seqs + 1) // 2)
        self._overdue_since = overdue_since
        self._somebody_waits = False
        self._long = [s for s in running if _num_left(s) > 1 and policy.is_long(s.num_tokens - s.num_found)]

    def is_beside_long_ones(self, sequence: Sequence) -> bool:
        return bool(self._long) and self._policy.is_long(sequence.num_tokens)

    def room_for(self, sequence: Sequence, start: int | None = None) -> int:
        """How many of the sequence's next tokens the step takes at its turn; a long prompt's may become more."""
        room = super().room_for(sequence, start)
        num_left = sequence.num_tokens - start if start is not None else _num_left(sequence)
        is_started = sequence in self._long
        if not is_started and not self._policy.is_long(num_left):
            return room
        piece = min(self._policy.piece, (room + 1) // 2)
        if is_started:
            is_served = sequence is self._long[0] or sequence is min(self._long, key=_num_left)
            return piece if is_served else 0
        if len(self._long) >= self._max_started:
            return 0
        if all(num_left < _num_left(other) for other in self._long):
            return piece
        return min(piece, self._block_size) if sequence.is_overdue(self._overdue_since) else 0

    def add(self, sequence: Sequence, count: int) -> None:
        super().add(sequence, count)
        num_left = _num_left(sequence)
        self._somebody_waits = self._somebody_waits or count >= num_left
        if sequence not in self._long and self._policy.is_long(num_left):
            self._long.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        super().drop(sequence)
        if sequence in self._long:
            self._long.remove(sequence)

    def build(self) -> StepPlan:
        if self._long:
            self._fill_up()
        return super().build()

    def _fill_up(self) -> None:
        """Give long prompts what room is left, those with the fewest tokens left first: all of it, or what is left of
        their pieces if somebody gets a token from this step."""
        more = self.num_tokens_left
        if self._somebody_waits:
            pieces = self._policy.piece * min(len(self._long), MAX_SERVED)
            more = pieces - sum(self._counts.get(sequence, 0) for sequence in self._long)
        for sequence in sorted(self._long, key=_num_left):
            before = self._counts.get(sequence, 0)
            super().drop(sequence)
            count = max(before, min(before + more, _num_left(sequence), super().room_for(sequence)))
            if count > 0:
                super().add(sequence, count)
                more -= count - before


def _num_left(sequence: Sequence) -> int:
    """Known tokens that no step computes yet."""
    return len(sequence.token_ids) - sequence.num_scheduled
