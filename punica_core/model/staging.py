"""Page-locked buffers for copies that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor

DEPTH = 3
"""Steps whose copies may be under way: the one that runs, the one launched after it, the one being prepared."""


class PinnedRing:
    """Buffers taken in turn; one is given out again only after the copy that read it has finished.

    num_bytes: of each. device: where they are copied to; buffers for a CPU are ordinary memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._buffers = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(DEPTH)]
        self._events: list[torch.cuda.Event | None] = [None] * DEPTH
        self._at = 0

    def take(self) -> Tensor:
        """The next buffer, uint8 [num_bytes]. Waits for the copy that read it DEPTH steps ago, if that is not done."""
        self._at = (self._at + 1) % DEPTH
        event = self._events[self._at]
        if event is not None:
            event.synchronize()
        return self._buffers[self._at]

    def sent(self) -> None:
        """The copy out of the buffer taken last is queued on the current stream."""
        if self._is_cuda:
            event = self._events[self._at] or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._events[self._at] = event
