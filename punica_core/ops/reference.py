"""Every op of the ``punica`` namespace in plain torch: the specification, the CPU path and the oracle of the kernels.

Accumulates in fp32 for 16-bit inputs. Reads the plan and the table on the host, so on a GPU it synchronises.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from punica_core.ops.checks import (
    check_add_product,
    check_decode_attention,
    check_embed,
    check_expand,
    check_kv_append,
    check_linear,
    check_rotary_append,
    check_segment_gemm,
    check_shrink,
)
from punica_core.ops.layout import HEADER_WORDS, Field, Header, row_pitch


@dataclass(frozen=True, slots=True)
class Record:
    """One decoded table record; offsets in elements of the arena, -1 for an absent gain or bias."""

    a_offset: int
    b_offset: int
    gain_offset: int
    bias_offset: int
    lora_rank: int
    scale: float


def read_record(table: Tensor, slice_index: int, slot: int) -> Record:
    """Decode the record of ``slot`` in slice ``slice_index`` of a ``[slices, N, RECORD_WORDS]`` table."""
    words = table[slice_index, slot].cpu()
    packed = words[Field.RANK_AND_SCALE : Field.RANK_AND_SCALE + 1]
    a_offset, b_offset, gain_offset, bias_offset = words[: Field.RANK_AND_SCALE].tolist()
    return Record(
        a_offset=a_offset,
        b_offset=b_offset,
        gain_offset=gain_offset,
        bias_offset=bias_offset,
        lora_rank=int(packed.view(torch.int32)[0]),
        scale=float(packed.view(torch.float32)[1]),
    )


def segments(plan: Tensor) -> Iterator[tuple[slice, int]]:
    """Yield (rows, slot) of each non-empty segment of the plan that has an adapter."""
    header = plan[:HEADER_WORDS].tolist()
    count = header[Header.NUM_SEGMENTS]
    indptr_offset, slot_offset = header[Header.INDPTR_OFFSET], header[Header.SLOT_OFFSET]
    indptr = plan[indptr_offset : indptr_offset + count + 1].tolist()
    slots = plan[slot_offset : slot_offset + count].tolist()
    for start, end, slot in zip(indptr, indptr[1:], slots, strict=False):
        if end > start and slot >= 0:
            yield slice(start, end), slot


def _matrix(arena: Tensor, offset: int, rows: int, width: int, pitch: int) -> Tensor:
    return arena[offset : offset + rows * pitch].view(rows, pitch)[:, :width]


def _scratch(v: Tensor, num_rows: int, slices: int, plan: Tensor, max_rank: int) -> Tensor:
    """The first split of v: [T, slices, pitch of the plan]. RuntimeError if the step of the plan does not fit there."""
    header = plan[:HEADER_WORDS].tolist()
    rows, pitch = header[Header.NUM_ROWS], header[Header.RANK_PITCH]
    torch._check(pitch <= max_rank, lambda: f"the plan has lora_ranks up to {pitch}, max_rank is {max_rank}")
    torch._check(rows <= num_rows, lambda: f"the plan has {rows} rows, the step {num_rows}: want as many at least")
    return v[: num_rows * slices * pitch].view(num_rows, slices, pitch)


def lora_shrink(
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
    check_shrink(v, x, arena, table, plan, max_rank)
    out = _scratch(v, x.size(0), table.size(0), plan, max_rank)
    for rows, slot in segments(plan):
        for index in range(table.size(0)):
            record = read_record(table, index, slot)
            if record.lora_rank:
                a = _matrix(arena, record.a_offset, record.lora_rank, x.size(1), x.size(1))
                out[rows, index, : record.lora_rank] = x[rows].float() @ a.float().T


def lora_embed(v: Tensor, token_ids: Tensor, arena: Tensor, table: Tensor, plan: Tensor, max_rank: int) -> None:
    check_embed(v, token_ids, arena, table, plan, max_rank)
    out = _scratch(v, token_ids.size(0), 1, plan, max_rank)
    for rows, slot in segments(plan):
        record = read_record(table, 0, slot)
        if record.lora_rank:
            columns = torch.arange(record.lora_rank, device=arena.device)
            index = record.a_offset + token_ids[rows, None].long() * record.lora_rank + columns
            out[rows, 0, : record.lora_rank] = arena[index].float()


def lora_expand(
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
    sizes = (out_features, in_features, max_rank)
    check_expand(y, v, arena, table, plan, *sizes, summed=summed, overwrite=overwrite)
    hidden = _scratch(v, y.size(0), table.size(0), plan, max_rank)
    if overwrite:
        y.zero_()
    for rows, columns, delta, record in _added(hidden, arena, table, plan, out_features):
        out = y[rows, columns]
        out.copy_(delta if overwrite else _affine(out.float() + delta, arena, record))


def _added(
    hidden: Tensor, arena: Tensor, table: Tensor, plan: Tensor, out_features: Sequence[int]
) -> Iterator[tuple[slice, slice, Tensor, Record]]:
    """Rows, columns, what an adapter adds there, in fp32, and the record that says so. hidden: see `_scratch`."""
    for rows, slot in segments(plan):
        column = 0
        for index, width in enumerate(out_features):
            columns = slice(column, column + width)
            column += width
            record = read_record(table, index, slot)
            if record.lora_rank:
                b = _matrix(arena, record.b_offset, width, record.lora_rank, row_pitch(record.lora_rank))
                yield rows, columns, record.scale * (hidden[rows, index, : record.lora_rank] @ b.float().T), record


def _affine(y: Tensor, arena: Tensor, record: Record) -> Tensor:
    width = y.size(1)
    if record.gain_offset >= 0:
        y = y * arena[record.gain_offset : record.gain_offset + width].float()
    if record.bias_offset >= 0:
        y = y + arena[record.bias_offset : record.bias_offset + width].float()
    return y


def segment_gemm(y: Tensor, x: Tensor, arena: Tensor, table: Tensor, plan: Tensor) -> None:
    check_segment_gemm(y, x, arena, table, plan)
    for rows, slot in segments(plan):
        record = read_record(table, 0, slot)
        if record.lora_rank:
            w = _matrix(arena, record.b_offset, y.size(1), x.size(1), row_pitch(x.size(1)))
            out = record.scale * (x[rows].float() @ w.float().T)
            y[rows] = _affine(out, arena, record).to(y.dtype)


def add_product(y: Tensor, x: Tensor, weight: Tensor) -> None:
    check_add_product(y, x, weight)
    y.copy_(torch.addmm(y.float(), x.float(), weight.float().t()))


def lora_linear(
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
    check_linear(y, v, x, weight, bias, arena, table, plan, out_features, max_rank)
    lora_shrink(v, x, arena, table, plan, max_rank)
    hidden = _scratch(v, y.size(0), table.size(0), plan, max_rank)
    out = x.float() @ weight.float().T
    if bias is not None:
        out += bias.float()
    for rows, columns, delta, _record in _added(hidden, arena, table, plan, out_features):
        out[rows, columns] += delta
    y.copy_(out)


def kv_append(cache: Tensor, key: Tensor, value: Tensor, kv_slots: Tensor, layer: int) -> None:
    check_kv_append(cache, key, value, kv_slots, layer)
    kept = (kv_slots >= 0).nonzero().squeeze(-1)
    slots = kv_slots[kept].long()
    block, offset = slots // cache.size(3), slots % cache.size(3)
    cache[block, layer, 0, offset] = key[kept]
    cache[block, layer, 1, offset] = value[kept]


def rotary_append(
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
    check_rotary_append(query, cache, qkv, cos, sin, kv_slots, layer)
    heads = qkv.unflatten(1, (-1, cache.size(5)))
    rotating, value = heads[:, : -cache.size(4)], heads[:, -cache.size(4) :]
    rotated = rotate(rotating, cos[:, None], sin[:, None])
    query.copy_(rotated[:, : query.size(1)])
    kv_append(cache, rotated[:, query.size(1) :], value, kv_slots, layer)


def decode_attention(
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
    check_decode_attention(out, query, cache, kv_indptr, kv_indices, last_block_len, layer, scaling)
    last = last_block_len.tolist()
    for seq, (begin, end) in enumerate(itertools.pairwise(kv_indptr.tolist())):
        num_tokens = (end - begin - 1) * cache.size(3) + last[seq]
        seen = slice(max(0, num_tokens - window) if window else 0, num_tokens)
        blocks = cache[kv_indices[begin:end].long(), layer]
        keys, values = (blocks[:, half].flatten(0, 1)[seen].float().transpose(0, 1) for half in (0, 1))
        heads = query[seq].float().unflatten(0, (keys.size(0), -1))
        scores = scaling * (heads @ keys.transpose(1, 2))
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out[seq] = (scores.softmax(-1) @ values).flatten(0, 1).to(out.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of the first E elements of heads [..., D]; cos, sin: [..., E]. Rounded once."""
    width = cos.size(-1)
    moved, kept = x[..., :width].float(), x[..., width:]
    lower, upper = moved.chunk(2, -1)
    moved = moved * cos.float() + torch.cat((-upper, lower), -1) * sin.float()
    return torch.cat((moved.to(x.dtype), kept), -1)
