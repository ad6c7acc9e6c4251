"""What must hold between any two calls of a scheduler; for tests and idle moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sized

from punica_core.kv.block_pool import BlockPool
from punica_core.scheduler.in_flight import InFlight
from punica_core.scheduler.running import RunningSequences
from punica_core.scheduler.sequence import Sequence, Status
from punica_core.scheduler.waiting import WaitingQueue


def check_sequences(live: Sized, running: RunningSequences, waiting: WaitingQueue, in_flight: InFlight) -> None:
    """Assert that every sequence that lives either runs or waits."""
    assert all(sequence.status is Status.WAITING for sequence in waiting)
    assert all(sequence.status is Status.RUNNING for sequence in running)
    assert len(live) == len(running) + len(waiting)
    in_flight.check()


def check_blocks(pool: BlockPool, holders: Iterable[Sequence]) -> None:
    """Assert that `holders` hold every block that is not free, each as often as it is referenced."""
    references = Counter(block_id for sequence in holders for block_id in sequence.block_table)
    for block_id in range(pool.num_blocks):
        assert pool.references(block_id) == references[block_id], f"block {block_id} leaked"
    pool.check()
