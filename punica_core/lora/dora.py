"""The row gains of DoRA (Liu et al. 2024, arXiv 2402.09353), computed once, when an adapter is loaded.

PEFT computes y = g ⊙ (x·Wᵀ + s·x·Aᵀ·Bᵀ) + b with g = m / ‖W + s·B·A‖, a norm for each output, at every call. W does not
change here, so neither does g.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20
"""Elements of W that are taken at a time: 4 MiB in fp32."""


def row_gain(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor, progress: Callable[[], None] = lambda: None
) -> Tensor:
    """m / ‖W + s·B·A‖ by row. weight: [O, I], any device; a: [R, I]; b: [O, R]; magnitude: [O] → [O] fp32 on the CPU.

    Not finite where a row of W + s·B·A is 0, or its norm overflows fp32. `progress` is called after each chunk.
    """
    norms = []
    with torch.inference_mode(), _side_stream(weight.device):
        a = a.to(weight.device, torch.float32)
        rows = max(1, CHUNK_ELEMENTS // weight.size(1))
        for start in range(0, weight.size(0), rows):
            part = weight[start : start + rows].to(torch.float32, copy=True)
            part.addmm_(b[start : start + rows].to(weight.device, torch.float32), a, alpha=scale)
            norms.append(torch.linalg.vector_norm(part, dim=1).cpu())
            progress()
        return _gain(magnitude, torch.cat(norms))


def embedding_gain(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor, progress: Callable[[], None] = lambda: None
) -> Tensor:
    """The same for an embedding, whose norms are those of its columns: one for each of the H outputs.

    weight: [V, H], any device; a: [R, V]; b: [H, R]; magnitude: [H] → [H] fp32 on the CPU.
    """
    squares = torch.zeros(weight.size(1), dtype=torch.float64)
    with torch.inference_mode(), _side_stream(weight.device):
        b = b.to(weight.device, torch.float32)
        rows = max(1, CHUNK_ELEMENTS // weight.size(1))
        for start in range(0, weight.size(0), rows):
            part = weight[start : start + rows].to(torch.float32, copy=True)
            part.addmm_(a[:, start : start + rows].to(weight.device, torch.float32).t(), b.t(), alpha=scale)
            squares += part.square().sum(0).double().cpu()
            progress()
        return _gain(magnitude, squares.sqrt().float())


def _gain(magnitude: Tensor, norms: Tensor) -> Tensor:
    """magnitude / norms; NaN for an infinite norm, whose gain would be a 0 that nobody asked for."""
    return torch.where(torch.isinf(norms), torch.nan, magnitude.float() / norms)


def _side_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Beside the steps on a GPU; nothing on a CPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = torch.cuda.stream(_stream_of(device))
    return context


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all gains of a device: torch keeps what was freed for each stream apart, outside of the memory plan."""
    return torch.cuda.Stream(device)
