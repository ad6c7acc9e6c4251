"""``rotary_append`` on a CPU: what the binding does, for tensors that lie there."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

ROTARY_KERNELS = Path(__file__).with_name("rotary.cpp")
_POINTERS = ("qkv", "cos", "sin", "query", "keys", "values", "soon", "kv_slots")
_STRIDES = ("soon_bytes", "qkv_stride", "cos_stride", "sin_stride", "block_stride", "token_stride")
_SIZES = ("num_rows", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size")


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int) for name in _SIZES),
    )


def emulated_rotary_append(
    library: Path,
    query: Tensor,
    cache: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_slots: Tensor,
    layer: int,
    soon: Tensor | None = None,
) -> None:
    """As ``ops.rotary_append``. Raises RuntimeError if the launch fails, or a thread does not wait exactly once."""
    params = _Params(
        *(tensor.data_ptr() for tensor in (qkv, cos, sin, query)),
        cache[0, layer, 0].data_ptr(),
        cache[0, layer, 1].data_ptr(),
        None if soon is None else soon.data_ptr(),
        kv_slots.data_ptr(),
        0 if soon is None else soon.nbytes,
        *(tensor.stride(0) for tensor in (qkv, cos, sin, cache)),
        cache.stride(3),
        *query.shape[:2],
        *cache.shape[4:],
        cos.size(1),
        cache.size(3),
    )
    error = ctypes.CDLL(str(library)).rotary_append(int(cache.dtype == torch.bfloat16), ctypes.byref(params))
    if error:
        raise RuntimeError(f"launch failed with CUDA error {error}")


def sum_of_prefetched_bytes(library: Path) -> int:
    """Of all launches of the library so far, each byte counted as often as it was asked for."""
    function = ctypes.CDLL(str(library)).prefetched
    function.restype = ctypes.c_int64
    return int(function())
