"""Loads into the GPU tier: one that is under way, and those that found no room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from punica_core.adapters.residency import MAX_REMEMBERED
from punica_core.lora.arena_layout import Run
from punica_core.lora.weights import AdapterWeights
from punica_core.protocol import AdapterRef

RETRY_SECONDS = 0.25
"""An adapter that found no room tries again when something was released, and after so long: claims expire."""


@dataclass(slots=True, eq=False)
class GpuLoad:
    """One load. weights: pinned in the host tier by `ref` until the job has ended. runs: room for it that is taken and
    not its resident's yet. spared: who need not make room for it."""

    ref: AdapterRef
    weights: AdapterWeights
    started_at: float
    runs: tuple[Run, ...] | None = None
    spared: Collection[AdapterRef] = ()


@dataclass(frozen=True, slots=True)
class _Denial:
    """num_releases, retry_at: while there were no more releases, and until then, nothing has happened that could have
    made room."""

    part_sizes: Sequence[int]
    num_releases: int
    retry_at: float


class Denials:
    """Versions that found no room for parts of certain sizes; beyond `MAX_REMEMBERED` the oldest is forgotten."""

    def __init__(self) -> None:
        self._denials: OrderedDict[AdapterRef, _Denial] = OrderedDict()
        self._num_releases = 0

    def released(self) -> None:
        """Something was released: there may be room now."""
        self._num_releases += 1

    def part_sizes(self, ref: AdapterRef) -> Sequence[int] | None:
        """What the version found no room for, None if it did not ask or has found some since."""
        denial = self._denials.get(ref)
        return None if denial is None else denial.part_sizes

    def stands(self, ref: AdapterRef, now: float) -> bool:
        """Whether the version need not look again."""
        denial = self._denials.get(ref)
        return denial is not None and denial.num_releases == self._num_releases and now < denial.retry_at

    def remember(self, ref: AdapterRef, part_sizes: Sequence[int], now: float, *, final: bool = True) -> None:
        """There is no room. final: until something changes; else only for who asked with less right to it."""
        num_releases = self._num_releases if final else -1
        self._denials[ref] = _Denial(part_sizes, num_releases, now + RETRY_SECONDS)
        if len(self._denials) > MAX_REMEMBERED:
            self._denials.popitem(last=False)

    def forget(self, ref: AdapterRef) -> None:
        """The version gets room."""
        del self._denials[ref]
