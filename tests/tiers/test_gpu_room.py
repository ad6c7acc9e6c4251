"""Room in the GPU tier: who leaves, who stays, what a fragmented arena can still take."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from punica_core.errors import AdapterTooLarge
from punica_core.lora.gpu_tier import GpuAdapterTier
from punica_core.protocol import AdapterRef
from punica_core.scheduler.plan import AdapterGrant, SkipReason
from tests.support.memory_adapters import (
    NUM_ELEMENTS,
    PATIENCE,
    MemoryAdapters,
    add,
    arena_elements,
    assert_stored,
    granted,
    make_weights,
    settle,
    wait_until,
)

MakeTier = Callable[..., GpuAdapterTier]


def test_more_adapters_than_fit_are_all_served_twice_round(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(2 * NUM_ELEMENTS)
    refs = add(adapters, 5)
    for ref in (*refs, *refs):
        assert_stored(tier, granted(tier, ref).slot, adapters.weights(ref))
        tier.release(ref)
    stats = tier.stats()
    assert (stats.gpu_resident, stats.gpu_bytes_used) == (2, 2 * NUM_ELEMENTS * 4)
    assert stats.evictions == 8
    assert adapters.reads == [ref.name for ref in refs], "the host tier had them the second time"


def test_the_one_used_longest_ago_leaves(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(2 * NUM_ELEMENTS)
    a, b, c = add(adapters, 3)
    for ref in (a, b, a):
        granted(tier, ref)
        tier.release(ref)
    granted(tier, c)
    assert isinstance(tier.acquire(a), AdapterGrant)
    assert not isinstance(tier.acquire(b), AdapterGrant)


def test_a_pinned_adapter_keeps_its_slot_and_its_bytes(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(NUM_ELEMENTS)
    a, b = add(adapters, 2)
    grant = granted(tier, a)
    assert settle(tier, b) is SkipReason.ADAPTER_NO_ROOM
    assert granted(tier, a) == grant
    assert_stored(tier, grant.slot, adapters.weights(a))
    tier.release(a)
    assert settle(tier, b) is SkipReason.ADAPTER_NO_ROOM, "one of two pins is left"
    tier.release(a)
    assert_stored(tier, granted(tier, b).slot, adapters.weights(b))
    with pytest.raises(ValueError, match="no pin"):
        tier.release(a)


def test_who_found_no_room_costs_nothing_until_something_is_released(
    make_tier: MakeTier, adapters: MemoryAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(NUM_ELEMENTS, clock=lambda: 0.0)
    a, b = add(adapters, 2)
    granted(tier, a)
    assert settle(tier, b) is SkipReason.ADAPTER_NO_ROOM
    searches = count_calls(monkeypatch, GpuAdapterTier, "_leaving_for")
    assert {tier.acquire(b) for _ in range(100)} == {SkipReason.ADAPTER_NO_ROOM}
    assert searches == []
    tier.release(a)
    granted(tier, b)
    assert searches


def test_who_found_no_room_is_told_so_until_there_is_some(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    """The scheduler counts for how long it is: any other answer would begin that anew."""
    now = [0.0]
    tier = make_tier(NUM_ELEMENTS, clock=lambda: now[0])
    a, b = add(adapters, 2)
    for _ in range(20):
        granted(tier, a)
    assert settle(tier, b) is SkipReason.ADAPTER_NO_ROOM
    for _ in range(19):
        tier.release(a)
        now[0] += 1.0
        assert tier.acquire(b) is SkipReason.ADAPTER_NO_ROOM
    tier.release(a)
    assert tier.acquire(b) is SkipReason.ADAPTER_LOADING
    granted(tier, b)


def test_room_that_was_waited_for_is_taken_at_once(
    make_tier: MakeTier, adapters: MemoryAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(NUM_ELEMENTS)
    a, b = add(adapters, 2)
    granted(tier, a)
    assert settle(tier, b) is SkipReason.ADAPTER_NO_ROOM
    may_go_on = threading.Event()
    bring = GpuAdapterTier._bring

    def slow_bring(tier: GpuAdapterTier, job: Any) -> None:
        may_go_on.wait(PATIENCE)
        bring(tier, job)

    monkeypatch.setattr(GpuAdapterTier, "_bring", slow_bring)
    tier.release(a)
    assert tier.acquire(b) is SkipReason.ADAPTER_LOADING
    assert not isinstance(tier.acquire(a), AdapterGrant), "it left when its room was given away"
    may_go_on.set()
    assert_stored(tier, granted(tier, b).slot, adapters.weights(b))


def test_room_that_is_not_needed_after_all_is_given_back(
    make_tier: MakeTier, adapters: MemoryAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(NUM_ELEMENTS)
    a, b = add(adapters, 2)
    granted(tier, a)
    assert settle(tier, b) is SkipReason.ADAPTER_NO_ROOM

    def fail(tier: GpuAdapterTier, job: Any) -> None:
        raise AdapterTooLarge("it was not to be.")

    with monkeypatch.context() as patch:
        patch.setattr(GpuAdapterTier, "_bring", fail)
        tier.release(a)
        assert tier.acquire(b) is SkipReason.ADAPTER_LOADING
        wait_until(lambda: bool(tier.poll(time.monotonic())))
    assert tier.arena.free.num_free == NUM_ELEMENTS
    granted(tier, a)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    calls: list[None] = []
    real = getattr(owner, name)

    def count(*arguments: Any) -> Any:
        calls.append(None)
        return real(*arguments)

    monkeypatch.setattr(owner, name, count)
    return calls


def test_room_in_pieces_is_used_without_evicting_anybody(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(6 * NUM_ELEMENTS)
    refs = add(adapters, 6)
    for ref in refs:
        granted(tier, ref)
    for ref in refs[::2]:  # every other one becomes a gap
        tier.release(ref)
        tier.forget(ref.path)
    large = adapters.add("large", make_weights("large", 8, seed=9))
    assert NUM_ELEMENTS < arena_elements(adapters.weights(large)) < 3 * NUM_ELEMENTS
    grant = granted(tier, large)
    assert len(tier._runs[grant.slot]) > 1
    assert_stored(tier, grant.slot, adapters.weights(large))
    assert tier._table.evictions == 3, "those that were forgotten"
    for ref in refs[1::2]:
        assert_stored(tier, granted(tier, ref).slot, adapters.weights(ref))


def test_idle_adapters_stay_if_not_even_without_them_the_newcomer_would_fit(
    make_tier: MakeTier, adapters: MemoryAdapters
) -> None:
    tier = make_tier(3 * NUM_ELEMENTS)
    a, b, c = add(adapters, 3)
    for ref in (a, b, c):
        granted(tier, ref)
    tier.release(a)
    tier.release(c)
    weights = make_weights("large", 8, seed=9)
    large = adapters.add("large", weights)
    assert 2 * NUM_ELEMENTS < arena_elements(make_weights("huge", 14)) <= 3 * NUM_ELEMENTS
    huge = adapters.add("huge", make_weights("huge", 14, seed=8))
    assert settle(tier, huge) is SkipReason.ADAPTER_NO_ROOM
    assert tier._table.evictions == 0
    assert isinstance(tier.acquire(a), AdapterGrant)
    tier.release(a)
    assert_stored(tier, granted(tier, large).slot, weights)


def test_it_is_told_who_must_go_for_a_newcomer_to_fit(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(3 * NUM_ELEMENTS)
    a, b, c = add(adapters, 3)
    grants = {ref: granted(tier, ref) for ref in (a, b, c)}
    weights = make_weights("large", 8, seed=9)
    assert NUM_ELEMENTS < arena_elements(weights) <= 2 * NUM_ELEMENTS
    large = adapters.add("large", weights)
    assert settle(tier, large) is SkipReason.ADAPTER_NO_ROOM
    assert [tier.fits_without(large, unused) for unused in ([], [a], [a, c], [a, b, c])] == [False, False, True, True]
    assert {ref: granted(tier, ref) for ref in (a, b, c)} == grants, "nothing was changed"
    assert tier._table.evictions == 0
    for ref in (a, a, c, c):
        tier.release(ref)
    assert_stored(tier, granted(tier, large).slot, weights)


def test_nobody_who_uses_the_gpu_makes_room_on_the_host(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(3 * NUM_ELEMENTS)
    a, b = add(adapters, 2)
    granted(tier, a)
    host = tier._host
    host._table.budget_bytes = host._table.bytes_used
    held = host.acquire(a)
    assert isinstance(held, AdapterGrant)
    assert settle(tier, b) is SkipReason.ADAPTER_NO_ROOM
    assert not tier.fits_without(b, [a])
    host.release(a)
    assert tier.fits_without(b, [])


def test_when_slots_run_out_the_oldest_idle_adapter_gives_its_up(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(num_slots=2)
    a, b, c = add(adapters, 3)
    granted(tier, a)
    granted(tier, b)
    assert settle(tier, c) is SkipReason.ADAPTER_NO_ROOM
    tier.release(b)
    assert_stored(tier, granted(tier, c).slot, adapters.weights(c))
    assert_stored(tier, granted(tier, a).slot, adapters.weights(a))


def test_an_adapter_larger_than_the_tier_is_refused_alone(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(NUM_ELEMENTS)
    large = adapters.add("large", make_weights("large", 64))
    error = settle(tier, large)
    assert isinstance(error, AdapterTooLarge)
    assert f"{arena_elements(adapters.weights(large)) * 4} bytes" in error.message
    assert str(NUM_ELEMENTS * 4) in error.message
    assert "--adapter-gpu-bytes" in error.message
    assert settle(tier, large) is error, "told again while it is remembered"
    granted(tier, add(adapters, 1)[0])
    outcomes = [(load.name, load.outcome) for load in tier.stats().loads if load.tier == "gpu"]
    assert outcomes == [("large", error.code), ("a0", "ok")]


def test_a_burst_of_cold_adapters_cannot_push_each_other_out_unused(
    make_tier: MakeTier, adapters: MemoryAdapters
) -> None:
    tier = make_tier(2 * NUM_ELEMENTS, claim_seconds=1000.0)
    refs = add(adapters, 5)
    served: list[AdapterRef] = []
    while len(served) < len(refs):
        for ref in [ref for ref in refs if ref not in served]:
            if isinstance(tier.acquire(ref), AdapterGrant):
                tier.release(ref)
                served.append(ref)
        tier.wait_for_load(0.01)
    copies = [load.name for load in tier.stats().loads if load.tier == "gpu"]
    assert sorted(copies) == sorted(ref.name for ref in refs), "each was copied once"


def test_a_thousand_random_requests_always_find_what_was_granted(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    choose = random.Random(5)
    ranks = (1, 2, 3, 5, 8, 16, 33)
    tier = make_tier(9 * NUM_ELEMENTS)
    refs = [
        adapters.add(f"a{i}", make_weights(f"key {i}", rank, seed=i, extras=i % 3 == 0))
        for i, rank in enumerate(ranks * 3)
    ]
    held: list[tuple[AdapterRef, AdapterGrant]] = []
    num_grants = num_requests = 0
    deadline = time.monotonic() + PATIENCE
    while num_requests < 1000 or num_grants <= 100 or tier._table.evictions <= 20:
        assert time.monotonic() < deadline
        num_requests += 1
        if held and choose.random() < 0.45:
            ref, grant = held.pop(choose.randrange(len(held)))
            assert_stored(tier, grant.slot, adapters.weights(ref))
            tier.release(ref)
        ref = choose.choice(refs)
        if choose.random() < 0.02:
            tier.forget(ref.path)
        answer = tier.acquire(ref)
        if isinstance(answer, AdapterGrant):
            num_grants += 1
            assert answer.adapter_key == adapters.weights(ref).key
            assert_stored(tier, answer.slot, adapters.weights(ref))
            held.append((ref, answer))
        elif choose.random() < 0.3:
            tier.wait_for_load(0.01)
    for ref, grant in held:
        assert_stored(tier, grant.slot, adapters.weights(ref))
        tier.release(ref)
    for ref in refs:
        tier.forget(ref.path)
    wait_until(lambda: tier.arena.num_free == tier.arena.buffer.numel())
    tier._table.check()
    assert tier.poll(time.monotonic()) == []
