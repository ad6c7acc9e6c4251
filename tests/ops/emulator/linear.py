"""``linear_few`` on a CPU: what the binding does, for tensors that lie there."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

LINEAR_KERNELS = Path(__file__).with_name("linear.cpp")


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "y_stride")),
        *((name, ctypes.c_int) for name in ("num_rows", "in_features", "out_features")),
    )


def emulated_linear_few(
    library: Path, num_sms: int, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> None:
    """As ``ops.linear_few``. Raises RuntimeError if the launch fails, or a thread does not wait exactly once."""
    params = _Params(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.stride(0),
        y.stride(0),
        len(x),
        x.size(1),
        y.size(1),
    )
    function = ctypes.CDLL(str(library)).linear_few
    error = function(int(y.dtype == torch.bfloat16), ctypes.byref(params), num_sms)
    if error:
        raise RuntimeError(f"launch failed with CUDA error {error}")
