"""Paged attention: any mix of rows, whatever lies in the cache beside them, equals attention over the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from punica_core.model.attention import (
    AttentionSpec,
    KVRow,
    PagedAttention,
    UnsupportedAttention,
    causal_mask,
    paged_attention,
)

LAYERS, BLOCK_SIZE, KV_HEADS, HEADS, HEAD_DIM = 2, 16, 2, 6, 8
CPU = torch.device("cpu")
SPECS = [
    AttentionSpec(0.3),
    AttentionSpec(0.3, window=5),
    AttentionSpec(0.3, window=40),
    AttentionSpec(0.3, softcap=2.0),
    AttentionSpec(0.3, window=9, softcap=2.0),
]


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Plain attention of a whole sequence in float64: [T, H, D], [T, K, D] → [T, H, D]."""
    heads = q.size(1) // k.size(1)
    k, v = (tensor.double().repeat_interleave(heads, 1) for tensor in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * spec.scaling
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    at = torch.arange(q.size(0))
    visible = at <= at[:, None]
    if spec.window is not None:
        visible &= at > at[:, None] - spec.window
    return torch.einsum("hts,shd->thd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v).float()


def poisoned_cache(blocks: int = 64) -> torch.Tensor:
    return torch.full((blocks, LAYERS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), float("nan"))


def run_in_steps(lengths: list[int], cuts: list[list[int]], spec: AttentionSpec, layer: int) -> float:
    """Largest error of sequences that are computed step by step, cut at `cuts[step][sequence]`."""
    torch.manual_seed(sum(lengths))
    cache = poisoned_cache()
    inputs = [[torch.randn(n, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS)] for n in lengths]
    tables = [list(range(40 - i * 8, 48 - i * 8)) for i in range(len(lengths))]
    done, error = [0] * len(lengths), 0.0
    for ends in [*cuts, lengths]:
        rows, parts, first = [], [], 0
        for i, end in enumerate(ends):
            if end > done[i]:
                rows.append(KVRow(first, done[i], end - done[i], tables[i]))
                parts.append([tensor[done[i] : end] for tensor in inputs[i]])
                first += end - done[i]
        step = PagedAttention(cache, rows)
        q, k, v = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        out = step.attend(layer, q, k, v, spec)
        position = 0
        for i, end in enumerate(ends):
            if end > done[i]:
                got = out[position : position + end - done[i]]
                error = max(error, float((got - whole(*inputs[i], spec)[done[i] : end]).abs().max()))
                position += end - done[i]
                done[i] = end
    return error


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_prefill_chunks_and_decode_rows_together_equal_the_whole(spec: AttentionSpec, layer: int) -> None:
    cuts = [[7, 16, 30, 1], [8, 17, 31, 2], [9, 18, 90, 3], [10, 33, 91, 4], [11, 34, 92, 5]]
    assert run_in_steps([12, 35, 93, 6], cuts, spec, layer) < 1e-5


def test_a_single_row_decodes_alone() -> None:
    assert run_in_steps([20], [[15], [16], [17], [18], [19]], SPECS[0], 0) < 1e-5


def test_the_window_and_the_softcap_are_seen_in_the_result() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(20, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
    plain = whole(q, k, v, SPECS[0])
    assert all(float((plain - whole(q, k, v, spec)).abs().max()) > 1e-3 for spec in (SPECS[1], SPECS[3]))


def test_keys_land_in_their_layer_and_block_and_nowhere_else() -> None:
    cache = poisoned_cache(4)
    row = KVRow(0, 0, 3, [2])
    key, value = torch.randn(3, KV_HEADS, HEAD_DIM), torch.randn(3, KV_HEADS, HEAD_DIM)
    PagedAttention(cache, [row]).attend(1, torch.randn(3, HEADS, HEAD_DIM), key, value, SPECS[0])
    assert torch.equal(cache[2, 1, 0, :3], key)
    assert torch.equal(cache[2, 1, 1, :3], value)
    assert torch.equal(cache[2, 1, :, 3:], torch.zeros(2, BLOCK_SIZE - 3, KV_HEADS, HEAD_DIM))
    assert cache[[0, 1, 3]].isnan().all()


def test_a_plain_causal_mask_is_none() -> None:
    assert causal_mask(0, 5, None, CPU) is None
    assert causal_mask(0, 5, 5, CPU) is None
    assert causal_mask(0, 5, 4, CPU) is not None


@pytest.mark.parametrize("asked", [{"s_aux": torch.zeros(6)}, {"position_bias": torch.zeros(1)}, {"dropout": 0.1}])
def test_what_is_not_computed_is_refused(asked: dict[str, object]) -> None:
    module = nn.Module()
    module.layer_idx = 0
    step = PagedAttention(poisoned_cache(2), [KVRow(0, 0, 1, [0])])
    q, k = torch.randn(1, HEADS, 1, HEAD_DIM), torch.randn(1, KV_HEADS, 1, HEAD_DIM)
    with pytest.raises(UnsupportedAttention):
        paged_attention(module, q, k, k, None, paged=step, **asked)
    assert paged_attention(module, q, k, k, None, paged=step, position_ids=torch.zeros(1))[0].shape == (1, 1, 6, 8)
