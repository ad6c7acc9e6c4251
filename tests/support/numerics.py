"""Tolerances that follow from the dtype: never a number set by eye."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_as_exact_as_torch(got: Tensor, exact: Tensor, same_dtype: Tensor) -> None:
    """Fail unless ``got`` is at most twice as far from ``exact`` as torch doing the same maths in got's dtype.

    Compares the largest and the root-mean-square error, with a floor of one rounding of the result, and requires NaN
    and Inf at the same positions. Prints the worst element.
    """
    assert got.shape == exact.shape
    assert torch.equal(torch.isfinite(got), torch.isfinite(exact)), "NaN or Inf at other positions"
    error = (got.double() - exact.double()).abs()
    allowed = (same_dtype.double() - exact.double()).abs()
    rounding = torch.finfo(got.dtype).eps / 2 * exact.abs().max().double()
    worst = int(error.argmax())
    where = f"worst at {[int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape)]}: "
    where += f"got {float(got.flatten()[worst])}, want {float(exact.flatten()[worst])}"
    assert error.max() <= 2 * max(allowed.max(), rounding), f"{where} (allowed error {float(allowed.max())})"
    rms, allowed_rms = error.square().mean().sqrt(), allowed.square().mean().sqrt()
    assert rms <= 2 * max(allowed_rms, rounding / 4), f"rms error {float(rms)} > 2 × {float(allowed_rms)}; {where}"


def relative_error(got: Tensor, exact: Tensor) -> float:
    """|got − exact| / |exact|, over all elements."""
    return float((got - exact).norm() / exact.norm())
