"""Keys and values land where kv_slots says, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from punica_core import ops

BLOCKS, LAYERS, BLOCK_SIZE = 6, 3, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def append(
    device: str, dtype: torch.dtype, heads: int = 2, head_dim: int = 64, layer: int = 1
) -> tuple[torch.Tensor, ...]:
    """(cache, key, value, kv_slots) after an append; keys are strided as slices of a fused projection are."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.full((BLOCKS, LAYERS, 2, BLOCK_SIZE, heads, head_dim), torch.nan, dtype=dtype, device=device)
    kv_slots = torch.tensor([17, 0, -1, 95, 33, -1, 16], dtype=torch.int32, device=device)
    fused = torch.randn(len(kv_slots), 3 * heads * head_dim, generator=generator).to(device, dtype)
    key, value = (fused[:, i * heads * head_dim :][:, : heads * head_dim].unflatten(-1, (heads, -1)) for i in (1, 2))
    ops.kv_append(cache, key, value, kv_slots, layer)
    return cache, key, value, kv_slots


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (2, 128), (8, 256), (3, 8)])
def test_each_row_lands_in_its_slot_and_nothing_else_changes(
    device: str, dtype: torch.dtype, heads: int, head_dim: int
) -> None:
    cache, key, value, kv_slots = append(device, dtype, heads, head_dim)
    for row, slot in enumerate(kv_slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, BLOCK_SIZE)
            assert torch.equal(cache[block, 1, 0, offset], key[row])
            assert torch.equal(cache[block, 1, 1, offset], value[row])
            cache[block, 1, :, offset] = torch.nan
    assert bool(cache.isnan().all())


def test_other_shapes_are_refused() -> None:
    cache, key, value, kv_slots = append("cpu", torch.float32)
    with pytest.raises(RuntimeError, match="layer is 3"):
        ops.kv_append(cache, key, value, kv_slots, 3)
    with pytest.raises(RuntimeError, match=r"value must be \[T, K, D\]"):
        ops.kv_append(cache, key, value[:, :1], kv_slots, 0)
    with pytest.raises(RuntimeError, match="int32"):
        ops.kv_append(cache, key, value, kv_slots.long(), 0)


def test_opcheck() -> None:
    cache, key, value, kv_slots = append("cpu", torch.float32)
    torch.library.opcheck(torch.ops.punica.kv_append.default, (cache.nan_to_num(), key, value, kv_slots, 0))
