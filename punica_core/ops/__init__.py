"""Operators of Punica in the torch namespace ``punica``: schemas, reference and fake implementations.

Importing this registers the ops with their torch reference for CPU. ``punica_core.ops.cuda.load()`` adds the CUDA
kernels (``add_product`` needs none; ``lora_linear_tile``, which is no op for others, is the kernel of
``lora_linear``). Shape legend: ``T`` rows in the step · ``S`` segments · ``R`` lora_rank ·
``I``/``O`` in/out features · ``N`` slots · ``H``/``K`` query/kv heads · ``D`` head dim · ``P`` block size · ``L``
layers. ``arena``, ``table`` and ``plan`` are laid out as :mod:`punica_core.ops.layout` says; ``slices`` matrices that
share their input (q, k, v; gate, up) go through one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from punica_core.ops import checks, reference
from punica_core.ops.linear import lora_linear_cuda

__all__ = [
    "add_product",
    "decode_attention",
    "kv_append",
    "lora_apply",
    "lora_embed",
    "lora_expand",
    "lora_linear",
    "lora_shrink",
    "rotary_append",
    "segment_gemm",
]

_LIBRARY = torch.library.Library("punica", "DEF")


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
    """Project each row onto the low rank of its adapter, for all slices of a fused group.

    **Semantics**: ``v[rows, s, :R] = x[rows] @ A[s, slot].T`` for each segment (rows, slot) and slice s, added in fp32.

    ``v`` (mutated) is scratch of at least ``T*slices*max_rank`` floats, seen as ``[splits, T, slices, P]`` with ``P``
    the plan's :attr:`~punica_core.ops.layout.Header.RANK_PITCH`, at most max_rank. An implementation may leave the sum
    in several parts, as many as fit with max_rank for P, or with ``summed`` the whole of it rounded to the arena's
    dtype; only ``lora_expand`` called with the same x width, table, plan, max_rank and ``summed`` knows. Nothing else
    of v is defined afterwards.

    Args:
        v: fp32 ``[numel]`` that starts on 16 bytes, numel >= T*slices*max_rank; ``layout.scratch_elements`` says how
            much is best.
        x: ``[T, I]``, rows contiguous, dtype of the arena.
        arena: 1-D, bf16 or fp16 (CPU also fp32).
        table: int64 ``[slices, N, 6]``.
        plan: int32 ``[capacity]`` of at most T rows, with counters at its end that are zero between calls: what uses
            one plan runs one after another, on one stream or in an order that the caller makes. A kernel that finds
            more rows, or a lora_rank above max_rank, stops with a CUDA error.
        max_rank: bound of every lora_rank in the plan; ``SegmentPlan.rank_pitch`` is the least that will do.
        summed: the parts are added here, in place of by each block of ``lora_expand``: this call takes a microsecond
            longer, which what runs beside it hides, and that one is shorter.
        beside: what follows on the stream, up to the next ``lora_expand``, neither reads v nor writes x, and the first
            of it is a kernel: in a captured CUDA graph it runs beside this one (sm_90 and newer). Give x to that
            ``lora_expand``, so that its memory is not used for something else in between.
    """
    torch.ops.punica.lora_shrink(v, x, arena, table, plan, max_rank, summed=summed, beside=beside)


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
    """Add the adapters' output to the whole fused output of a group.

    **Semantics**: ``y[rows, cols_s] = gain * (y[rows, cols_s] + scale * v[rows, s, :R] @ B[s, slot].T) + bias`` for
    each segment (rows, slot) and slice s with R > 0, rounded once; other elements of y keep their bits.
    With ``overwrite`` y is not read: ``y[rows, cols_s] = scale * v[rows, s, :R] @ B[s, slot].T``, and other elements
    become zero, so that the base product may be added to it: with many rows that moves half the bytes. Gains and biases
    are not applied then: a step whose adapters have any cannot be computed so.

    Args:
        y: ``[T, sum(out_features)]`` (mutated), rows contiguous, dtype of the arena.
        v: what ``lora_shrink`` or ``lora_embed`` left.
        arena, table, plan, max_rank: as for the call that filled v.
        out_features: O of each slice, in the order of y's columns.
        in_features: I of the ``lora_shrink`` before, 1 after ``lora_embed``.
        summed: as for ``lora_shrink``; true after ``lora_embed`` and with ``overwrite``.
        x: not read. Of a ``lora_shrink`` with ``beside``: who plans memory sees that x lives until here.
        overwrite: see above.
    """
    tables = (arena, table, plan)
    torch.ops.punica.lora_expand(
        y, v, *tables, out_features, in_features, max_rank, summed=summed, x=x, overwrite=overwrite
    )


def lora_embed(v: Tensor, token_ids: Tensor, arena: Tensor, table: Tensor, plan: Tensor, max_rank: int) -> None:
    """Look up each token's low-rank row in the embedding adapter of its segment.

    **Semantics**: ``v[t, 0, :R] = A[slot][token_ids[t]]`` with ``A [V, R]`` row-major without padding at the record's A
    offset (PEFT's ``lora_embedding_A`` transposed). ``lora_expand(..., in_features=1, summed=True)`` completes
    it.

    Args:
        v: fp32 scratch (mutated) that starts on 16 bytes, numel >= T*max_rank.
        token_ids: int32 or int64 ``[T]``, each below the V of the adapters of its rows.
        arena, table, plan, max_rank: as for ``lora_shrink``; one slice.
    """
    torch.ops.punica.lora_embed(v, token_ids, arena, table, plan, max_rank)


def segment_gemm(y: Tensor, x: Tensor, arena: Tensor, table: Tensor, plan: Tensor) -> None:
    """Apply a full matrix of the segment's own, such as a saved ``lm_head``.

    **Semantics**: ``y[rows] = gain * (scale * x[rows] @ W[slot].T) + bias`` for each segment whose record has
    lora_rank != 0; ``W [O, I]`` lies at the record's B offset, its row pitch rounded up to 8. Other rows keep their
    bits.

    Args:
        y: ``[T, O]`` (mutated), rows contiguous, dtype of the arena.
        x: ``[T, I]``, rows contiguous, dtype of the arena.
        arena, table, plan: as for ``lora_shrink``; one slice.
    """
    torch.ops.punica.segment_gemm(y, x, arena, table, plan)


def add_product(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add the base product of a linear layer to what its adapters have written.

    **Semantics**: ``y += x @ weight.T`` in fp32, rounded once.

    On a GPU it is one call of cuBLAS that works in y. A compiler does not look into it: it would compute such a sum
    into memory of its own, and copy y there first.

    Args:
        y: ``[T, O]`` (mutated), rows contiguous.
        x: ``[T, I]``, rows contiguous.
        weight: ``[O, I]``, rows contiguous. All of one dtype.
    """
    torch.ops.punica.add_product(y, x, weight)


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
    """Compute a linear layer of few rows with all that adapters add to it, in one kernel.

    **Semantics**: ``y[rows, cols_s] = x[rows] @ weight[cols_s].T + bias[cols_s] + scale * (x[rows] @ A[s, slot].T) @
    B[s, slot].T`` for each segment (rows, slot) and slice s, without the last term for rows and slices without
    adapter, rounded once; between the two products of an adapter it is rounded once too. Gains and biases of adapters
    are not applied: a step whose adapters have any cannot be computed so.

    On GPUs of compute capability 9.0, for steps and layers that :func:`~punica_core.ops.linear.linear_tile` takes, if
    rows and bias start on 16 bytes. Else cuBLAS between shrink and expand, which rounds the base product, too. Best
    where rows have few adapters; with many, expand of a launch of its own has more of the GPU to work on. Blocks of
    the kernel wait for each other, so no other kernel may keep them from running for seconds: not two of these on two
    streams, with whatever plans.

    Args:
        y: ``[T, sum(out_features)]`` (mutated), rows contiguous, dtype of the arena.
        v: fp32 scratch (mutated), as for ``lora_shrink``; nothing of it is defined afterwards.
        x: ``[T, I]``, rows contiguous, dtype of the arena.
        weight: ``[sum(out_features), I]``, rows contiguous, dtype of the arena.
        bias: ``[sum(out_features)]`` or None, dtype of the arena.
        arena, table, plan, max_rank: as for ``lora_shrink``.
        out_features: O of each slice, in the order of y's columns.
    """
    torch.ops.punica.lora_linear(y, v, x, weight, bias, arena, table, plan, out_features, max_rank)


def kv_append(cache: Tensor, key: Tensor, value: Tensor, kv_slots: Tensor, layer: int) -> None:
    """Write a step's keys and values into the paged cache.

    **Semantics**: ``cache[slot // P, layer, 0, slot % P] = key[t]`` and ``cache[slot // P, layer, 1, slot % P] =
    value[t]`` for each t whose ``slot = kv_slots[t]`` is not negative. No two tokens may have one slot.

    Args:
        cache: ``[blocks, L, 2, P, K, D]`` (mutated), contiguous; CUDA: bf16 or fp16, D a multiple of 8.
        key, value: ``[T, K, D]``, elements of a head contiguous, dtype of the cache.
        kv_slots: int32 ``[T]``, block_id * P + offset, or negative for rows that are padding.
        layer: which L.
    """
    torch.ops.punica.kv_append(cache, key, value, kv_slots, layer)


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
    """Rotate a step's queries and keys by their positions, and write keys and values into the paged cache.

    **Semantics**: with ``q, k, v`` the heads of ``qkv``, ``query[t] = rotate(q[t])``, and as ``kv_append`` does it,
    ``cache[..., 0, ...] = rotate(k[t])`` and ``cache[..., 1, ...] = v[t]`` for each t whose kv_slot is not negative.
    ``rotate(x)`` is ``x * cos[t] + rotate_half(x) * sin[t]`` on the first E elements of a head, in fp32 and rounded
    once, where ``rotate_half(x) = cat(-x[E/2:], x[:E/2])``; the other elements keep their bits.

    Args:
        query: ``[T, H, D]`` (mutated), contiguous.
        cache: ``[blocks, L, 2, P, K, D]`` (mutated), contiguous; CUDA: bf16 or fp16.
        qkv: ``[T, (H + 2K) * D]``, rows contiguous: queries, keys, values. CUDA: D and E multiples of 16.
        cos, sin: ``[T, E]``, rows contiguous, E even and at most D. All of the cache's dtype.
        kv_slots: int32 ``[T]``, block_id * P + offset, or negative for rows that are padding.
        layer: which L.
        soon: contiguous; what is read behind attention, such as the weight of the next product. With few rows the
            kernel asks for it to be brought into the L2 cache meanwhile (sm_90 and newer).
    """
    torch.ops.punica.rotary_append(query, cache, qkv, cos, sin, kv_slots, layer, soon=soon)


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
    """Attend with the newest token of each sequence over its blocks of the paged cache.

    **Semantics**: with ``k, v`` the tokens of sequence b in ``cache[kv_indices[kv_indptr[b]:kv_indptr[b+1]], layer]``,
    of whose last block ``last_block_len[b]`` exist, and query head h attending to kv head ``h // (H / K)``:
    ``out[b, h] = softmax(scaling * query[b, h] @ k.T) @ v``, over the last ``window`` tokens unless that is 0. With a
    softcap, scores become ``softcap * tanh(score / softcap)`` first. What lies in a block behind its tokens counts
    for nothing, whatever it is.

    The kernel reads blocks other than each sequence's last before the kernel in front of it has ended.

    Args:
        out: ``[B, H, D]`` (mutated), contiguous, dtype of the cache.
        query: ``[B, H, D]``, contiguous, dtype of the cache.
        cache: ``[blocks, L, 2, P, K, D]``, contiguous; CUDA: bf16 or fp16, P 16, D 64 or 128, H at most 8 K.
        kv_indptr: int32 ``[B + 1]``; no sequence may be without a block.
        kv_indices: int32, block ids; as many as kv_indptr says, or more.
        last_block_len: int32 ``[B]``, 1 to P.
        layer: which L.
    """
    tables = (kv_indptr, kv_indices, last_block_len)
    torch.ops.punica.decode_attention(out, query, cache, *tables, layer, scaling, window=window, softcap=softcap)


def lora_apply(
    y: Tensor,
    x: Tensor,
    v: Tensor,
    arena: Tensor,
    table: Tensor,
    plan: Tensor,
    out_features: Sequence[int],
    max_rank: int,
    *,
    summed: bool = False,
) -> None:
    """``lora_shrink`` and ``lora_expand`` of one fused group: ``y += adapters(x)``. Arguments as there.

    summed: ``plan.sums_in_shrink`` says which is faster.
    """
    lora_shrink(v, x, arena, table, plan, max_rank, summed=summed)
    lora_expand(y, v, arena, table, plan, out_features, x.size(1), max_rank, summed=summed)


def _register() -> None:
    tables = "Tensor arena, Tensor table, Tensor plan"
    linear = (
        f"Tensor(a!) y, Tensor(b!) v, Tensor x, Tensor weight, Tensor? bias, {tables}, int[] out_features, int max_rank"
    )
    schemas = {
        "lora_shrink": f"(Tensor(a!) v, Tensor x, {tables}, int max_rank, *, bool summed=False, "
        "bool beside=False) -> ()",
        "lora_expand": f"(Tensor(a!) y, Tensor v, {tables}, int[] out_features, int in_features, int max_rank, *, "
        "bool summed=False, Tensor? x=None, bool overwrite=False) -> ()",
        "lora_embed": f"(Tensor(a!) v, Tensor token_ids, {tables}, int max_rank) -> ()",
        "segment_gemm": f"(Tensor(a!) y, Tensor x, {tables}) -> ()",
        "lora_linear": f"({linear}) -> ()",
        "lora_linear_tile": f"({linear}, int[] tile) -> ()",
        "add_product": "(Tensor(a!) y, Tensor x, Tensor weight) -> ()",
        "kv_append": "(Tensor(a!) cache, Tensor key, Tensor value, Tensor kv_slots, int layer) -> ()",
        "rotary_append": "(Tensor(a!) query, Tensor(b!) cache, Tensor qkv, Tensor cos, Tensor sin, Tensor kv_slots, "
        "int layer, *, Tensor? soon=None) -> ()",
        "decode_attention": "(Tensor(a!) out, Tensor query, Tensor cache, Tensor kv_indptr, Tensor kv_indices, "
        "Tensor last_block_len, int layer, float scaling, *, int window=0, float softcap=0.0) -> ()",
    }
    fakes = {
        "lora_shrink": checks.check_shrink,
        "lora_expand": checks.check_expand,
        "lora_embed": checks.check_embed,
        "lora_linear": checks.check_linear,
        "segment_gemm": checks.check_segment_gemm,
        "add_product": checks.check_add_product,
        "kv_append": checks.check_kv_append,
        "rotary_append": checks.check_rotary_append,
        "decode_attention": checks.check_decode_attention,
    }
    for name, schema in schemas.items():
        _LIBRARY.define(name + schema)
        if name in fakes:
            _LIBRARY.impl(name, getattr(reference, name), "CPU")
            torch.library.register_fake(f"punica::{name}", fakes[name], lib=_LIBRARY)
    _LIBRARY.impl("add_product", _add_by_cublas, "CUDA")
    _LIBRARY.impl("lora_linear", lora_linear_cuda, "CUDA")


def _add_by_cublas(y: Tensor, x: Tensor, weight: Tensor) -> None:
    checks.check_add_product(y, x, weight)
    torch.addmm(y, x, weight.t(), out=y)


_register()
