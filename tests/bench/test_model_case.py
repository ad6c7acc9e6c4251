"""The whole-model case of the kernel benchmark, small and on the CPU: where adapters lie changes no result."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from punica_core.bench.lora_cases import Group, Step
from punica_core.bench.model_case import EngineMemory, ModelCase

GROUPS = (Group("qkv", 64, (32, 16, 16)), Group("down", 48, (64,)))
STEP = Step((2, 1, 3), (16, 4, 8))
MEMORIES = [EngineMemory(*flags) for flags in itertools.product((True, False), repeat=2)]


def case_of(memory: EngineMemory | None, step: Step = STEP) -> ModelCase:
    torch.manual_seed(0)
    return ModelCase(step, num_layers=2, groups=GROUPS, dtype=torch.float32, device="cpu", memory=memory)


def added(case: ModelCase) -> list[Tensor]:
    case.base()
    base = [y.clone() for y in case.y]
    case.chained()
    return [y - before for y, before in zip(case.y, base, strict=True)]


@pytest.mark.parametrize("order", ["chained", "early", "beside"])
@pytest.mark.parametrize("memory", [None, *MEMORIES], ids=str)
def test_every_order_of_the_kernels_computes_the_same(memory: EngineMemory | None, order: str) -> None:
    case = case_of(memory)
    want = added(case)
    assert all(bool((rows != 0).any(-1).all()) for rows in want)
    case.base()
    base = [y.clone() for y in case.y]
    getattr(case, order)()
    for y, before, expected in zip(case.y, base, want, strict=True):
        torch.testing.assert_close(y - before, expected)


def test_where_records_and_rows_lie_changes_nothing_and_another_adapter_does() -> None:
    first, *others = (added(case_of(memory)) for memory in MEMORIES)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            torch.testing.assert_close(mine, theirs)
    swapped = added(case_of(EngineMemory(), Step(STEP.counts, STEP.ranks[::-1])))
    assert not any(torch.allclose(mine, theirs) for mine, theirs in zip(first, swapped, strict=True))


def test_the_layouts_are_what_they_are_called() -> None:
    by_slot, by_module = (case_of(EngineMemory(by_slot=flag)).tables[0][0] for flag in (True, False))
    assert by_slot.stride(0) < by_slot.stride(1)
    assert by_module.stride(0) > by_module.stride(1)
    assert by_slot.shape == by_module.shape
