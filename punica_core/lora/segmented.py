"""LoRA in plain torch: each segment with its own matrices, laid out so that it takes few calls.

A step costs the multiply-adds of the adapters' true ranks and, per segment and group, one call for all A matrices
(those of q, k and v as one) and one per slice for B. Stacking all adapters of a step into one product with a mask
was measured too: from four adapters on it costs more, since most of what it multiplies is thrown away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from punica_core.lora.layers import LinearGroup, StepLoRA
from punica_core.lora.plan import Segment
from punica_core.lora.weights import AdapterWeights


@dataclass(frozen=True, slots=True)
class _SliceExpand:
    """y[:, outputs] += scale · v[:, columns] · b. b: [R, O], contiguous."""

    columns: slice
    outputs: slice
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class _GroupWeights:
    """One adapter's part in a group. a_t: [I, ΣR], a transposed view; slices: those that the adapter changes."""

    a_t: Tensor
    slices: tuple[_SliceExpand, ...]


@dataclass(frozen=True, slots=True)
class _FusedAdapter:
    """An adapter laid out for a model's groups: by group index, None where the adapter has nothing."""

    groups: tuple[_GroupWeights | None, ...]
    nbytes: int


class SegmentedLoRA:
    """Plans the LoRA of steps for one model; keeps recently used adapters in the layout that it computes with.

    budget_bytes: bound on those kept besides the adapters of the running step.
    """

    def __init__(self, groups: Sequence[LinearGroup], budget_bytes: int, device: torch.device) -> None:
        self._groups = tuple(groups)
        self._budget_bytes = budget_bytes
        self._device = device
        self._fused: OrderedDict[str, _FusedAdapter] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters kept."""
        return self._nbytes

    def step(self, segments: Sequence[Segment]) -> StepLoRA | None:
        """What `segments` add; None if there are none. Rows outside of all segments stay bitwise as they are."""
        if not segments:
            return None
        return _SegmentedStep([(slice(s.start, s.end), self._fused_of(s.adapter)) for s in segments])

    def _fused_of(self, adapter: AdapterWeights) -> _FusedAdapter:
        fused = self._fused.get(adapter.key)
        if fused is None:
            fused = _fuse(self._groups, adapter, self._device)
            self._fused[adapter.key] = fused
            self._nbytes += fused.nbytes
        self._fused.move_to_end(adapter.key)
        while len(self._fused) > 1 and self._nbytes > self._budget_bytes:
            self._nbytes -= self._fused.popitem(last=False)[1].nbytes
        return fused


class _SegmentedStep:
    """Adds segment by segment."""

    def __init__(self, parts: Sequence[tuple[slice, _FusedAdapter]]) -> None:
        self._parts = parts

    def add(self, group: LinearGroup, x: Tensor, y: Tensor) -> None:
        for rows, adapter in self._parts:
            weights = adapter.groups[group.index]
            if weights is None:
                continue
            v = torch.mm(x[rows], weights.a_t)
            out = y[rows]
            if len(group.paths) == 1:  # nothing to cut out, so two views fewer
                part = weights.slices[0]
                out.addmm_(v, part.b, alpha=part.scale)
                continue
            for part in weights.slices:
                out[:, part.outputs].addmm_(v[:, part.columns], part.b, alpha=part.scale)


def _fuse(groups: Sequence[LinearGroup], adapter: AdapterWeights, device: torch.device) -> _FusedAdapter:
    built = tuple(_fuse_group(group, adapter, device) for group in groups)
    tensors = [tensor for group in built if group for tensor in (group.a_t, *(part.b for part in group.slices))]
    return _FusedAdapter(built, sum(tensor.nbytes for tensor in tensors))


def _fuse_group(group: LinearGroup, adapter: AdapterWeights, device: torch.device) -> _GroupWeights | None:
    parts: list[Tensor] = []
    slices: list[_SliceExpand] = []
    column = offset = 0
    for path, width in zip(group.paths, group.out_features, strict=True):
        module = adapter.modules.get(path)
        if module is not None:
            lora_rank = module.a.size(0)
            columns, outputs = slice(column, column + lora_rank), slice(offset, offset + width)
            parts.append(module.a)
            slices.append(_SliceExpand(columns, outputs, module.b.t().contiguous().to(device), module.scale))
            column += lora_rank
        offset += width
    if not parts:
        return None
    return _GroupWeights((parts[0] if len(parts) == 1 else torch.cat(parts)).to(device).t(), tuple(slices))
