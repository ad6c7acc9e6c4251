"""How the kernel behind ``lora_linear`` cuts a layer, and what is computed where it does not apply.

The twin of ``csrc/include/punica/linear_params.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from punica_core.ops.checks import check_linear

MAX_LINEAR_ROWS: Final = 128
"""T of the largest step that the kernel takes: its x must fit beside the weights that are on their way."""

FEW_LINEAR_ROWS: Final = 64
FEW_LINEAR_SLICES: Final = 2
"""Layers of more slices are not taken in steps of more rows: their low-rank rows take longer than the weight."""

_STEP_ROWS: Final = (8, 16, 32, 64, 128)
_SHORTEST_ALONE: Final = 128
"""Columns of a block from which on it does not share K with another: with fewer, x moves more bytes than weights."""
_MOST_HEIGHT: Final = 256
_RING_BYTES: Final = {8: 124 << 10, 16: 124 << 10, 32: 136 << 10, 64: 192 << 10, 128: 192 << 10}
"""Bytes on their way that keep memory busy, by rows; more delay what else is read. Measured on an H200."""
_LEAST_LONG_STAGES: Final = {8: 4, 16: 4, 32: 4, 64: 4, 128: 3}
"""Stages of two boxes that a ring needs, by rows; else each has one."""


class LinearTile(NamedTuple):
    """rows: of the step that fit. height: output columns of a cluster. splits: its blocks, which share K. boxes: of 64
    elements of K that a stage holds. stages: on their way at a time, at most."""

    rows: int
    height: int
    splits: int
    boxes: int
    stages: int


def linear_tile(
    num_rows: int, out_features: int, in_features: int, *, slices: int, max_rank: int, num_sms: int
) -> LinearTile | None:
    """How a layer of a step of `num_rows` is cut into one block a multiprocessor; None if the kernel does not take it.

    Not taken are layers that would need more than one block a multiprocessor, and heights of 129 to 192, of which a
    quarter of the tensor cores' work would be for nothing: both are untried. Nor layers of more than FEW_LINEAR_ROWS
    rows and more than FEW_LINEAR_SLICES slices, which are slower than shrink beside cuBLAS.

    slices, max_rank: of its adapters. num_sms: multiprocessors of the GPU.
    """
    if not 0 < num_rows <= MAX_LINEAR_ROWS or out_features % 8 or in_features % 8:
        return None
    rows = next(rows for rows in _STEP_ROWS if rows >= num_rows)
    blocks = max(num_sms // 4 * 4 - 4, 2)  # clusters of two do not fit every multiprocessor
    splits = 1 if out_features >= blocks * _SHORTEST_ALONE else 2
    step = 16 * splits
    height = -(-out_features * splits // (blocks * step)) * step
    if height > _MOST_HEIGHT or 128 < height <= 192 or not hides_shrink(num_rows, slices):
        return None
    box = (height + rows) * 128
    boxes = 2 if _LEAST_LONG_STAGES[rows] * 2 * box <= _RING_BYTES[rows] else 1
    stage = boxes * box
    if stage < 2 * max_rank * (8 * slices + 16):
        return None
    return LinearTile(rows, height, splits, boxes, max(2, _RING_BYTES[rows] // stage))


def hides_shrink(num_rows: int, slices: int) -> bool:
    """Whether the low-rank rows of a step of `num_rows` take a block no longer than the weight of a layer."""
    return num_rows <= FEW_LINEAR_ROWS or slices <= FEW_LINEAR_SLICES


def takes_layer(
    num_rows: int, out_features: int, in_features: int, *, slices: int, max_rank: int, device: torch.device
) -> bool:
    """Whether the kernel computes a layer with adapters in steps of `num_rows`. Sizes as for `linear_tile`."""
    if not fits_kernel(device):
        return False
    sizes = {"slices": slices, "max_rank": max_rank, "num_sms": _num_sms(device)}
    return linear_tile(num_rows, out_features, in_features, **sizes) is not None


def lora_linear_cuda(
    y: Tensor,
    v: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arena: Tensor,
    table: Tensor,
    plan: Tensor,
    out_features: Sequence[int],
    max_rank: int,
) -> None:
    """``lora_linear`` on a GPU: by its kernel, or by cuBLAS between shrink and expand."""
    check_linear(y, v, x, weight, bias, arena, table, plan, out_features, max_rank)
    ops = torch.ops.punica
    tile = None
    if fits_kernel(x.device):
        sizes = {"slices": table.size(0), "max_rank": max_rank, "num_sms": _num_sms(x.device)}
        tile = linear_tile(x.size(0), weight.size(0), weight.size(1), **sizes)
    if tile is not None and all(_is_aligned(tensor) for tensor in (x, weight, y, bias) if tensor is not None):
        ops.lora_linear_tile(y, v, x, weight, bias, arena, table, plan, out_features, max_rank, list(tile))
        return
    tables = (arena, table, plan)
    ops.lora_shrink(v, x, *tables, max_rank, summed=True)
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)
    ops.lora_expand(y, v, *tables, out_features, x.size(1), max_rank, summed=True)


def fits_kernel(device: torch.device) -> bool:
    """Whether the kernel was compiled for this GPU: it needs what only compute capability 9.0 has."""
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key("punica::lora_linear_tile", "CUDA")
    return has_kernel and device.type == "cuda" and bool(torch.cuda.get_device_capability(device) == (9, 0))


def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether rows start on 16 bytes, or a vector does, which must be contiguous."""
    is_aligned: bool = tensor.stride(0) % 8 == 0 if tensor.dim() == 2 else tensor.is_contiguous()
    return is_aligned and tensor.data_ptr() % 16 == 0
