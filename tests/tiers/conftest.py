"""A GPU tier over adapters in memory: on the CPU, and the same tests again on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from punica_core.lora.cache import AdapterCache
from punica_core.lora.gpu_tier import GpuAdapterTier
from punica_core.lora.table_modules import TableModules
from tests.support.memory_adapters import GROUPS, NUM_ELEMENTS, SHAPES, MemoryAdapters

MakeTier = Callable[..., GpuAdapterTier]
PLAIN = TableModules(GROUPS)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def adapters() -> MemoryAdapters:
    return MemoryAdapters()


@pytest.fixture
def make_tier(device: str, adapters: MemoryAdapters) -> Iterator[MakeTier]:
    made: list[GpuAdapterTier] = []

    def make(
        num_elements: int = 100 * NUM_ELEMENTS,
        *,
        modules: TableModules = PLAIN,
        dtype: torch.dtype = torch.float32,
        host_bytes: int = 10_000_000,
        **options: Any,
    ) -> GpuAdapterTier:
        host = AdapterCache(SHAPES, dtype, host_bytes, open_adapter=adapters.open)
        budget = num_elements * dtype.itemsize
        options = {"claim_seconds": 0.0, "num_slots": 64, "buffer_bytes": 4096} | options
        made.append(GpuAdapterTier(host, modules, budget, dtype=dtype, device=device, **options))
        return made[-1]

    yield make
    for tier in made:
        tier.close()
