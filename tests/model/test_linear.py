"""The dense product: whichever operand is the left one, it is the same product."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from punica_core.lora import linear as module
from punica_core.lora.linear import FEW_ROWS, left_linear, linear, prefers_left_weight


@pytest.fixture
def calls_of_the_left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the products that had the weight on the left."""
    calls: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(x.numel() // x.size(-1))
        return left_linear(x, weight, bias)

    monkeypatch.setattr(module, "left_linear", counted)
    return calls


@pytest.mark.parametrize("shape", [(1, 24), (2, 24), (1, 3, 24), (FEW_ROWS, 24), (FEW_ROWS + 1, 24), (0, 24)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_both_ways_give_the_product(
    shape: tuple[int, ...],
    with_bias: bool,
    left: bool,
    calls_of_the_left: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "prefers_left_weight", lambda: left)
    torch.manual_seed(3)
    x, weight = torch.randn(shape), torch.randn(40, 24)
    bias = torch.randn(40) if with_bias else None
    y = linear(x, weight, bias)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert y.is_contiguous()
    rows = x.numel() // 24
    assert calls_of_the_left == ([rows] if left and 0 < rows <= FEW_ROWS else [])


@pytest.mark.parametrize(("vendor", "left"), [("GenuineIntel", False), ("AuthenticAMD", True)])
def test_the_processor_decides(vendor: str, left: bool, tmp_path: Path) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    assert prefers_left_weight(cpu_info) == (left and torch.backends.mkl.is_available())


def test_an_unknown_processor_gets_torchs_own_way(tmp_path: Path) -> None:
    assert not prefers_left_weight(tmp_path / "absent")
