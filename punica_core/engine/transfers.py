"""Copies between host and device that nobody waits for in a step: one upload of many arrays, downloads read later.

Staging memory is page-locked and comes from torch's allocator for it, which gives a piece out again only after the
copies that use it have run: no copy in flight is overwritten, however many steps are queued. On a CPU nothing is
copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT: Final = 16
"""Bytes on which each array of an upload starts."""


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device, queued on its current stream as a single copy.

    The arrays may be changed as soon as this returns, except on a CPU, where the tensors share their memory.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    offsets = np.cumsum([0] + [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    staging = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=bool(offsets[-1]))
    host = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=False):
        host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    packed = staging.to(device, non_blocking=True)
    return [
        packed[offset : offset + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=False)
    ]


class Mark:
    """A point in what is queued on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until the device has come so far."""
        if self._event is not None:
            self._event.synchronize()


class Download:
    """Copies of tensors to the host, queued on the current stream. tensors: at least one, all on one device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        if self._tensors[0].is_cuda:
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
        self._done = Mark(tensors[0].device)

    def wait(self) -> list[Tensor]:
        """The tensors on the host, once the device has come so far."""
        self._done.wait()
        return self._tensors
