"""Steps over the tier: what the ops compute from arena and tables is what the adapters say, while others come."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from punica_core.lora.linear import linear
from punica_core.lora.table_step import TableLoRA
from tests.support.memory_adapters import (
    GROUPS,
    MemoryAdapters,
    arena_elements,
    granted,
    make_weights,
)
from tests.tiers.conftest import MakeTier

NUM_ROWS = 7


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        from punica_core.ops import cuda

        cuda.load()
    return str(request.param)


def test_every_step_adds_what_its_adapters_say(make_tier: MakeTier, adapters: MemoryAdapters, device: str) -> None:
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    ranks = (1, 4, 5, 8, 16)
    weights = [
        make_weights(f"key {i}", rank, seed=i, extras=i % 2 == 0, dtype=dtype) for i, rank in enumerate(ranks * 2)
    ]
    refs = [adapters.add(f"a{i}", adapter) for i, adapter in enumerate(weights)]
    tier = make_tier(3 * arena_elements(weights[-1]), dtype=dtype, host_bytes=1 << 24)
    lora = TableLoRA(tier.tables, tier.arena, max_rows=NUM_ROWS, max_rank=256, beside=True)
    generator = torch.Generator().manual_seed(0)
    for turn in range(12):
        used = [refs[turn % len(refs)], refs[(turn * 3 + 1) % len(refs)]]
        slots = [granted(tier, ref).slot for ref in used]
        row_slots = np.array([slots[0]] * 3 + [slots[1]] * 3 + [-1], np.int32)
        lora.begin(row_slots)
        first = 0
        for group in GROUPS:
            table = tier.tables.group(first, len(group.paths))
            first += len(group.paths)
            x = torch.randn(NUM_ROWS, group.in_features, generator=generator).to(dtype)
            weight = torch.randn(sum(group.out_features), group.in_features, generator=generator).to(dtype)
            rows, weight = x.to(device), weight.to(device)
            out = lora.product(table, group.out_features, rows, weight, None)
            y = linear(rows, weight, None).cpu()
            expected = y.double()
            for rows, ref in ((slice(0, 3), used[0]), (slice(3, 6), used[1])):
                start = 0
                for path, width in zip(group.paths, group.out_features, strict=True):
                    module = adapters.weights(ref).modules[path]
                    part = expected[rows, start : start + width]
                    part += module.scale * (x[rows].double() @ module.a.double().T @ module.b.double().T)
                    if module.row_gain is not None:
                        part *= module.row_gain.double()
                    if module.bias is not None:
                        part += module.bias.double()
                    start += width
            scale = float(expected.abs().max())
            torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=tolerance * scale)
            assert torch.equal(out[6].cpu(), y[6]), "a row without adapter"
            assert not torch.equal(out[:6].cpu(), y[:6])
        for ref in used:
            tier.release(ref)
    assert tier.stats().evictions > 5
