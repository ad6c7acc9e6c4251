"""Adapters of each linear alone and of all, each of every lora_rank, side by side in 16 bits: at most twice as far from
PEFT in fp32 as PEFT in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from punica_core.engine.graphs import GraphSizes
from punica_core.lora.table_step import MAX_INSIDE_RANK, LoRAOrder
from punica_core.ops import cuda
from punica_core.ops.linear import MAX_LINEAR_ROWS
from tests.engine.test_gpu_parity import build
from tests.support.adapter_formats import Case
from tests.support.driven_device_runner import slots_by_order
from tests.support.peft_adapters import ALL_LINEARS
from tests.support.precision import HALF_PRECISION, assert_precise, measure

Place = tuple[str, int]
"""(target, lora_rank)."""

TARGETS = {**{name.removesuffix("_proj"): [name] for name in ALL_LINEARS}, "all": list(ALL_LINEARS)}
MIXED, FULL, LARGEST = (1, 8, 16), 64, 256
"""Lora_ranks that steps have side by side in any order of kernels; the largest inside a product, in steps of few rows
and four adapters; and the largest that is served."""
CASES = {
    (target, rank): Case(f"{target}, {rank}", {"r": rank, "lora_alpha": 2 * rank, "target_modules": modules})
    for target, modules in TARGETS.items()
    for rank in (*MIXED, FULL, LARGEST)
}
GRAPHS = GraphSizes((2, 8, 16), (0, 8, 16), (64, 256), whole_mixed=True, inside_rows=MAX_LINEAR_ROWS)


def batches() -> list[list[Place]]:
    """What is computed together: each target of one of the MIXED lora_ranks, until it had all of them; then the others,
    no more of FULL than is inside."""
    names = list(TARGETS)
    mixed = [[(name, MIXED[(i + k) % len(MIXED)]) for i, name in enumerate(names)] for k in range(len(MIXED))]
    full = [[(name, FULL) for name in part] for part in (names[:4], names[4:])]
    return [*mixed, *full, [(name, LARGEST) for name in names]]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("device", "dtype"), HALF_PRECISION, ids=str)
def test_every_target_of_every_rank_is_as_near_the_reference_as_pefts(
    device: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None would pass for the base or for the next adapter of its step."""
    if device == "cuda":
        cuda.load()
    seen = slots_by_order(monkeypatch)
    found = measure(lambda: build("llama"), CASES, device, dtype, tmp_path, batches=batches(), graphs=GRAPHS)
    inside = {slot for slot, (_, rank) in enumerate(CASES) if rank <= MAX_INSIDE_RANK}
    assert seen[LoRAOrder.INSIDE] == inside
    assert seen[LoRAOrder.BESIDE] >= {*range(len(CASES))} - inside
    print(f"{device}, {dtype}: at most {max(precision.ratio for precision in found.values()):.2f}")
    assert_precise(found)
