"""The GPU tier: slots hold what they say, nothing in use is touched, nobody waits who need not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from punica_core.engine.engine import Engine
from punica_core.errors import AdapterInvalid, AdapterUnsupported, InternalError
from punica_core.lora.arena_writer import ArenaWriter
from punica_core.lora.gpu_tier import GpuAdapterTier
from punica_core.lora.weights import AdapterWeights
from punica_core.scheduler.plan import AdapterGrant, SkipReason
from tests.support.memory_adapters import (
    NUM_ELEMENTS,
    PATIENCE,
    MemoryAdapters,
    add,
    assert_stored,
    granted,
    make_weights,
    settle,
    wait_until,
)
from tests.support.scheduling import make_rig

MakeTier = Callable[..., GpuAdapterTier]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cold_adapter_comes_in_bit_by_bit(make_tier: MakeTier, adapters: MemoryAdapters, dtype: torch.dtype) -> None:
    tier = make_tier(dtype=dtype)
    ref = adapters.add("a", make_weights("key", 5, extras=True, dtype=dtype))
    assert tier.acquire(ref) is SkipReason.ADAPTER_LOADING
    grant = granted(tier, ref)
    assert grant.adapter_key == "key"
    assert_stored(tier, grant.slot, adapters.weights(ref))
    other = adapters.add("b", make_weights("other", 5, seed=1, dtype=dtype))
    with pytest.raises(AssertionError):
        assert_stored(tier, granted(tier, other).slot, adapters.weights(ref))


def test_modules_left_out_are_not_adapted_even_where_the_slot_had_them(
    make_tier: MakeTier, adapters: MemoryAdapters
) -> None:
    tier = make_tier(NUM_ELEMENTS, num_slots=1)
    whole = adapters.add("whole", make_weights("whole", 3))
    slot = granted(tier, whole).slot
    tier.release(whole)
    weights = make_weights("part", 3, seed=1)
    part = adapters.add("part", AdapterWeights("part", {"layers.0.k": weights.modules["layers.0.k"]}, 1))
    assert granted(tier, part).slot == slot
    assert_stored(tier, slot, adapters.weights(part))


def test_fifty_first_requests_are_one_load_in_each_tier(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier()
    (ref,) = add(adapters, 1)
    first = {tier.acquire(ref) for _ in range(50)}  # the last of them may come after the load
    assert SkipReason.ADAPTER_LOADING in first
    assert first <= {SkipReason.ADAPTER_LOADING, granted(tier, ref)}
    assert len({granted(tier, ref) for _ in range(50)}) == 1
    loads = [(load.name, load.tier, load.outcome) for load in tier.stats().loads]
    assert loads == [("a0", "host", "ok"), ("a0", "gpu", "ok")]
    assert tier.stats().loads == []


def test_what_the_host_tier_refuses_is_told(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier()
    error = settle(tier, adapters.add("bad", make_weights("broken")))
    assert isinstance(error, AdapterInvalid)
    granted(tier, add(adapters, 1)[0])


def test_what_the_tables_have_no_place_for_is_refused_not_left_out(
    make_tier: MakeTier, adapters: MemoryAdapters
) -> None:
    tier = make_tier()
    plain = make_weights("plain")
    strange = {**plain.modules, "lm_head": plain.modules["layers.0.k"]}
    error = settle(tier, adapters.add("head", AdapterWeights("head", strange, 1)))
    assert isinstance(error, AdapterUnsupported)
    assert "'lm_head'" in error.message


def test_two_names_of_equal_content_share_one_copy(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier()
    weights = make_weights("same")
    twins = [adapters.add(name, weights) for name in ("a", "b")]
    assert len({granted(tier, ref) for ref in twins}) == 1
    assert tier.stats().gpu_resident == 1
    assert tier.arena.num_free == 99 * NUM_ELEMENTS


def test_host_copies_are_held_only_while_they_are_copied(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    refs = add(adapters, 3)
    tier = make_tier(host_bytes=adapters.weights(refs[0]).nbytes)
    tier._host._table._claim_seconds = 0.0
    grants = [granted(tier, ref) for ref in refs]
    assert len({grant.slot for grant in grants}) == 3
    assert tier.stats().resident == 1


def test_a_slot_is_granted_only_when_its_copy_has_arrived(
    make_tier: MakeTier, adapters: MemoryAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    a, b = add(adapters, 2)
    granted(tier, a)
    copying, go_on = threading.Event(), threading.Event()
    real = ArenaWriter.write

    def write_slowly(*arguments: Any, **options: Any) -> None:
        copying.set()
        assert go_on.wait(PATIENCE)
        real(*arguments, **options)

    monkeypatch.setattr(ArenaWriter, "write", write_slowly)
    while not copying.is_set():
        assert tier.acquire(b) is SkipReason.ADAPTER_LOADING
        copying.wait(0.01)
    assert tier.acquire(b) is SkipReason.ADAPTER_LOADING
    assert isinstance(tier.acquire(a), AdapterGrant), "the others are served meanwhile"
    go_on.set()
    assert_stored(tier, granted(tier, b).slot, adapters.weights(b))


def test_an_adapter_forgotten_while_it_is_copied_leaves_nothing_behind(
    make_tier: MakeTier, adapters: MemoryAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(NUM_ELEMENTS)
    (ref,) = add(adapters, 1)
    copied = threading.Event()
    real = ArenaWriter.write

    def forget_meanwhile(*arguments: Any, **options: Any) -> None:
        tier.forget(ref.path)
        assert tier.arena.num_free == 0, "the copy still needs the range"
        real(*arguments, **options)
        copied.set()

    monkeypatch.setattr(ArenaWriter, "write", forget_meanwhile)
    while not copied.is_set():
        tier.acquire(ref)
        tier.wait_for_load(0.01)
    wait_until(lambda: tier.arena.num_free == NUM_ELEMENTS)
    assert tier.stats().gpu_resident == 0


def test_a_forgotten_adapter_in_use_goes_with_its_last_pin(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(NUM_ELEMENTS)
    (ref,) = add(adapters, 1)
    slot = granted(tier, ref).slot
    tier.forget(ref.path)
    assert_stored(tier, slot, adapters.weights(ref))
    assert tier.arena.num_free == 0
    tier.release(ref)
    assert tier.arena.num_free == NUM_ELEMENTS


def test_a_copy_that_fails_is_that_adapters_alone_and_costs_no_memory(
    make_tier: MakeTier, adapters: MemoryAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(NUM_ELEMENTS, retry_seconds=0.0)
    a, b = add(adapters, 2)

    def break_down(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("a bus error")

    with monkeypatch.context() as patch:
        patch.setattr(ArenaWriter, "write", break_down)
        error = settle(tier, a)
    assert isinstance(error, InternalError)
    assert "bus error" not in error.message
    assert tier.arena.num_free == NUM_ELEMENTS
    for ref in (b, a):
        assert_stored(tier, granted(tier, ref).slot, adapters.weights(ref))
        tier.release(ref)
    tier._table.check()


def test_the_owner_is_called_when_a_load_ends_in_either_tier(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    calls: list[str] = []
    tier = make_tier(on_loaded=lambda: calls.append(threading.current_thread().name))
    (ref,) = add(adapters, 1)
    granted(tier, ref)
    wait_until(lambda: len(calls) == 2)
    assert calls == ["adapter-reader", "adapter-copier"]


def test_a_closed_tier_brings_nothing_in_and_keeps_what_was_granted(
    make_tier: MakeTier, adapters: MemoryAdapters
) -> None:
    tier = make_tier()
    a, b = add(adapters, 2)
    slot = granted(tier, a).slot
    tier.close()
    assert tier.acquire(b) is SkipReason.ADAPTER_LOADING
    assert not tier.wait_for_load(0.05)
    assert_stored(tier, slot, adapters.weights(a))


def test_the_engine_reports_both_tiers(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier()
    engine = Engine(make_rig(max_num_batched_tokens=64).scheduler, tier, runner=None)  # type: ignore[arg-type]
    for ref in add(adapters, 2):
        granted(tier, ref)
    stats = engine.stats()
    assert (stats.adapters_host, stats.adapters_gpu) == (2, 2)
    assert stats.adapter_gpu_bytes_used == 2 * NUM_ELEMENTS * 4
    assert stats.adapter_host_bytes_used == 2 * make_weights("x").nbytes
    assert sorted(load.tier for load in stats.adapter_loads) == ["gpu", "gpu", "host", "host"]
