"""The CUDA kernels on a CPU: compiled against ``punica/primitives.cuh`` of this directory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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
        ("max_rank", ctypes.c_int),
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


class _EmbedParams(ctypes.Structure):
    _fields_ = (
        ("tables", _Tables),
        ("scratch", _Scratch),
        ("token_ids", ctypes.c_void_p),
        ("ids_are_64_bit", ctypes.c_bool),
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
    """shrink, embed and expand of a batch whose tensors lie on the CPU. Raise RuntimeError if a launch fails.

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
        """As ``LoraBatch.apply``, with kernels in the place of the ops."""
        places = (_tables(batch), self._scratch(batch, summed=summed or overwrite))
        shrink = _ShrinkParams(*places, batch.x.data_ptr(), batch.x.stride(0), batch.x.size(1))
        self._run(self._library.shrink, batch, shrink)
        return self._expand(batch, places, batch.y.clone() if y is None else y, batch.x.size(1), overwrite=overwrite)

    def embed(self, batch: LoraBatch, token_ids: Tensor) -> Tensor:
        """A copy of y with what the adapters add to the embeddings of `token_ids`, int32 or int64 [T]."""
        places = (_tables(batch), self._scratch(batch, summed=True))
        embed = _EmbedParams(*places, token_ids.data_ptr(), token_ids.dtype == torch.int64)
        self._run(self._library.embed, batch, embed)
        return self._expand(batch, places, batch.y.clone(), 1)

    def _scratch(self, batch: LoraBatch, *, summed: bool) -> _Scratch:
        batch.v.fill_(torch.nan)
        rows, plan = len(batch.x), batch.plan.plan
        split = rows * len(batch.out_features) * batch.max_rank
        first_part = split // 2 if summed else 0
        splits = (batch.v.numel() - first_part) // split
        num_blocks = self._num_sms * (1 if rows <= 16 else 2)
        counters = plan[len(plan) - NUM_COUNTERS :].data_ptr()
        parts = batch.v[first_part:].data_ptr()
        return _Scratch(batch.v.data_ptr(), parts, counters, rows, splits, num_blocks, batch.max_rank, summed)

    def _expand(
        self,
        batch: LoraBatch,
        places: tuple[_Tables, _Scratch],
        y: Tensor,
        in_features: int,
        *,
        overwrite: bool = False,
    ) -> Tensor:
        expand = _ExpandParams(*places, y.data_ptr(), y.stride(0), in_features)
        expand.overwrite = overwrite
        column = units = 0
        for index, width in enumerate(batch.out_features):
            units += -(-width // 64)
            expand.widths[index], expand.columns[index], expand.unit_end[index] = width, column, units
            column += width
        self._run(self._library.expand, batch, expand)
        return y

    def _run(self, launch: Callable[..., int], batch: LoraBatch, params: ctypes.Structure) -> None:
        error = launch(int(batch.y.dtype == torch.bfloat16), ctypes.byref(params), self._num_sms)
        if error:
            raise RuntimeError(f"launch failed with CUDA error {error}")


def _tables(batch: LoraBatch) -> _Tables:
    return _Tables(
        batch.arena.buffer.data_ptr(),
        batch.table.data_ptr(),
        batch.plan.plan.data_ptr(),
        len(batch.out_features),
        batch.table.stride(0) // RECORD_WORDS,
        batch.table.stride(1) // RECORD_WORDS,
    )
