"""What is timed beside the LoRA ops computes the same, on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from punica_core.bench import competitors, lora_cases
from punica_core.bench.lora_cases import Group, GroupCase, Step

ONE, FUSED = Group("one", 24, (40,)), Group("fused", 24, (40, 16, 8))
STEPS = {
    "distinct": Step((1,) * 5, (16,) * 5),
    "identical": Step((6,), (8,)),
    "mixed": Step((3, 1, 2), (4, 16, 9)),
}


@pytest.fixture(autouse=True)
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lora_cases, competitors):
        monkeypatch.setattr(module, "COLD_BYTES", 64 << 10)


def added(case: GroupCase, call: object, index: int) -> Tensor:
    """What a call adds to y."""
    case.y.zero_()
    call(index)
    return case.y.clone()


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("group", [ONE, FUSED], ids=lambda group: group.name)
def test_competitors_compute_what_the_ops_do(group: Group, step: Step) -> None:
    torch.manual_seed(0)
    case = GroupCase(group, step, torch.float32, "cpu")
    others = competitors.Competitors(case)
    expected = [added(case, case, index) for index in (0, 1)]
    assert not torch.allclose(expected[0], expected[1], rtol=1e-4, atol=1e-7), "sets of adapters must differ"
    for call in (others.loop, others.gather_bmm):
        for index in (0, 1):
            torch.testing.assert_close(added(case, call, index), expected[index], rtol=1e-4, atol=1e-7)


def test_wrong_adapters_give_another_result() -> None:
    torch.manual_seed(0)
    case = GroupCase(FUSED, STEPS["mixed"], torch.float32, "cpu")
    others = competitors.Competitors(case)
    expected = added(case, case, 0)
    others._row_slot = others._row_slot.roll(1)
    assert not torch.allclose(added(case, others.gather_bmm, 0), expected, rtol=1e-4, atol=1e-7)
