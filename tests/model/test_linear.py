"""The dense product: whichever operand is the left one, it is the same product."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from punica_core.lora import linear as module
from punica_core.lora.linear import (
    FEW_ROWS,
    LEFT_ROWS,
    has_onednn,
    left_linear,
    linear,
    onednn_linear,
    prefers_left_weight,
)

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The special ways in which products were computed, and their rows."""
    calls: list[tuple[str, int]] = []
    has_onednn()  # asks once, and is not to be noted

    def noted(name: str, way: Way) -> Way:
        def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            calls.append((name, x.numel() // x.size(-1)))
            return way(x, weight, bias)

        return counted

    monkeypatch.setattr(module, "left_linear", noted("left", left_linear))
    monkeypatch.setattr(module, "onednn_linear", noted("onednn", onednn_linear))
    return calls


def check_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    y = linear(x, weight, bias)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert y.is_contiguous()


MORE = LEFT_ROWS + 1


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ((1, 24), "left"),
        ((2, 24), "left"),
        ((1, 3, 24), "left"),
        ((LEFT_ROWS, 24), "left"),
        ((MORE, 24), "onednn"),
        ((1, MORE, 24), "onednn"),
        ((12, 24), "onednn"),
        ((13, 24), "onednn"),
        ((FEW_ROWS, 24), "onednn"),
        ((FEW_ROWS + 1, 24), ""),
        ((0, 24), ""),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("special", [False, True])
def test_all_ways_give_the_product(
    shape: tuple[int, ...],
    way: str,
    with_bias: bool,
    special: bool,
    ways: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "prefers_left_weight", lambda: special)
    torch.manual_seed(3)
    x, weight = torch.randn(shape), torch.randn(40, 24)
    with torch.inference_mode():
        check_product(x, weight, torch.randn(40) if with_bias else None)
    if not has_onednn():
        way = way.replace("onednn", "left")
    assert ways == ([(way, x.numel() // 24)] if way and special else [])


def test_this_torch_has_the_operator_of_onednn() -> None:
    assert has_onednn() == torch.backends.mkldnn.is_available()


def test_without_the_operator_the_weight_is_on_the_left(
    ways: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*arguments: object) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(module, "prefers_left_weight", lambda: True)
    monkeypatch.setattr(module, "onednn_linear", absent)
    has_onednn.cache_clear()
    with torch.inference_mode():
        check_product(torch.ones(MORE, 4), torch.ones(5, 4), None)
    has_onednn.cache_clear()
    assert ways == [("left", MORE)]


@pytest.mark.parametrize("rows", [1, MORE])
def test_gradients_flow(rows: int, ways: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prefers_left_weight", lambda: True)
    x = torch.ones(rows, 4, requires_grad=True)
    linear(x, torch.full((5, 4), 2.0), None).sum().backward()
    assert torch.equal(x.grad, torch.full((rows, 4), 10.0))
    assert ways == [("left", rows)]


def test_other_numbers_than_fp32_are_left_to_torch(
    ways: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "prefers_left_weight", lambda: True)
    with torch.inference_mode():
        check_product(torch.ones(MORE, 4).double(), torch.ones(5, 4).double(), None)
    assert ways == [("left", MORE)]


@pytest.mark.parametrize(("vendor", "left"), [("GenuineIntel", False), ("AuthenticAMD", True)])
def test_the_processor_decides(vendor: str, left: bool, tmp_path: Path) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    assert prefers_left_weight(cpu_info) == (left and torch.backends.mkl.is_available())


def test_an_unknown_processor_gets_torchs_own_way(tmp_path: Path) -> None:
    assert not prefers_left_weight(tmp_path / "absent")
