"""LoRA in plain torch: each segment with its own matrices, laid out so that it takes few calls.

A step costs the multiply-adds of the adapters' true ranks and, per segment and group, one call for all A matrices
(those of q, k and v as one) and one per slice for B. Stacking all adapters of a step into one product with a mask
was measured too: from four adapters on it costs more, since most of what it multiplies is thrown away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from punica_core.lora.layers import LinearGroup, StepEmbedding, StepLoRA
from punica_core.lora.linear import READ_TOGETHER, is_read_beyond, spaced
from punica_core.lora.plan import Segment
from punica_core.lora.vocabulary import SegmentedEmbedding, SegmentedHead, changes_embedding, changes_head
from punica_core.lora.weights import AdapterWeights


@dataclass(frozen=True, slots=True)
class _SliceExpand:
    """y[:, outputs] += scale · v[:, columns] · b. b: [R, O], contiguous. v has columns of zeros behind these where a
    product would read beyond its rows (`spaced`)."""

    columns: slice
    outputs: slice
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class _SliceAffine:
    """y[:, outputs] = gain · y[:, outputs] + bias, after the expand. gain: [O] (DoRA) or None; bias: [O] or None."""

    outputs: slice
    gain: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _GroupWeights:
    """One adapter's part in a group. a_t: [I, ΣR], a transposed view; slices: those that the adapter changes.

    is_one: there is one slice, which takes all of v and changes all of y. affine: those that have a gain or a bias,
    mostly none.
    """

    a_t: Tensor
    slices: tuple[_SliceExpand, ...]
    is_one: bool
    affine: tuple[_SliceAffine, ...]


@dataclass(frozen=True, slots=True)
class _FusedAdapter:
    """An adapter laid out for a model's groups: by group index, None where the adapter has nothing."""

    groups: tuple[_GroupWeights | None, ...]
    nbytes: int


class SegmentedLoRA:
    """Plans the LoRA of steps for one model; keeps recently used adapters in the layout that it computes with.

    budget_bytes: bound on those kept besides the adapters of the running step. head, head_bias: the output head's
    group, whose index follows those of `groups`, and its own bias.
    """

    def __init__(
        self,
        groups: Sequence[LinearGroup],
        budget_bytes: int,
        device: torch.device,
        head: LinearGroup | None = None,
        head_bias: Tensor | None = None,
    ) -> None:
        self._groups = (*groups, head) if head is not None else tuple(groups)
        self._head = head
        self._head_bias = head_bias
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

    def embedding_step(self, segments: Sequence[Segment]) -> StepEmbedding | None:
        """What `segments` make of their tokens' embeddings; None if nothing."""
        changed = [s for s in segments if changes_embedding(s.adapter.vocabulary)]
        return SegmentedEmbedding(changed) if changed else None

    def head_step(self, segments: Sequence[Segment]) -> StepLoRA | None:
        """What `segments`, of the rows that need logits, make of the head; None if nothing."""
        if self._head is None:
            return None
        path = self._head.paths[0]
        adapted = [s for s in segments if path in s.adapter.modules]
        changed = [s for s in segments if changes_head(s.adapter.vocabulary)]
        return SegmentedHead(changed, self.step(adapted), self._head_bias) if adapted or changed else None

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
            v = torch.mm(spaced(x[rows]), weights.a_t)
            out = y[rows]
            if weights.is_one:  # nothing to cut out, so two views fewer
                part = weights.slices[0]
                out.addmm_(v, part.b, alpha=part.scale)
            else:
                for part in weights.slices:
                    out[:, part.outputs].addmm_(v[:, part.columns], part.b, alpha=part.scale)
            for affine in weights.affine:
                y_slice = out[:, affine.outputs]
                if affine.gain is not None:
                    y_slice.mul_(affine.gain)
                if affine.bias is not None:
                    y_slice.add_(affine.bias)


def _fuse(groups: Sequence[LinearGroup], adapter: AdapterWeights, device: torch.device) -> _FusedAdapter:
    built = tuple(_fuse_group(group, adapter, device) for group in groups)
    return _FusedAdapter(built, sum(tensor.nbytes for group in built if group for tensor in _tensors(group)))


def _tensors(group: _GroupWeights) -> Iterator[Tensor]:
    yield group.a_t
    yield from (part.b for part in group.slices)
    for affine in group.affine:
        yield from (tensor for tensor in (affine.gain, affine.bias) if tensor is not None)


def _fuse_group(group: LinearGroup, adapter: AdapterWeights, device: torch.device) -> _GroupWeights | None:
    """None if the adapter has nothing there. Copies all it keeps, so that the adapter itself can be given back."""
    parts: list[Tensor] = []
    columns_of: dict[int, slice] = {}
    slices: list[_SliceExpand] = []
    affine: list[_SliceAffine] = []
    column = offset = 0
    for path, width in zip(group.paths, group.out_features, strict=True):
        module = adapter.modules.get(path)
        if module is not None:
            columns = columns_of.get(module.a.data_ptr())
            if columns is None:  # the parts of a fused module share their A
                columns = columns_of[module.a.data_ptr()] = slice(column, column + module.a.size(0))
                parts.append(module.a)
                column = columns.stop
            outputs = slice(offset, offset + width)
            slices.append(_SliceExpand(columns, outputs, _copied(module.b.t(), device), module.scale))
            if module.row_gain is not None or module.bias is not None:
                gain, bias = (None if t is None else _copied(t, device) for t in (module.row_gain, module.bias))
                affine.append(_SliceAffine(outputs, gain, bias))
        offset += width
    if not parts:
        return None
    room = _columns_read([part.columns for part in slices], parts[0]) - column
    if room > 0:
        parts.append(parts[0].new_zeros(room, group.in_features))
    is_one = len(group.paths) == 1 and room <= 0
    return _GroupWeights(torch.cat(parts).to(device).t(), tuple(slices), is_one, tuple(affine))


def _columns_read(slices: Sequence[slice], a: Tensor) -> int:
    """How wide v, of A's dtype, must be for products with these columns to read nothing beyond its rows."""
    if a.dtype != torch.bfloat16:
        return 0
    ends = []
    for columns in slices:
        width: int = columns.stop - columns.start
        ends.append(int(columns.stop) + (-width % READ_TOGETHER if is_read_beyond(width) else 0))
    return max(ends)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, copy=True, memory_format=torch.contiguous_format)
