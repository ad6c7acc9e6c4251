"""The dense product of a linear layer, as fast as torch's public calls make it for the rows of a decode step."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

FEW_ROWS = 64
"""Up to so many rows it matters for some which operand is the left one."""

LEFT_ROWS = 5
"""Of these, up to so many are multiplied with the weight on the left; more by oneDNN, which takes 0.75 to 0.9 times as
long on an AMD EPYC (half as long at 12 rows)."""

ONEDNN_ROWS = (8, 12, 16, 24, 32, 48, FEW_ROWS)

READ_TOGETHER = 32
"""Elements of a bfloat16 row that a CPU with AMX multiplies at once."""

CPU_INFO = Path("/proc/cpuinfo")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · Wᵀ + b. x: [..., I]; weight: [O, I]; bias: [O] or None → [..., O], contiguous."""
    rows = x.numel() // x.size(-1)
    plain = x.is_cuda or torch.compiler.is_compiling()  # first: what asks the processor is not to be compiled
    if plain or not 0 < rows <= FEW_ROWS or not prefers_left_weight():
        return functional.linear(spaced(x), weight, bias)
    if rows <= LEFT_ROWS or torch.is_grad_enabled() or not x.dtype == weight.dtype == torch.float32:
        return left_linear(x, weight, bias)
    return onednn_linear(x, weight, bias) if has_onednn() else left_linear(x, weight, bias)


def spaced(x: Tensor) -> Tensor:
    """x [..., I] as the left operand of a product: where torch would read beyond rows, a copy with zeros behind each.

    In bfloat16 with AMX it multiplies whole numbers of READ_TOGETHER elements (torch 2.13), of what follows a row as
    well, and that by zero: NaN and Inf of the next row, which may be another request's, would make this one NaN.
    """
    if not x.is_cpu or x.dtype != torch.bfloat16 or not is_read_beyond(x.size(-1)):
        return x
    return functional.pad(x, (0, -x.size(-1) % READ_TOGETHER))[..., : x.size(-1)]


def is_read_beyond(width: int) -> bool:
    """Whether rows of so many bfloat16 elements are read beyond their ends. Short ones of an even length are not."""
    return width % READ_TOGETHER != 0 and (width > READ_TOGETHER or width % 2 != 0)


def left_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` as W · xᵀ, for at least one row. One row is computed as two equal ones: a product with two columns
    reads the weight faster than a matrix-vector product (1.1 to 1.5 times on an AMD EPYC)."""
    rows = x.numel() // x.size(-1)
    few = x.view(rows, -1)
    if rows == 1:
        y = torch.mm(weight, torch.cat((few, few)).t()).select(1, 0).contiguous()
    else:
        y = torch.mm(weight, few.t()).t().contiguous()
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], weight.size(0))


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` by oneDNN, for fp32 and at most FEW_ROWS rows; has no gradient.

    Rows are filled up to one of a few numbers, since oneDNN compiles code for each (2 ms for a decoder's shapes, and
    2.5 MB that it keeps).
    """
    rows = x.numel() // x.size(-1)
    few = x.reshape(rows, -1)
    filled = next(size for size in ONEDNN_ROWS if size >= rows)
    if filled > rows:
        few = functional.pad(few, (0, 0, 0, filled - rows))
    y: Tensor = torch.ops.mkldnn._linear_pointwise(few, weight, bias, "none", [], "")[:rows]
    return y.view(*x.shape[:-1], weight.size(0))


@functools.cache
def has_onednn() -> bool:
    """Whether this torch has the operator, which is not part of its public interface, and it does what it should."""
    x, weight, bias = torch.ones(8, 3), torch.arange(6.0).view(2, 3), torch.tensor([1.0, 2.0])
    try:
        with torch.inference_mode():
            return bool(torch.equal(onednn_linear(x, weight, bias), functional.linear(x, weight, bias)))
    except (AttributeError, RuntimeError, TypeError):
        return False


@functools.cache
def prefers_left_weight(cpu_info: Path = CPU_INFO) -> bool:
    """Whether this machine multiplies a few rows faster with the weight as the left operand.

    MKL does on processors that are not Intel's: 1.1 to 2.5 times on an AMD EPYC. On a Xeon with AVX-512 `F.linear` is
    as fast or faster at any number of rows, 2.2 times at one to three (both measured with MKL 2024.2).
    """
    try:
        is_intel = "GenuineIntel" in cpu_info.read_text()
    except OSError:
        return False  # not Linux
    return torch.backends.mkl.is_available() and not is_intel
