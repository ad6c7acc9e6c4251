"""Attention as an opaque op, so that compiled and captured code has one node a layer for it.

An op can only be told tensors and numbers. Its `handle` names an `OpAttention`, which knows what the step looks like.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from punica_core.model.attention import AttentionSpec, KVRow, PagedAttention
from punica_core.ops.reference import rotate

Int32Array = npt.NDArray[np.int32]

_LIBRARY = torch.library.Library("punica", "FRAGMENT")
_handles = itertools.count()
_attached: WeakValueDictionary[int, OpAttention] = WeakValueDictionary()
"""Who answers to a handle: an op has no other way to reach an object. Entries vanish with their owners."""


class LayerAttention(Protocol):
    """Attention over the KV cache, for the rows of the step that was begun last."""

    def compute(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: [T, H, D], contiguous; key, value: [T, K, D] → [T, H, D], contiguous. Stores keys and values first."""

    def compute_rotary(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, soon: Tensor) -> Tensor:
        """`compute` of heads that are still to be rotated, as `ops.rotary_append` does it. qkv: [T, (H + 2K) D]; cos,
        sin: [T, E]. soon: what is read next."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Sequences of a step that are attended by one launch: B of them (padding included), in adjacent rows.

    rows: which of the step. qo_indptr, kv_indptr: int32 [B+1], on the host and on the device: rows (counted from the
    lane's first) and entries of `kv_indices` of each sequence. last_block_len: int32 [B], tokens in its last block.
    """

    rows: slice
    host_qo_indptr: Int32Array
    host_kv_indptr: Int32Array
    qo_indptr: Tensor
    kv_indptr: Tensor
    last_block_len: Tensor

    @property
    def num_seqs(self) -> int:
        return len(self.host_qo_indptr) - 1

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step as attention sees it: T rows.

    decode: sequences with one row each, which come first; prompts: those with more; None if there are none. kv_indices:
    int32, the blocks of all sequences. kv_slots: int32 [T], where the rows' own keys and values go, negative for
    padding. in_graph: all sizes are those that a graph was, or is being, captured for, with these very tensors.
    kv_rows: the same, without the padding, for attention that plans on the host.
    """

    decode: Lane | None
    prompts: Lane | None
    kv_indices: Tensor
    kv_slots: Tensor
    in_graph: bool
    kv_rows: tuple[KVRow, ...]


class GatheredAttention:
    """Implements `LayerAttention` in plain torch: any dtype, head dim and device; waits for the device.

    cache: [blocks, L, 2, P, K, D]. specs: of each layer.
    """

    def __init__(self, cache: Tensor, specs: Sequence[AttentionSpec]) -> None:
        self._cache = cache
        self._specs = tuple(specs)
        self._index = torch.zeros(0, dtype=torch.int64)
        self._step: PagedAttention | None = None

    def set_cache(self, cache: Tensor) -> None:
        """Use another cache of the same shape but for its number of blocks."""
        self._cache = cache

    def wants_cut(self, batch: AttentionBatch) -> bool:
        """Never: contexts are not cut."""
        return False

    def begin(self, batch: AttentionBatch, cut: bool = True) -> None:
        """Prepare for a step."""
        self._step = None
        if batch.kv_rows:
            adjacent = list(itertools.accumulate((row.count for row in batch.kv_rows), initial=0))
            index = [row.first + i for row in batch.kv_rows for i in range(row.count)]
            rows = [replace(row, first=first) for row, first in zip(batch.kv_rows, adjacent, strict=False)]
            self._index = torch.tensor(index, device=self._cache.device)
            self._step = PagedAttention(self._cache, rows)

    def compute(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.zeros_like(query)
        if self._step is not None:
            at = self._index  # padding may lie between the rows
            out[at] = self._step.attend(layer, query[at], key[at], value[at], self._specs[layer])
        return out

    def compute_rotary(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, soon: Tensor) -> Tensor:
        kv_heads, head_dim = self._cache.shape[4:]
        return self.compute(layer, *split_rotated(qkv, cos, sin, kv_heads, head_dim))


def split_rotated(qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D] and keys, rotated, and values [T, K, D], in plain torch. Arguments as `compute_rotary`'s."""
    heads = qkv.unflatten(1, (-1, head_dim))
    rotated = rotate(heads[:, :-kv_heads], cos[:, None], sin[:, None])
    return rotated[:, :-kv_heads].contiguous(), rotated[:, -kv_heads:], heads[:, -kv_heads:]


class OpAttention:
    """A `RotaryAttention` for compiled code, behind which a `LayerAttention` computes.

    It wants layers as tensors: see `index_layers`.
    """

    takes_layer_index = True

    def __init__(self, inner: LayerAttention) -> None:
        self.inner = inner
        self.handle = next(_handles)
        _attached[self.handle] = self

    def attend(self, layer: Tensor, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `StepAttention.attend`. What `spec` says was fixed per layer when the model was probed."""
        out: Tensor = torch.ops.punica.paged_attention(query.contiguous(), key, value, layer, self.handle)
        return out

    def attend_rotary(self, layer: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, width: int, soon: Tensor) -> Tensor:
        """See `RotaryAttention.attend_rotary`."""
        out: Tensor = torch.ops.punica.rotary_attention(qkv, cos, sin, layer, width, soon, self.handle)
        return out


def index_layers(model: nn.Module) -> None:
    """Give each module that knows its `layer_idx` that number as a tensor on the CPU, `layer_index`."""
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            module.layer_index = torch.tensor(layer)


def _paged_attention(query: Tensor, key: Tensor, value: Tensor, layer: Tensor, handle: int) -> Tensor:
    return _attached[handle].inner.compute(int(layer), query, key, value)


def _rotary_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, layer: Tensor, width: int, soon: Tensor, handle: int
) -> Tensor:
    return _attached[handle].inner.compute_rotary(int(layer), qkv, cos, sin, soon).flatten(1)


def _rotary_shape(
    qkv: Tensor, cos: Tensor, sin: Tensor, layer: Tensor, width: int, soon: Tensor, handle: int
) -> Tensor:
    return qkv.new_empty(qkv.size(0), width)


def _shape_only(query: Tensor, key: Tensor, value: Tensor, layer: Tensor, handle: int) -> Tensor:
    return query.new_empty(query.shape)


_LIBRARY.define("paged_attention(Tensor query, Tensor key, Tensor value, Tensor layer, int handle) -> Tensor")
_LIBRARY.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
torch.library.register_fake("punica::paged_attention", _shape_only, lib=_LIBRARY)
_LIBRARY.define(
    "rotary_attention(Tensor qkv, Tensor cos, Tensor sin, Tensor layer, int width, Tensor soon, int handle) -> Tensor"
)
_LIBRARY.impl("rotary_attention", _rotary_attention, "CompositeExplicitAutograd")
torch.library.register_fake("punica::rotary_attention", _rotary_shape, lib=_LIBRARY)
