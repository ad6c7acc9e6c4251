"""One module a task. Each offers the functions of `Task`: training examples, held-out examples, a judge of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Example:
    """One user message and the answer wanted; `facts` is what `Task.judge` needs to know besides."""

    prompt: str
    answer: str
    facts: str = ""


class Task(Protocol):
    """What a task's module offers."""

    METRICS: Mapping[str, str]
    """Name of each figure that `judge` returns -> what it means, for the card."""

    def training(self) -> list[Example]:
        """Examples to learn from; the same list at every call."""

    def held_out(self) -> list[Example]:
        """Examples to judge by; none of their prompts is in `training`."""

    def judge(self, example: Example, answer: str) -> dict[str, float]:
        """Figures between 0 and 1 for one answer, keyed as `METRICS`; averaged over `held_out`."""
