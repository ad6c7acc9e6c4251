"""What the two tiers bring in before anybody can use it, and who has to leave for that: nobody who is needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from punica_core.adapters import residency
from punica_core.lora.cache import NUM_READERS, AdapterCache
from punica_core.lora.gpu_tier import GpuAdapterTier
from punica_core.protocol import AdapterRef
from punica_core.scheduler.plan import AdapterGrant, SkipReason
from punica_core.scheduler.scheduler import Scheduler
from tests.support.memory_adapters import (
    NUM_ELEMENTS,
    PATIENCE,
    MemoryAdapters,
    add,
    granted,
    make_weights,
    wait_until,
)
from tests.support.scheduling import make_rig, new_sequence
from tests.tiers.conftest import MakeTier

ROOM = 8


def is_still(tier: GpuAdapterTier) -> bool:
    return not (tier._host._jobs or tier._table._loads or tier._copying or tier._queue)


def prefetch(tier: GpuAdapterTier, refs: Sequence[AdapterRef], rounds: int = 30) -> None:
    """Ask as the scheduler does, again and again while they wait."""
    for _ in range(rounds):
        tier.prefetch(refs[:16], frozenset(refs))
        wait_until(lambda: is_still(tier))


def on_gpu(tier: GpuAdapterTier) -> set[str]:
    return {ref.name for ref in tier._table._versions}


def use(tier: GpuAdapterTier, *refs: AdapterRef) -> None:
    for ref in refs:
        granted(tier, ref)
        tier.release(ref)


def test_what_will_be_wanted_is_granted_at_once(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(ROOM * NUM_ELEMENTS, claim_seconds=2.0)
    refs = add(adapters, 2)
    assert tier.acquire(refs[0]) is SkipReason.ADAPTER_LOADING
    wait_until(lambda: is_still(tier))
    prefetch(tier, refs, rounds=3)
    assert adapters.reads == [ref.name for ref in refs]
    assert all(isinstance(tier.acquire(ref), AdapterGrant) for ref in refs)


def test_a_tier_has_what_it_would_grant(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(ROOM * NUM_ELEMENTS)
    (ref,) = add(adapters, 1)
    assert not tier.has(ref)
    assert tier.acquire(ref) is SkipReason.ADAPTER_LOADING
    while not tier.has(ref):
        answer = tier.acquire(ref)
        assert answer is SkipReason.ADAPTER_LOADING or tier.has(ref), "it was copied between the two"
        tier.wait_for_load(0.01)
    assert isinstance(tier.acquire(ref), AdapterGrant)
    assert tier._host.has(ref)
    assert isinstance(tier._host.acquire(ref), AdapterGrant)


def flooded(tier: GpuAdapterTier, adapters: MemoryAdapters) -> tuple[set[str], set[str]]:
    """Eight idle adapters fill the GPU, the last two of them used again just now; forty others are waited for. (those
    that left, those that came)."""
    refs = add(adapters, ROOM + 40)
    use(tier, *refs[:ROOM])
    use(tier, *refs[ROOM - 2 : ROOM])
    before = on_gpu(tier)
    assert before == {ref.name for ref in refs[:ROOM]}
    prefetch(tier, refs[ROOM:])
    tier._table.check()
    return before - on_gpu(tier), on_gpu(tier) - before


def test_a_flood_takes_a_share_of_the_memory_and_hot_adapters_stay(
    make_tier: MakeTier, adapters: MemoryAdapters
) -> None:
    tier = make_tier(ROOM * NUM_ELEMENTS, claim_seconds=0.001)
    gone, came = flooded(tier, adapters)
    assert gone == {"a0", "a1"}, "those used longest ago"
    assert came == {"a8", "a9"}, "those that are wanted soonest"


def test_without_a_share_a_flood_takes_all(
    make_tier: MakeTier, adapters: MemoryAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "PREFETCH_SHARE", 10.0)
    gone, _came = flooded(make_tier(ROOM * NUM_ELEMENTS, claim_seconds=0.001), adapters)
    assert gone == {f"a{i}" for i in range(ROOM)}


def test_who_is_wanted_or_in_use_does_not_leave(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(3 * NUM_ELEMENTS)
    wanted, used, newcomer, idle = add(adapters, 4)
    use(tier, wanted)
    granted(tier, used)
    use(tier, idle)
    prefetch(tier, [newcomer, wanted], rounds=3)
    assert on_gpu(tier) == {wanted.name, used.name, newcomer.name}, "the idle one left, though it was used last"
    prefetch(tier, [idle, wanted, newcomer], rounds=3)
    assert on_gpu(tier) == {wanted.name, used.name, newcomer.name}
    assert tier.acquire(idle) is SkipReason.ADAPTER_LOADING, "whose turn it is takes the place of one that waits"
    granted(tier, idle)


def test_the_host_tier_keeps_what_is_wanted_too(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    nbytes = make_weights("x").nbytes
    tier = make_tier(ROOM * NUM_ELEMENTS, host_bytes=2 * nbytes)
    refs = add(adapters, 4)
    host = tier._host
    for ref in refs[:2]:
        host.acquire(ref)
        wait_until(lambda ref=ref: host.has(ref))  # type: ignore[misc]
        host._table.find(ref).claim_until = 0.0  # type: ignore[union-attr]
    host.prefetch([refs[2]], frozenset([refs[0], refs[2]]))
    wait_until(lambda: is_still(tier))
    assert [host.has(ref) for ref in refs] == [True, False, True, False]
    host._table.find(refs[2]).claim_until = 0.0  # type: ignore[union-attr]
    host.prefetch([refs[3]], frozenset([refs[0], refs[2], refs[3]]))
    wait_until(lambda: is_still(tier))
    assert [host.has(ref) for ref in refs] == [True, False, True, False], "both are waited for"
    host.acquire(refs[3])
    wait_until(lambda: host.has(refs[3]))


def test_a_reader_is_left_to_what_is_wanted_now(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(ROOM * NUM_ELEMENTS)
    refs = add(adapters, 8)
    tier._host._closed = True  # nobody works
    tier._host.prefetch(refs, frozenset(refs))
    assert len(tier._host._jobs) == NUM_READERS - 1 > 0


def test_a_load_in_advance_that_is_wanted_now_may_take_any_idle_place(
    make_tier: MakeTier, adapters: MemoryAdapters
) -> None:
    tier = make_tier(NUM_ELEMENTS, clock=lambda: 0.0)
    first, second = add(adapters, 2)
    use(tier, first)
    prefetch(tier, [second, first], rounds=3)
    assert on_gpu(tier) == {first.name}
    granted(tier, second)


def test_a_read_in_advance_that_is_wanted_now_may_take_any_idle_place(
    make_tier: MakeTier, adapters: MemoryAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_tier(ROOM * NUM_ELEMENTS, host_bytes=make_weights("x").nbytes)._host
    first, second = add(adapters, 2)
    host.acquire(first)
    wait_until(lambda: host.has(first))
    host._table.find(first).claim_until = 0.0  # type: ignore[union-attr]
    may_go_on = threading.Event()
    load = AdapterCache._load

    def slow_load(cache: AdapterCache, job: Any) -> None:
        may_go_on.wait(PATIENCE)
        load(cache, job)

    monkeypatch.setattr(AdapterCache, "_load", slow_load)
    host.prefetch([second], frozenset([first, second]))
    assert host.acquire(second) is SkipReason.ADAPTER_LOADING
    may_go_on.set()
    wait_until(lambda: not host._jobs)
    assert host.has(second)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_seat_that_becomes_free_finds_its_adapter(
    make_tier: MakeTier, adapters: MemoryAdapters, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """The scheduler and both tiers together: steps that pass before a cold sequence starts, behind the only seat."""
    tier = make_tier(ROOM * NUM_ELEMENTS)
    if not ahead:
        monkeypatch.setattr(GpuAdapterTier, "prefetch", lambda *_: None)
    rig = make_rig(max_num_seqs=1)
    scheduler = Scheduler(rig.limits, rig.pool, rig.cache, tier)
    (cold,) = add(adapters, 1)
    scheduler.add(new_sequence(0, max_tokens=8), rig.now)
    scheduler.add(new_sequence(1, max_tokens=1, adapter=cold), rig.now)
    plans = []
    while scheduler.has_unfinished():
        plans.append(scheduler.schedule(rig.now))
        rig.now += 0.1
        scheduler.update(plans[-1], rig.model.execute(plans[-1]), rig.now)
        wait_until(lambda: is_still(tier))
    empty = [plan for plan in plans if not plan.rows]
    assert len(plans) == 9 + len(empty)
    assert bool(empty) != ahead


def test_a_broken_one_is_told_when_it_was_tried(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(ROOM * NUM_ELEMENTS)
    ref = adapters.add("bad", make_weights("broken"))
    tier.prefetch([ref], frozenset([ref]))
    wait_until(lambda: is_still(tier))
    assert [(failed, error.code) for failed, error in tier.poll(0.0)] == [(ref, "adapter_invalid")]
