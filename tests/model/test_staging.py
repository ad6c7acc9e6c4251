"""Page-locked buffers that the host fills ahead of the device: none is written to while a copy may still read it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from punica_core.model.staging import DEPTH, PinnedRing
from tests.support.streams import busy_stream, unguarded

NUM_COPIES = 3 * DEPTH


def copied(ring: PinnedRing, device: str) -> Tensor:
    """uint8 [NUM_COPIES, 1000]: what arrives of buffers that are filled with 0, 1, 2 … while the device is busy."""
    arrived = torch.full((NUM_COPIES, 1000), 255, dtype=torch.uint8, device=device)
    is_busy = busy_stream(device)
    for value in range(NUM_COPIES):
        if value == DEPTH:
            assert is_busy(), "as many copies as there are buffers wait for nothing"
        buffer = ring.take()
        buffer.fill_(value)
        arrived[value].copy_(buffer, non_blocking=True)
        ring.sent()
    return arrived.cpu()


EXPECTED = torch.arange(NUM_COPIES, dtype=torch.uint8)[:, None].expand(-1, 1000)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_copy_gets_what_was_written_for_it(device: str) -> None:
    assert torch.equal(copied(PinnedRing(1000, torch.device(device)), device), EXPECTED)


@pytest.mark.gpu
def test_without_a_guard_it_gets_what_was_written_last() -> None:
    arrived = copied(unguarded(PinnedRing(1000, torch.device("cuda"))), "cuda")
    assert not torch.equal(arrived, EXPECTED)
    assert torch.equal(arrived[0], EXPECTED[-1])
