"""The CPU's way to compute LoRA for a mixed batch: few large products instead of many small ones.

Stacked: the A matrices of all active adapters as one [ΣR, I], so v = x · A_allᵀ; entries of v that belong to
another row's adapter become 0; y += v · B_all. Three torch calls and one per further slice, whatever the number of
adapters, for some multiply-adds that are thrown away. Segmented: each segment by itself, nothing wasted, two calls
per segment and slice. `StackedLoRA.step` picks by their cost; a set of adapters that is seen for the first time is
computed by segments, since building its stack costs a copy of the adapters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from punica_core.lora.layers import LinearGroup, StepLoRA
from punica_core.lora.plan import Segment
from punica_core.lora.weights import AdapterWeights, ModuleWeights

CALL_COST = 150_000
"""Multiply-adds that cost as much as one more small torch call."""

SEEN_BEFORE_STACKING = 2
"""Steps in a row with the same adapters before their stack is built."""


@dataclass(frozen=True, slots=True)
class _SliceStack:
    """One slice's part of a group's stack. columns: its columns of v; outputs: of y; b: [R, O], contiguous."""

    columns: slice
    outputs: slice
    b: Tensor


@dataclass(frozen=True, slots=True)
class _GroupStack:
    """a: [ΣR, I], each adapter's scale multiplied in; owners: per column of v, which adapter of the set it is of."""

    a: Tensor
    slices: tuple[_SliceStack, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stack:
    """All groups of a set of adapters, by group index; None where no adapter of the set has the module."""

    groups: tuple[_GroupStack | None, ...]
    nbytes: int


class StackedLoRA:
    """Plans the LoRA of steps for one model; keeps the stacks of recently active sets of adapters.

    budget_bytes: bound on the stacks kept besides the one in use.
    """

    def __init__(self, groups: Sequence[LinearGroup], budget_bytes: int) -> None:
        self._groups = tuple(groups)
        self._budget_bytes = budget_bytes
        self._stacks: OrderedDict[tuple[str, ...], _Stack] = OrderedDict()
        self._last_keys: tuple[str, ...] = ()
        self._times_seen = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all stacks kept."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def step(self, segments: Sequence[Segment]) -> StepLoRA | None:
        """What `segments` add; None if there are none. Rows outside of all segments stay bitwise as they are."""
        if not segments:
            return None
        adapters = {segment.adapter.key: segment.adapter for segment in segments}
        keys = tuple(sorted(adapters))
        self._times_seen = self._times_seen + 1 if keys == self._last_keys else 1
        self._last_keys = keys
        if not _stacking_pays(segments, list(adapters.values())):
            return SegmentedStep(segments)
        stack = self._stack_of(keys, [adapters[key] for key in keys])
        return StackedStep(stack, keys, segments) if stack else SegmentedStep(segments)

    def _stack_of(self, keys: tuple[str, ...], adapters: Sequence[AdapterWeights]) -> _Stack | None:
        stack = self._stacks.get(keys)
        if stack is not None:
            self._stacks.move_to_end(keys)
            return stack
        if self._times_seen < SEEN_BEFORE_STACKING:
            return None
        stack = _build_stack(self._groups, adapters)
        self._stacks[keys] = stack
        while len(self._stacks) > 1 and self.nbytes > self._budget_bytes:
            self._stacks.popitem(last=False)
        return stack


class SegmentedStep:
    """Adds segment by segment, straight from the adapters' own matrices."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = tuple(segments)

    def add(self, group: LinearGroup, x: Tensor, y: Tensor) -> None:
        for segment in self._segments:
            offset = 0
            for path, width in zip(group.paths, group.out_features, strict=True):
                module = segment.adapter.modules.get(path)
                if module is not None:
                    v = functional.linear(x[segment.start : segment.end], module.a)
                    out = y[segment.start : segment.end, offset : offset + width]
                    out.addmm_(v, module.b.t(), alpha=module.scale)
                offset += width


class StackedStep:
    """Adds all adapters of a step at once. The rows from the first to the last segment take part."""

    def __init__(self, stack: _Stack, keys: tuple[str, ...], segments: Sequence[Segment]) -> None:
        self._stack = stack
        self._rows = slice(segments[0].start, segments[-1].end)
        row_owner = torch.full((self._rows.stop - self._rows.start,), -1)
        for segment in segments:
            row_owner[segment.start - self._rows.start : segment.end - self._rows.start] = keys.index(
                segment.adapter.key
            )
        self._row_owner = row_owner[:, None]
        # One adapter on all rows: nothing is foreign.
        self._masks: bool = len(keys) > 1 or bool((row_owner < 0).any())
        self._foreign: dict[tuple[int, ...], Tensor] = {}

    def add(self, group: LinearGroup, x: Tensor, y: Tensor) -> None:
        stacked = self._stack.groups[group.index]
        if stacked is None:
            return
        v = functional.linear(x[self._rows], stacked.a)
        if self._masks:
            # Filled, not multiplied: what overflows for one adapter must not become NaN in another's row.
            v.masked_fill_(self._foreign_of(stacked.owners), 0.0)
        rows = y[self._rows]
        for part in stacked.slices:
            rows[:, part.outputs].addmm_(v[:, part.columns], part.b)

    def _foreign_of(self, owners: tuple[int, ...]) -> Tensor:
        """[rows, ΣR]: True where a column is of another adapter than the row's. Most layers share one."""
        mask = self._foreign.get(owners)
        if mask is None:
            mask = self._row_owner != torch.tensor(owners)
            self._foreign[owners] = mask
        return mask


def _stacking_pays(segments: Sequence[Segment], adapters: Sequence[AdapterWeights]) -> bool:
    """Whether the multiply-adds that a stack wastes cost less than the calls it saves, over the whole model."""
    size = {adapter.key: sum(m.a.numel() + m.b.numel() for m in adapter.modules.values()) for adapter in adapters}
    used = sum(segment.num_rows * size[segment.adapter.key] for segment in segments)
    wasted = (segments[-1].end - segments[0].start) * sum(size.values()) - used
    modules = sum(len(segment.adapter.modules) for segment in segments)
    return bool(wasted <= 2 * modules * CALL_COST)


def _build_stack(groups: Sequence[LinearGroup], adapters: Sequence[AdapterWeights]) -> _Stack:
    built = tuple(_build_group(group, adapters) for group in groups)
    tensors = [tensor for group in built if group for tensor in (group.a, *(part.b for part in group.slices))]
    return _Stack(built, sum(tensor.nbytes for tensor in tensors))


def _build_group(group: LinearGroup, adapters: Sequence[AdapterWeights]) -> _GroupStack | None:
    parts: list[Tensor] = []
    slices: list[_SliceStack] = []
    owners: list[int] = []
    offset = 0
    for path, width in zip(group.paths, group.out_features, strict=True):
        found = [(i, module) for i, adapter in enumerate(adapters) if (module := adapter.modules.get(path))]
        if found:
            first = len(owners)
            parts += [module.a * module.scale for _, module in found]
            owners += [i for i, module in found for _ in range(_rank(module))]
            b = torch.cat([module.b.t() for _, module in found])
            slices.append(_SliceStack(slice(first, len(owners)), slice(offset, offset + width), b))
        offset += width
    return _GroupStack(torch.cat(parts), tuple(slices), tuple(owners)) if parts else None


def _rank(module: ModuleWeights) -> int:
    return int(module.a.size(0))
