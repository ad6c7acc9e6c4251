"""``decode_attention`` on a CPU: what the binding does, for tensors that lie there."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

DECODE_KERNELS = Path(__file__).with_name("decode.cpp")
_POINTERS = ("query", "out", "keys", "values", "kv_indptr", "kv_indices", "last_block_len")
_SIZES = ("token_stride", "num_seqs", "num_heads", "num_kv_heads", "head_dim", "window")


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("block_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


def emulated_decode_attention(
    library: Path,
    num_sms: int,
    out: Tensor,
    query: Tensor,
    cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_block_len: Tensor,
    layer: int,
    scaling: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """As ``ops.decode_attention``. Raises RuntimeError if the launch fails, or a thread does not wait exactly once."""
    params = _Params(
        query.data_ptr(),
        out.data_ptr(),
        cache[0, layer, 0].data_ptr(),
        cache[0, layer, 1].data_ptr(),
        *(table.data_ptr() for table in (kv_indptr, kv_indices, last_block_len)),
        cache.stride(0),
        cache.stride(3),
        *query.shape[:2],
        *cache.shape[4:],
        window,
        scaling,
        softcap,
    )
    function = ctypes.CDLL(str(library)).decode_attention
    error = function(int(cache.dtype == torch.bfloat16), ctypes.byref(params), num_sms)
    if error:
        raise RuntimeError(f"launch failed with CUDA error {error}")
