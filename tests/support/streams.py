"""A device that is behind: what the host queues has long to wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from punica_core.model.staging import PinnedRing

SPIN_CYCLES = 1_000_000_000
"""Of a kernel that does nothing for about half a second."""


def busy_stream(device: torch.device | str) -> Callable[[], bool]:
    """Keep the current stream busy before all that is queued from now on; tells whether it still is. A CPU does
    everything at once, and is always said to be."""
    if torch.device(device).type != "cuda":
        return lambda: True
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    end = torch.cuda.Event()
    end.record()
    return lambda: not end.query()


class _OneBuffer(PinnedRing):
    def __init__(self, ring: PinnedRing) -> None:
        self._buffer = ring.take()

    def take(self) -> Tensor:
        return self._buffer

    def sent(self) -> None:
        pass


def unguarded(ring: PinnedRing) -> PinnedRing:
    """A ring of one buffer, which is given out again at once."""
    return _OneBuffer(ring)
