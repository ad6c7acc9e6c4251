"""How many prompt tokens may join a step for which streams wait."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from punica_core.config import EngineConfig
from punica_core.scheduler.plan import StepWork
from punica_core.scheduler.step_times import StepTimes

MIN_CHUNK = 64
"""Prompt tokens that a step may always take, and their granularity where the runner has no sizes of its own."""

STRETCH = 2.0
"""Where streams alone take long, prompts may stretch their step by this factor."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a runner pads steps to, all ascending. Without sizes a step costs what it is.

    decode: rows of steps without prompts. beside_prompts: decode rows of steps with prompts; prompt_rows: their prompt
    rows together; max_prompts: their prompts. A step of no such size is not padded, and may cost more.
    """

    decode: tuple[int, ...] = ()
    beside_prompts: tuple[int, ...] = ()
    prompt_rows: tuple[int, ...] = ()
    max_prompts: int | None = None

    def padded(self, work: StepWork) -> StepWork:
        """The work that the runner makes of this."""
        if work.prompts == 0:
            return StepWork(_at_least(self.decode, work.decode_rows))
        decode_rows = _at_least(self.beside_prompts, work.decode_rows)
        return StepWork(decode_rows, _at_least(self.prompt_rows, work.prompt_rows), work.prompts, work.attended)


class Pacer:
    """Learns what steps take and fits prompts to a bound. Equal calls give equal answers.

    target_seconds: what a step with streams should take at most. max_tokens: token budget of any step.
    """

    def __init__(self, target_seconds: float, max_tokens: int, sizes: StepSizes | None = None) -> None:
        self._target = target_seconds
        self._sizes = sizes or StepSizes()
        preferred = [rows for rows in self._sizes.prompt_rows if rows <= max_tokens]
        regular = [*range(MIN_CHUNK, max_tokens, MIN_CHUNK), max_tokens]
        self._chunks: Sequence[int] = preferred or regular
        self._times = StepTimes(self._chunks[-1])
        self._bounds: dict[int, float] = {}
        self._rooms: dict[tuple[StepWork, int], int] = {}

    @classmethod
    def of(cls, config: EngineConfig, sizes: StepSizes) -> Pacer | None:
        """The pacer that was asked for, if one was."""
        if config.target_step_ms == 0:
            return None
        return cls(config.target_step_ms / 1e3, config.max_num_batched_tokens, sizes)

    @property
    def min_chunk(self) -> int:
        """Prompt tokens that a step may take whatever that costs, so that no prompt waits for ever."""
        return self._chunks[0]

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step with this work took `seconds`."""
        if seconds > 0:
            self._times.observe(self._sizes.padded(work), seconds)
            self._bounds.clear()
            self._rooms.clear()

    def room(self, work: StepWork, start: int) -> int:
        """How many more prompt tokens may join a step with this work, all of one sequence and from `start` on.

        As many as fill the largest of the runner's sizes that fits the bound.
        """
        key = work, start
        found = self._rooms.get(key)
        if found is None:
            found = self._rooms[key] = self._find_room(work, start)
        return found

    def _find_room(self, work: StepWork, start: int) -> int:
        if self._sizes.max_prompts is not None and work.prompts >= self._sizes.max_prompts:
            return 0
        first = bisect_right(self._chunks, work.prompt_rows)
        bound = self._bound(work.decode_rows)
        num_fitting = bisect_left(
            range(first, len(self._chunks)), True, key=lambda at: self._at_most(work, start, self._chunks[at]) > bound
        )
        chunk = self._chunks[first + num_fitting - 1] if num_fitting else self.min_chunk
        return max(chunk - work.prompt_rows, 0)

    def _bound(self, decode_rows: int) -> float:
        """Seconds that a step with so many streams may take."""
        bound = self._bounds.get(decode_rows)
        if bound is None:
            streams = self._times.expected(self._sizes.padded(StepWork(decode_rows)))
            stretched = STRETCH * streams if math.isfinite(streams) else 0.0
            bound = self._bounds[decode_rows] = max(self._target, stretched)
        return bound

    def _at_most(self, work: StepWork, start: int, chunk: int) -> float:
        """Seconds of the step if this prompt fills it up to `chunk` rows of prompts."""
        return self._times.at_most(self._sizes.padded(work.with_prompt(start, chunk - work.prompt_rows)))


def _at_least(ascending: Sequence[int], value: int) -> int:
    """The smallest of the sizes that is no less than `value`, which stands if there is none."""
    at = bisect_left(ascending, value)
    return ascending[at] if at < len(ascending) else value
