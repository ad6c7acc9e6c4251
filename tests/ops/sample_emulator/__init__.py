"""The sampling kernels on a CPU: compiled against ``punica/cluster.cuh`` and ``punica/tile.cuh`` of this directory."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

KERNELS = Path(__file__).with_name("kernels.cpp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Params(ctypes.Structure):
    """``SampleParams`` of csrc/include/punica/sample_params.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int),
        ("vocab_size", ctypes.c_int),
    )


class EmulatedKernels:
    """The sampling ops of tensors on the CPU, computed by the kernels of ``library``."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def sample(
        self, logits: Tensor, rows: Tensor | None, *, cached: bool, num_blocks: int, seed: int
    ) -> tuple[list[int], list[bool]]:
        """(token_ids, finite). rows None: greedy_tokens. num_blocks: of a cluster. seed: of the threads' order.

        Raises RuntimeError if threads wait for each other for ever.
        """
        token_ids = torch.full((len(logits),), -7)
        finite = torch.zeros(len(logits), dtype=torch.bool)
        params = _Params(
            logits.data_ptr(),
            None if rows is None else rows.data_ptr(),
            token_ids.data_ptr(),
            finite.data_ptr(),
            logits.stride(0),
            len(logits),
            logits.size(1),
        )
        dtype = DTYPES.index(logits.dtype)
        if self._library.sample(dtype, ctypes.byref(params), int(cached), num_blocks, ctypes.c_uint(seed)):
            raise RuntimeError("the threads of a cluster wait for each other for ever")
        return token_ids.tolist(), finite.tolist()

    def weights(self, scores: Tensor, temperature: float) -> Tensor:
        """int64 [V] of scores fp32 [V]; see `draw.fixed_point_weights`."""
        largest = max(float(scores.max()), torch.finfo(torch.float32).min)
        out = torch.empty(len(scores), dtype=torch.int64)
        self._library.weights(
            ctypes.c_void_p(scores.data_ptr()),
            len(scores),
            ctypes.c_float(largest),
            ctypes.c_float(temperature),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out
