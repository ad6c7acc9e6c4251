"""The kernel of a fused linear layer on a CPU: compiled against ``punica/hopper.cuh`` and others of this directory."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from punica_core.ops.layout import NUM_COUNTERS
from punica_core.ops.linear import LinearTile
from tests.ops.emulator import MAX_SLICES, _Scratch, _ShrinkParams, _tables
from tests.support.lora_batch import LoraBatch

KERNELS = Path(__file__).with_name("kernels.cpp")
MUCH_ROOM = 1 << 20
_MAP_WORDS = 16
"""Of what the driver makes of a matrix, 128 bytes on 64."""


class _Map(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("box_rows", ctypes.c_int64),
    )

    @classmethod
    def of(cls, matrix: Tensor) -> _Map:
        return cls(matrix.data_ptr(), matrix.size(1), matrix.size(0), matrix.stride(0))


class _LinearParams(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_uint64 * _MAP_WORDS),
        ("x", ctypes.c_uint64 * _MAP_WORDS),
        ("shrink", _ShrinkParams),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("tile", ctypes.c_int * len(LinearTile._fields)),
        ("stages", ctypes.c_int),
        ("num_rows", ctypes.c_int),
        ("out_features", ctypes.c_int),
        ("num_steps", ctypes.c_int),
        ("widths", ctypes.c_int * MAX_SLICES),
        ("columns", ctypes.c_int * MAX_SLICES),
        ("padding", ctypes.c_int * 16),
    )


class KernelFailed(RuntimeError):
    """A thread did what it must not, or they wait for each other for ever."""


class NoRoom(RuntimeError):
    """The kernel was not started, as its blocks would wait for others that cannot begin."""


class EmulatedLinear:
    """``ops.lora_linear`` of a batch whose tensors lie on the CPU, by its kernel.

    Raises KernelFailed for what cannot be seen in the result, ValueError if the tile does not fit.

    Raises NoRoom if not all blocks can run at once.

    Args:
        library: what `tests.support.emulation` made of KERNELS.
        room: blocks that the pretended GPU runs at once. device: its number; a GPU is asked once.
    """

    def __init__(self, library: Path, *, room: int = MUCH_ROOM, device: int = 0) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.linear_failure.restype = ctypes.c_char_p
        self._pretended = (room, device)

    def __call__(
        self, batch: LoraBatch, weight: Tensor, bias: Tensor | None, y: Tensor, tile: LinearTile, *, seed: int = 0
    ) -> None:
        if len(batch.x) > tile.rows:
            raise ValueError(f"no such tile for {len(batch.x)} rows: {tile}")
        batch.v.fill_(torch.nan)
        rows, plan = len(batch.x), batch.plan.plan
        split = rows * len(batch.out_features) * batch.max_rank
        first_part = split // 2
        counters = plan[len(plan) - NUM_COUNTERS :]
        scratch = _Scratch(
            batch.v.data_ptr(),
            batch.v[first_part:].data_ptr(),
            counters.data_ptr(),
            rows,
            (batch.v.numel() - first_part) // split,
            0,
            batch.max_rank,
            True,
        )
        # The parameters begin on 64 bytes.
        memory = ctypes.create_string_buffer(ctypes.sizeof(_LinearParams) + 64)
        params = _LinearParams.from_buffer(memory, -ctypes.addressof(memory) % 64)
        params.shrink = _ShrinkParams(_tables(batch), scratch, batch.x.data_ptr(), batch.x.stride(0), batch.x.size(1))
        params.bias = None if bias is None else bias.data_ptr()
        params.y, params.y_stride = y.data_ptr(), y.stride(0)
        params.tile[:] = tile
        params.num_rows, params.out_features = rows, y.size(1)
        column = 0
        for index, width in enumerate(batch.out_features):
            params.widths[index], params.columns[index] = width, column
            column += width
        maps = (ctypes.byref(_Map.of(weight)), ctypes.byref(_Map.of(batch.x)))
        is_bf16 = int(y.dtype == torch.bfloat16)
        self._library.set_linear_room(*self._pretended)
        outcome = self._library.linear(is_bf16, ctypes.byref(params), *maps, batch.max_rank, ctypes.c_uint(seed))
        if outcome == 1:
            raise ValueError(f"no such tile: {tile}")
        if outcome == 3:
            raise NoRoom(f"{params.shrink.scratch.num_blocks} blocks, room for {self._pretended[0]}")
        if outcome:
            raise KernelFailed(self._library.linear_failure().decode())
        if counters.any():
            raise KernelFailed("counters are not zero behind the kernel")
