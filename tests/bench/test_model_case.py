"""The whole-model case of the kernel benchmark, small and on the CPU: where adapters lie changes no result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from punica_core import ops
from punica_core.bench.lora_cases import Group, Step
from punica_core.bench.model_case import EngineMemory, ModelCase, WrongResult

GROUPS = (Group("qkv", 64, (32, 16, 16)), Group("down", 48, (64,)))
STEP = Step((2, 1, 3), (16, 4, 8))
MEMORIES = [EngineMemory(*flags) for flags in itertools.product((True, False), repeat=2)]


def case_of(memory: EngineMemory | None, step: Step = STEP, dtype: torch.dtype = torch.float32) -> ModelCase:
    torch.manual_seed(0)
    return ModelCase(step, num_layers=2, groups=GROUPS, dtype=dtype, device="cpu", memory=memory)


def added(case: ModelCase) -> list[Tensor]:
    case.base()
    base = [y.clone() for y in case.y]
    case.chained()
    return [y - before for y, before in zip(case.y, base, strict=True)]


@pytest.mark.parametrize("order", ["chained", "early", "beside", "ahead"])
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


@pytest.mark.parametrize("order", ["ahead", "inside"])
@pytest.mark.parametrize("memory", [None, EngineMemory()], ids=str)
def test_some_orders_round_in_other_places_and_no_more(memory: EngineMemory | None, order: str) -> None:
    case = case_of(memory, dtype=torch.bfloat16)
    arena = case.arena.clone()
    case.check(getattr(case, order))
    assert torch.equal(case.arena, arena), "what is timed has the usual weights"


def expands_nothing(y: Tensor, *arguments: Any, **options: Any) -> None:
    if not options["overwrite"]:
        torch.ops.punica.lora_expand(y, *arguments, **options)
    else:
        y.zero_()


def expands_one_row_less(y: Tensor, *arguments: Any, **options: Any) -> None:
    torch.ops.punica.lora_expand(y, *arguments, **options)
    if options["overwrite"]:
        y[-1] = 0


def adds_nothing(y: Tensor, x: Tensor, weight: Tensor) -> None:
    pass


def multiplies_only(y: Tensor, v: Tensor, x: Tensor, weight: Tensor, *arguments: Any) -> None:
    torch.mm(x, weight.t(), out=y)


@pytest.mark.parametrize(
    ("order", "op", "wrong"),
    [
        ("ahead", "lora_expand", expands_nothing),
        ("ahead", "lora_expand", expands_one_row_less),
        ("ahead", "add_product", adds_nothing),
        ("inside", "lora_linear", multiplies_only),
    ],
)
def test_a_wrong_order_is_found(
    monkeypatch: pytest.MonkeyPatch, order: str, op: str, wrong: Callable[..., None]
) -> None:
    case = case_of(None, dtype=torch.bfloat16)
    monkeypatch.setattr(ops, op, wrong)
    with pytest.raises(WrongResult, match="not what chained gives"):
        case.check(getattr(case, order))


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
