"""How many threads a product on the CPU is worth.

Waking a sleeping thread and waiting for it takes 50 to 200 µs, on a virtual machine more than on a real one, and as
long as another process has its core. Most products of a decode step of few rows take less than that on one thread;
others are well worth it. Which are depends on the machine and on what else it does: so it is measured while the
products are computed.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from punica_core.lora.linear import linear

TRIALS = 5
"""Products of a kind that are timed on one thread, and as many on all, before one of them is chosen."""

TRIED_AGAIN_AFTER = 10.0
"""Seconds after which they are timed again, since the machine may have become busy, or idle."""

WORTH_IT = 0.9
"""All threads are used if they take less than this share of the time that one takes."""

LARGE_WORK = 1 << 21
"""Multiply-adds of attention from which all threads are used: about half a millisecond on one."""


class Threads:
    """The threads of a process that has torch to itself. count: their number.

    While a step of few rows runs, torch is on one thread, and only what is worth it gets all.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._on_one = False
        self._kinds: dict[tuple[int, int, int], _Kind] = {}

    def use_one(self) -> None:
        self._on_one = self._count > 1
        torch.set_num_threads(1)

    def use_all(self) -> None:
        self._on_one = False
        torch.set_num_threads(self._count)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` of x [T, I]. If torch is on one thread it may use all, where that has been faster."""
        if not self._on_one:
            return linear(x, weight, bias)
        key = (weight.size(0), weight.size(1), x.size(0).bit_length())
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
        began = time.perf_counter()
        uses_all = kind.uses_all(began)
        if uses_all:
            self.use_all()
        y = linear(x, weight, bias)
        if kind.is_tried:
            kind.record(uses_all, began, time.perf_counter())
        if uses_all:
            self.use_one()
        return y


class _Kind:
    """Products of one shape of weight and about as many rows. Times are seconds of `time.perf_counter`."""

    __slots__ = ("_chosen", "_on_all", "_on_one", "_tried_at", "is_tried")

    def __init__(self) -> None:
        self.is_tried = True
        self._chosen = False
        self._on_one: list[float] = []
        self._on_all: list[float] = []
        self._tried_at = 0.0

    def uses_all(self, now: float) -> bool:
        """Whether the product that begins now is to run on all threads; in turns while they are tried."""
        if self.is_tried:
            return len(self._on_all) <= len(self._on_one)
        if now > self._tried_at + TRIED_AGAIN_AFTER:
            self.is_tried = True
        return self._chosen

    def record(self, on_all: bool, began: float, ended: float) -> None:
        """The time of a product while they are tried; the last one decides."""
        (self._on_all if on_all else self._on_one).append(ended - began)
        if len(self._on_one) < TRIALS:
            return
        self._chosen = statistics.median(self._on_all) < WORTH_IT * statistics.median(self._on_one)
        self._on_one, self._on_all = [], []
        self._tried_at, self.is_tried = ended, False
