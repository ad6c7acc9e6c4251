"""Attention over a paged KV cache in plain torch, behind transformers' attention interface.

The modelling code calls `paged_attention` once a layer; what it needs to know of the step comes with the call, as
the keyword `paged` that `forward` passes through. KV is block-major, [blocks, L, 2, P, K, D]: a block holds the keys
and values of P tokens of all layers.

Decode rows are attended in buckets of similar length, one scaled-dot-product call each, over gathered and padded
blocks; the G = H / K query heads that share a KV head stand in for G query positions, so that nothing is repeated.
Longer rows are attended one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from punica_core.lora.threads import LARGE_WORK, Threads

ATTENTION_NAME = "punica_paged"


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How a layer attends. scaling: factor of the scores; window: tokens a query sees, itself included, or None;
    softcap: scores become softcap · tanh(score / softcap), or None."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


class StepAttention(Protocol):
    """Attention of one step, over all layers."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """query: [T, H, D]; key, value: [T, K, D] of the step's tokens → [T, H, D]."""


class RotaryAttention(StepAttention, Protocol):
    """One that also rotates queries and keys by their positions."""

    def attend_rotary(self, layer: Any, qkv: Tensor, cos: Tensor, sin: Tensor, width: int, soon: Tensor) -> Tensor:
        """qkv: [T, (H + 2K) D], the product of a fused projection; cos, sin: [T, E] → [T, H D], H D = `width`.

        Rotates the first E elements of heads as `ops.rotary_append` does. soon: what is read next.
        """


class UnsupportedAttention(ValueError):
    """A layer asks for something that this attention does not compute."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: StepAttention | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function registered under `ATTENTION_NAME`. query: [1, H, T, D]; key, value: [1, K, T, D] → [1, T, H, D]."""
    asked = sorted(name for name, wanted in others.items() if name not in _HARMLESS and wanted is not None)
    if paged is None:
        raise UnsupportedAttention("its layers do not pass keywords of forward on to their attention")
    if asked or attention_mask is not None or dropout:
        raise UnsupportedAttention(f"its attention takes {', '.join(asked) or 'a mask or dropout'}")
    spec = AttentionSpec(query.size(-1) ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    out = paged.attend(
        layer_of(module, paged),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        spec,
    )
    return out[None], None


def layer_of(module: nn.Module, paged: StepAttention) -> Any:
    """Which layer `module` belongs to, as `paged` wants it: a number, or a tensor.

    Compiled code serves all layers only if it reads nothing that differs between them but tensors.
    """
    return module.layer_index if getattr(paged, "takes_layer_index", False) else module.layer_idx


_HARMLESS = frozenset({"position_ids", "use_cache", "cache", "output_attentions", "is_causal", "logits_to_keep"})
"""Keywords that models pass along and that change nothing here."""


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers; may be called again."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


@dataclass(frozen=True, slots=True)
class KVRow:
    """One sequence's part of a step: its tokens [start, start + count) are the step's rows [first, first + count)."""

    first: int
    start: int
    count: int
    block_table: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.count


class PagedAttention:
    """Attention of one step. cache: [blocks, L, 2, P, K, D], contiguous; rows: all of the step, in order.

    threads: given if torch is set to one thread, which large work may leave.

    Blocks that a row begins are cleared first, so that what is read of a block and masked is finite, whatever a
    failed sequence left there.
    """

    def __init__(self, cache: Tensor, rows: Sequence[KVRow], threads: Threads | None = None) -> None:
        num_blocks, layers, _, block_size, _, _ = cache.shape
        self._layers = layers
        self._threads = threads
        self._tokens = cache.view(num_blocks * layers * 2 * block_size, -1)
        self._halves = cache.view(num_blocks * layers * 2, -1)
        self._head_shape = cache.shape[-2:]
        _clear_begun(cache, rows, block_size)
        self._slots = _kv_slots(rows, layers, block_size).to(cache.device).unbind()
        decode = [row for row in rows if row.count == 1]
        self._buckets = [
            _Bucket(part, block_size, len(rows) == len(part), cache.device) for part in _bucketed(decode, block_size)
        ]
        self._chunks = [_Chunk(row, block_size, cache.device) for row in rows if row.count > 1]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self._tokens.index_copy_(0, self._slots[layer], torch.cat((key.flatten(1), value.flatten(1))))
        if len(self._buckets) == 1 and not self._chunks and self._buckets[0].is_whole_step:
            return self._attend_bucket(self._buckets[0], layer, query, spec)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for bucket in self._buckets:
            out.index_copy_(0, bucket.rows, self._attend_bucket(bucket, layer, query[bucket.rows], spec))
        for chunk in self._chunks:
            rows = slice(chunk.row.first, chunk.row.first + chunk.row.count)
            out[rows] = self._attend_chunk(chunk, layer, query[rows], key[rows], value[rows], spec)
        return out

    def _gather(self, halves: Tensor, num_rows: int) -> Tensor:
        """Keys and values [2, B, n·P, K, D] of a layer. halves: which halves of blocks, as `_half_rows` gives them."""
        return self._halves.index_select(0, halves).view(2, num_rows, -1, *self._head_shape)

    def _attend_bucket(self, bucket: _Bucket, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """query: [B, H, D] → [B, H, D]."""
        spread = self._spread(query.numel() * bucket.length)
        found = self._gather(bucket.halves(self._layers)[layer], query.size(0))
        keys, values = found[:, :, : bucket.length].transpose(2, 3).unbind()
        grouped = query.reshape(query.size(0), keys.size(1), -1, query.size(-1))
        out = scaled_dot_product(grouped, keys, values, bucket.mask(spec.window, query.dtype), spec)
        if spread:
            spread.use_one()
        return out.view(query.shape)

    def _attend_chunk(
        self, chunk: _Chunk, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """query: [count, H, D]; key, value: [count, K, D] → [count, H, D]."""
        spread = self._spread(query.numel() * chunk.row.end)
        if chunk.row.start:
            key, value = self._gather(chunk.halves(self._layers)[layer], 1)[:, 0, : chunk.row.end]
        out = attend_causally(query, key, value, spec, chunk.mask(spec.window))
        if spread:
            spread.use_one()
        return out

    def _spread(self, work: int) -> Threads | None:
        """Go from one thread to all if so many multiply-adds are worth it; then the caller must go back."""
        if self._threads is None or work < LARGE_WORK:
            return None
        self._threads.use_all()
        return self._threads


class _Bucket:
    """Decode rows that are attended together, padded to the longest."""

    def __init__(self, rows: Sequence[KVRow], block_size: int, is_whole_step: bool, device: torch.device) -> None:
        self.rows = torch.tensor([row.first for row in rows], device=device)
        self.is_whole_step = is_whole_step
        self._positions = torch.tensor([row.start for row in rows], device=device)
        self.length = max(row.end for row in rows)
        self._needs_mask = min(row.end for row in rows) < self.length
        width = -(-self.length // block_size)
        # Padding repeats the row's own first block: its numbers are finite if the row's are.
        tables = [_padded(row.block_table, -(-row.end // block_size), width) for row in rows]
        self._tables = torch.tensor(tables, device=device)
        self._halves: tuple[Tensor, ...] = ()
        self._masks: dict[int | None, Tensor | None] = {}

    def halves(self, layers: int) -> tuple[Tensor, ...]:
        """By layer, where its keys and values lie: see `_half_rows`."""
        if not self._halves:
            self._halves = _half_rows(self._tables, layers)
        return self._halves

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[B, 1, 1, length], added to the scores; None if every row sees everything."""
        if window not in self._masks:
            self._masks[window] = self._build_mask(window, dtype)
        return self._masks[window]

    def _build_mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        limited = window is not None and window < self.length
        if not self._needs_mask and not limited:
            return None
        at = torch.arange(self.length, device=self._tables.device)
        visible = at <= self._positions[:, None]
        if limited and window is not None:
            visible &= at > self._positions[:, None] - window
        return _added(visible, dtype)[:, None, None]


class _Chunk:
    """A row of several tokens."""

    def __init__(self, row: KVRow, block_size: int, device: torch.device) -> None:
        self.row = row
        self._table = torch.tensor([list(row.block_table[: -(-row.end // block_size)])], device=device)
        self._halves: tuple[Tensor, ...] = ()
        self._masks: dict[int | None, Tensor | None] = {}

    def halves(self, layers: int) -> tuple[Tensor, ...]:
        """By layer, where its keys and values lie: see `_half_rows`."""
        if not self._halves:
            self._halves = _half_rows(self._table, layers)
        return self._halves

    def mask(self, window: int | None) -> Tensor | None:
        if window not in self._masks:
            self._masks[window] = causal_mask(self.row.start, self.row.count, window, self._table.device)
        return self._masks[window]


def causal_mask(start: int, count: int, window: int | None, device: torch.device) -> Tensor | None:
    """[count, start + count], True where a query of [start, start + count) sees a key; None if plain causal from 0."""
    end = start + count
    if start == 0 and (window is None or window >= end):
        return None
    position = torch.arange(start, end, device=device)[:, None]
    at = torch.arange(end, device=device)
    visible = at <= position
    return visible if window is None else visible & (at > position - window)


def attend_causally(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """One sequence: query [T, H, D]; key, value [S, K, D]; mask as `causal_mask` gives it → [T, H, D]."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    if spec.softcap is None:
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.scaling, enable_gqa=q.size(1) != k.size(1)
        )
    else:
        heads = q.size(1) // k.size(1)
        if mask is None:
            mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
        keys, values = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
        out = _softcapped(q, keys, values, _added(mask, q.dtype), spec)
    return out[0].transpose(0, 1)


def scaled_dot_product(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """query: [B, K, G, D]; key, value: [B, K, S, D]; mask added to the scores → [B, K, G, D], contiguous."""
    if spec.softcap is not None:
        return _softcapped(query, key, value, mask, spec).contiguous()
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=spec.scaling).contiguous()


def _softcapped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    assert spec.softcap is not None
    scores = (query @ key.transpose(-1, -2)).float() * spec.scaling
    scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1).to(query.dtype) @ value


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is visible, else -inf: what is added to the scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _bucketed(rows: Sequence[KVRow], block_size: int) -> list[list[KVRow]]:
    """Rows in buckets within which no row has fewer than half of the longest's blocks."""
    buckets: list[list[KVRow]] = []
    largest = 0
    for row in sorted(rows, key=lambda row: -row.end):
        blocks = -(-row.end // block_size)
        if not buckets or 2 * blocks < largest:
            buckets.append([])
            largest = blocks
        buckets[-1].append(row)
    for bucket in buckets:
        bucket.sort(key=lambda row: row.first)
    return buckets


def _padded(block_table: Sequence[int], used: int, width: int) -> list[int]:
    return [*block_table[:used], *([block_table[0]] * (width - used))]


def _kv_slots(rows: Sequence[KVRow], layers: int, block_size: int) -> Tensor:
    """Where the step's keys [T] and then its values [T] go among the tokens of all halves of blocks: [L, 2·T]."""
    stride = layers * 2 * block_size
    keys = [
        row.block_table[p // block_size] * stride + p % block_size for row in rows for p in range(row.start, row.end)
    ]
    of_layer = torch.arange(0, stride, 2 * block_size)[:, None]
    return of_layer + torch.tensor(keys + [slot + block_size for slot in keys])


def _half_rows(tables: Tensor, layers: int) -> tuple[Tensor, ...]:
    """Where keys and values of blocks [B, n] lie among the halves of all blocks: for each layer [2·B·n]."""
    keys = tables.flatten() * (layers * 2)
    of_layer = torch.arange(0, layers * 2, 2, device=tables.device)[:, None]
    halves: tuple[Tensor, ...] = (of_layer + torch.cat((keys, keys + 1))).unbind()
    return halves


def _clear_begun(cache: Tensor, rows: Sequence[KVRow], block_size: int) -> None:
    begun = [
        row.block_table[index]
        for row in rows
        for index in range(-(-row.start // block_size), -(-row.end // block_size))
    ]
    if begun:
        cache[torch.tensor(begun, device=cache.device)] = 0
