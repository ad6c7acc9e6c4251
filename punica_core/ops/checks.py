"""What every op of the ``punica`` namespace demands of its arguments; as fake implementations, all that they do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from punica_core.ops.layout import MAX_RANK, MAX_SLICES, RECORD_WORDS, ROW_ALIGNMENT


def _check_common(arena: Tensor, table: Tensor, plan: Tensor) -> None:
    torch._check(
        arena.dim() == 1 and arena.is_contiguous(),
        lambda: f"arena must be a contiguous 1-D tensor, got {tuple(arena.shape)}",
    )
    torch._check(
        table.dtype == torch.int64 and table.dim() == 3,
        lambda: f"table must be int64 [slices, N, 6], got {table.dtype} {tuple(table.shape)}",
    )
    torch._check(
        1 <= table.size(0) <= MAX_SLICES and table.size(2) == RECORD_WORDS,
        lambda: f"table must be [1..{MAX_SLICES} slices, N, {RECORD_WORDS}], got {tuple(table.shape)}",
    )
    torch._check(
        table.stride(2) == 1 and table.stride(0) % RECORD_WORDS == 0 and table.stride(1) % RECORD_WORDS == 0,
        lambda: f"table must have whole records of {RECORD_WORDS} words, got strides {table.stride()}",
    )
    torch._check(
        plan.dtype == torch.int32 and plan.dim() == 1 and plan.is_contiguous(),
        lambda: f"plan must be contiguous 1-D int32, got {plan.dtype} {tuple(plan.shape)}",
    )


def _check_rows(name: str, rows: Tensor, arena: Tensor) -> None:
    torch._check(
        rows.dim() == 2 and rows.stride(1) == 1,
        lambda: f"{name} must be 2-D with contiguous rows, got {tuple(rows.shape)} strides {rows.stride()}",
    )
    torch._check(
        rows.dtype == arena.dtype, lambda: f"{name} is {rows.dtype}, the arena is {arena.dtype}: want one dtype"
    )


def _check_scratch(v: Tensor, num_rows: int, slices: int, max_rank: int) -> None:
    torch._check(
        v.dim() == 1 and v.dtype == torch.float32 and v.is_contiguous(),
        lambda: f"v must be contiguous 1-D float32, got {v.dtype} {tuple(v.shape)}",
    )
    torch._check(
        max_rank % ROW_ALIGNMENT == 0 and 0 < max_rank <= MAX_RANK,
        lambda: f"max_rank must be a multiple of {ROW_ALIGNMENT} up to {MAX_RANK}, got {max_rank}",
    )
    torch._check(
        v.storage_offset() * v.itemsize % 16 == 0, lambda: f"v must start on 16 bytes, not at {v.storage_offset()}"
    )
    need = num_rows * slices * max_rank
    torch._check(v.numel() >= need, lambda: f"v holds {v.numel()} floats, want at least T*slices*max_rank = {need}")


def check_shrink(
    v: Tensor,
    x: Tensor,
    arena: Tensor,
    table: Tensor,
    plan: Tensor,
    max_rank: int,
    *,
    summed: bool = False,
    beside: bool = False,
) -> None:
    _check_common(arena, table, plan)
    _check_rows("x", x, arena)
    _check_scratch(v, x.size(0), table.size(0), max_rank)


def check_embed(v: Tensor, token_ids: Tensor, arena: Tensor, table: Tensor, plan: Tensor, max_rank: int) -> None:
    _check_common(arena, table, plan)
    torch._check(
        token_ids.dim() == 1 and token_ids.dtype in (torch.int32, torch.int64),
        lambda: f"token_ids must be 1-D int32 or int64, got {token_ids.dtype} {tuple(token_ids.shape)}",
    )
    torch._check(table.size(0) == 1, lambda: f"lora_embed takes one slice, got {table.size(0)}")
    _check_scratch(v, token_ids.size(0), 1, max_rank)


def check_expand(
    y: Tensor,
    v: Tensor,
    arena: Tensor,
    table: Tensor,
    plan: Tensor,
    out_features: Sequence[int],
    in_features: int,
    max_rank: int,
    *,
    summed: bool = False,
    x: Tensor | None = None,
    overwrite: bool = False,
) -> None:
    _check_common(arena, table, plan)
    _check_rows("y", y, arena)
    torch._check(
        len(out_features) == table.size(0) and sum(out_features) == y.size(1),
        lambda: f"out_features {list(out_features)} must name {table.size(0)} slices that add up to {y.size(1)}",
    )
    torch._check(in_features >= 1, lambda: f"in_features must be positive, got {in_features}")
    torch._check(summed or not overwrite, lambda: "overwrite needs rows that lora_shrink has summed")
    _check_scratch(v, y.size(0), table.size(0), max_rank)


def check_segment_gemm(y: Tensor, x: Tensor, arena: Tensor, table: Tensor, plan: Tensor) -> None:
    _check_common(arena, table, plan)
    _check_rows("x", x, arena)
    _check_rows("y", y, arena)
    torch._check(y.size(0) == x.size(0), lambda: f"x has {x.size(0)} rows, y has {y.size(0)}: want as many")
    torch._check(table.size(0) == 1, lambda: f"segment_gemm takes one slice, got {table.size(0)}")


def check_linear(
    y: Tensor,
    v: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arena: Tensor,
    table: Tensor,
    plan: Tensor,
    out_features: Sequence[int],
    max_rank: int,
) -> None:
    check_shrink(v, x, arena, table, plan, max_rank)
    check_expand(y, v, arena, table, plan, out_features, x.size(1), max_rank)
    check_add_product(y, x, weight)
    torch._check(
        bias is None or (bias.dim() == 1 and bias.size(0) == y.size(1) and bias.dtype == y.dtype),
        lambda: f"bias must be [{y.size(1)}] of {y.dtype}",
    )


def check_add_product(y: Tensor, x: Tensor, weight: Tensor) -> None:
    for name, rows in (("y", y), ("x", x), ("weight", weight)):
        torch._check(
            rows.dim() == 2 and rows.stride(1) == 1,
            lambda name=name, rows=rows: (
                f"{name} must be 2-D with contiguous rows, got {tuple(rows.shape)} strides {rows.stride()}"
            ),
        )
    torch._check(
        y.dtype == x.dtype == weight.dtype,
        lambda: f"y is {y.dtype}, x {x.dtype}, the weight {weight.dtype}: want one dtype",
    )
    torch._check(
        y.size(0) == x.size(0) and y.size(1) == weight.size(0) and x.size(1) == weight.size(1),
        lambda: f"y {tuple(y.shape)} is not x {tuple(x.shape)} times a weight {tuple(weight.shape)}",
    )


def _check_cache(cache: Tensor, layer: int) -> None:
    torch._check(
        cache.dim() == 6 and cache.is_contiguous() and cache.size(2) == 2,
        lambda: f"cache must be contiguous [blocks, L, 2, P, K, D], got {tuple(cache.shape)}",
    )
    torch._check(0 <= layer < cache.size(1), lambda: f"layer is {layer}, the cache has {cache.size(1)}")


def check_kv_append(cache: Tensor, key: Tensor, value: Tensor, kv_slots: Tensor, layer: int) -> None:
    _check_cache(cache, layer)
    torch._check(
        kv_slots.dtype == torch.int32 and kv_slots.dim() == 1,
        lambda: f"kv_slots must be 1-D int32, got {kv_slots.dtype} {tuple(kv_slots.shape)}",
    )
    for name, rows in (("key", key), ("value", value)):
        torch._check(
            rows.dim() == 3 and rows.size(0) == kv_slots.size(0) and rows.shape[1:] == cache.shape[4:],
            lambda name=name, rows=rows: f"{name} must be [T, K, D] as kv_slots and cache say, got {tuple(rows.shape)}",
        )


def check_rotary_append(
    query: Tensor,
    cache: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_slots: Tensor,
    layer: int,
    *,
    soon: Tensor | None = None,
) -> None:
    torch._check(
        query.dim() == 3 and query.is_contiguous() and query.size(2) == cache.size(5),
        lambda: f"query must be contiguous [T, H, D], got {tuple(query.shape)}",
    )
    num_rows, width = query.size(0), (query.size(1) + 2 * cache.size(4)) * cache.size(5)
    for name, rows, columns in (("qkv", qkv, width), ("cos", cos, cos.size(-1)), ("sin", sin, cos.size(-1))):
        torch._check(
            rows.dim() == 2 and rows.size(0) == num_rows and rows.size(1) == columns and rows.stride(1) == 1,
            lambda name=name, rows=rows, columns=columns: (
                f"{name} must be [{num_rows}, {columns}] with contiguous "
                f"rows, got {tuple(rows.shape)} strides {rows.stride()}"
            ),
        )
    torch._check(
        cos.size(1) % 2 == 0 and 0 < cos.size(1) <= cache.size(5),
        lambda: f"cos must have an even number of columns, at most the head dim, got {cos.size(1)}",
    )
    torch._check(
        query.dtype == qkv.dtype == cos.dtype == sin.dtype == cache.dtype,
        lambda: f"query, qkv, cos and sin must have the cache's dtype {cache.dtype}",
    )
    keys = qkv[:, query.size(1) * cache.size(5) :].unflatten(1, (2, cache.size(4), cache.size(5)))
    check_kv_append(cache, keys[:, 0], keys[:, 1], kv_slots, layer)


def check_decode_attention(
    out: Tensor,
    query: Tensor,
    cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_block_len: Tensor,
    layer: int,
    scaling: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    _check_cache(cache, layer)
    for name, rows in (("query", query), ("out", out)):
        torch._check(
            rows.dim() == 3 and rows.is_contiguous() and rows.size(2) == cache.size(5) and rows.dtype == cache.dtype,
            lambda name=name, rows=rows: (
                f"{name} must be contiguous [B, H, D] of the cache's dtype, got {rows.dtype} {tuple(rows.shape)}"
            ),
        )
    torch._check(
        out.shape == query.shape and query.size(1) % cache.size(4) == 0,
        lambda: f"query {tuple(query.shape)} and out {tuple(out.shape)} must have the same multiple of K heads",
    )
    sizes = (("kv_indptr", kv_indptr, query.size(0) + 1), ("last_block_len", last_block_len, query.size(0)))
    for name, table, size in (*sizes, ("kv_indices", kv_indices, kv_indices.size(0))):
        torch._check(
            table.dtype == torch.int32 and table.dim() == 1 and table.size(0) == size,
            lambda name=name, table=table: (
                f"{name} must be 1-D int32, as long as the query says, got {table.dtype} {tuple(table.shape)}"
            ),
        )
