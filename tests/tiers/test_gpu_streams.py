"""On a GPU: copies run beside the steps, wait for none of them, and touch nothing that they read."""

from __future__ import annotations

import pytest
import torch

from punica_core.scheduler.plan import AdapterGrant
from tests.support.memory_adapters import NUM_ELEMENTS, MemoryAdapters, add, assert_stored, granted, settle
from tests.tiers.conftest import MakeTier

pytestmark = pytest.mark.gpu

SPIN_CYCLES = 4_000_000_000
"""A kernel that does nothing for about two seconds: the step that is running."""


@pytest.fixture
def device() -> str:
    return "cuda"


def test_an_adapter_comes_in_while_a_step_runs(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(2 * NUM_ELEMENTS)
    refs = add(adapters, 5)
    granted(tier, refs[0])
    tier.release(refs[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    step = torch.cuda.Event()
    step.record()
    slots = []
    for ref in refs:  # more than fit: some are evicted meanwhile
        slots.append(granted(tier, ref).slot)
        tier.release(ref)
    assert not step.query(), "no call waited for the step, and no copy did"
    torch.cuda.synchronize()
    assert_stored(tier, slots[-1], adapters.weights(refs[-1]))


def test_what_a_step_reads_stays_while_others_come_and_go(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(8 * NUM_ELEMENTS)
    refs = add(adapters, 24)
    pinned = [granted(tier, ref) for ref in refs[:4]]
    ranges = [run for grant in pinned for run in tier._runs[grant.slot]]
    views = [tier.arena.buffer[run.start : run.start + run.length].view(torch.int32) for run in ranges]
    columns = [tier.tables.records[:, grant.slot] for grant in pinned]
    before = [view.clone() for view in views], [column.clone() for column in columns]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    evictions = tier.stats().evictions

    def step() -> None:
        """Reads all that is pinned, on the current stream; the host waits for nothing."""
        for now, then in zip((*views, *columns), (*before[0], *before[1]), strict=True):
            wrong.add_((now != then).sum())

    for turn in range(400):
        step()
        ref = refs[4 + turn % 20]
        if isinstance(tier.acquire(ref), AdapterGrant):
            tier.release(ref)
    for ref in refs[4:]:
        step()
        slot = granted(tier, ref).slot
        step()
        assert_stored(tier, slot, adapters.weights(ref))
        tier.release(ref)
    assert int(wrong) == 0
    assert tier.stats().evictions > evictions + 16, "there was a coming and going"
    for grant, ref in zip(pinned, refs[:4], strict=True):
        assert_stored(tier, grant.slot, adapters.weights(ref))


def test_a_step_after_the_grant_sees_the_whole_adapter(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    """What is queued right after the grant, without any wait, reads the new bytes: the copy had arrived."""
    tier = make_tier(NUM_ELEMENTS)
    refs = add(adapters, 6)
    copies = []
    for ref in refs:
        grant = settle(tier, ref)
        assert isinstance(grant, AdapterGrant)
        (run,) = tier._runs[grant.slot]
        # On another stream than the one that copied, as the runner's is.
        arena, records = tier.arena.buffer[run.start : run.start + run.length], tier.tables.records
        copies.append((grant.slot, arena.clone(), records.clone()))
        torch.cuda.synchronize()  # the scheduler releases after the step
        tier.release(ref)
    for ref, (slot, arena, records) in zip(refs, copies, strict=True):
        tier.arena.buffer[: arena.numel()].copy_(arena)
        tier.tables.records.copy_(records)
        tier.tables.slot_rank[slot] = 4
        assert_stored(tier, slot, adapters.weights(ref))
