"""The CUDA kernels on a CPU: compiled against ``punica/primitives.cuh`` of this directory."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from punica_core.ops.layout import NUM_COUNTERS, RECORD_WORDS
from tests.support.lora_batch import LoraBatch

MAX_SLICES = 4
KERNELS = Path(__file__).with_name("kernels.cpp")


class _Tables(ctypes.Structure):
    _fields_ = (
        ("arena", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("plan", ctypes.c_void_p),
        ("slices", ctypes.c_int),
        ("slice_stride", ctypes.c_int),
        ("slot_stride", ctypes.c_int),
    )


class _Scratch(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("num_rows", ctypes.c_int),
        ("max_splits", ctypes.c_int),
        ("num_blocks", ctypes.c_int),
        ("summed", ctypes.c_bool),
    )


class _ShrinkParams(ctypes.Structure):
    _fields_ = (
        ("tables", _Tables),
        ("scratch", _Scratch),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("in_features", ctypes.c_int),
        ("beside", ctypes.c_bool),
    )


class _ExpandParams(ctypes.Structure):
    _fields_ = (
        ("tables", _Tables),
        ("scratch", _Scratch),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("in_features", ctypes.c_int),
        ("widths", ctypes.c_int * MAX_SLICES),
        ("columns", ctypes.c_int * MAX_SLICES),
        ("unit_end", ctypes.c_int * MAX_SLICES),
        ("overwrite", ctypes.c_bool),
    )


class EmulatedKernels:
    """shrink and expand of a batch whose tensors lie on the CPU.

    Args:
        library: what `tests.support.emulation` made of KERNELS.
        num_sms: multiprocessors of the pretended GPU: few, as each block is run whether it has work or not.
    """

    def __init__(self, library: Path, *, num_sms: int = 3) -> None:
        self._library = ctypes.CDLL(str(library))
        self._num_sms = num_sms

    def apply(
        self, batch: LoraBatch, y: Tensor | None = None, *, summed: bool = False, overwrite: bool = False
    ) -> Tensor:
        """As ``LoraBatch.apply``, with kernels in the place of the ops. Raises RuntimeError if a launch fails."""
        out = batch.y.clone() if y is None else y
        batch.v.fill_(torch.nan)
        bf16 = int(out.dtype == torch.bfloat16)
        slices = len(batch.out_features)
        rows = len(batch.x)
        plan = batch.plan.plan
        tables = _Tables(
            batch.arena.buffer.data_ptr(),
            batch.table.data_ptr(),
            plan.data_ptr(),
            slices,
            batch.table.stride(0) // RECORD_WORDS,
            batch.table.stride(1) // RECORD_WORDS,
        )
        split = rows * slices * batch.max_rank
        summed = summed or overwrite
        first_part = split // 2 if summed else 0
        splits = (batch.v.numel() - first_part) // split
        num_blocks = self._num_sms * (1 if rows <= 16 else 2)
        parts = batch.v[first_part:].data_ptr()
        counters = plan[len(plan) - NUM_COUNTERS :]
        scratch = _Scratch(batch.v.data_ptr(), parts, counters.data_ptr(), rows, splits, num_blocks, summed)
        shrink = _ShrinkParams(tables, scratch, batch.x.data_ptr(), batch.x.stride(0), batch.x.size(1))
        self._check(self._library.shrink(bf16, ctypes.byref(shrink), self._num_sms))
        expand = _ExpandParams(tables, scratch, out.data_ptr(), out.stride(0), batch.x.size(1))
        expand.overwrite = overwrite
        column = units = 0
        for index, width in enumerate(batch.out_features):
            units += -(-width // 64)
            expand.widths[index], expand.columns[index], expand.unit_end[index] = width, column, units
            column += width
        self._check(self._library.expand(bf16, ctypes.byref(expand), self._num_sms))
        return out

    @staticmethod
    def _check(error: int) -> None:
        if error:
            raise RuntimeError(f"launch failed with CUDA error {error}")
