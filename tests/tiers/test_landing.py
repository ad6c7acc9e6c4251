"""Packed adapters on their way to the GPU: read into page-locked memory, sent from there, and nobody else's bytes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from punica_core.adapters.files import SourceFile
from punica_core.adapters.format import ModelShapes
from punica_core.adapters.header import TensorEntry
from punica_core.adapters.packed_header import PackedHeader
from punica_core.errors import AdapterChanged, AdapterInvalid, AdapterLoadTimeout
from punica_core.lora.arena_writer import ArenaWriter
from punica_core.lora.cache import AdapterCache
from punica_core.lora.gpu_tier import GpuAdapterTier
from punica_core.lora.landing import LandingMemory
from punica_core.lora.packed import opener_for, write_packed
from punica_core.lora.table_modules import TableModules
from punica_core.lora.weights import AdapterSource, AdapterWeights
from punica_core.protocol import AdapterRef
from punica_core.scheduler.plan import AdapterGrant, SkipReason
from tests.support.memory_adapters import (
    GROUPS,
    NUM_ELEMENTS,
    PATIENCE,
    SHAPES,
    MemoryAdapters,
    arena_elements,
    assert_stored,
    granted,
    make_weights,
    settle,
    wait_until,
)
from tests.support.peft_adapters import packed_ref

SECRET = 7680.0
"""What landing memory holds of others: no adapter has such a number, and every dtype does."""


class Packed:
    """Packed files below a folder, and a tier that serves them; adapters in memory (`others`) come through it too."""

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self.others = MemoryAdapters()
        self.tiers: list[GpuAdapterTier] = []
        self._folder = folder
        self._weights: dict[str, AdapterWeights] = {}

    def add(self, name: str, rank: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> AdapterRef:
        """A packed file of elements of `dtype`."""
        weights = make_weights(name, rank, seed=seed, dtype=dtype)
        path = self._folder / f"{name}.punica"
        write_packed(str(path), weights, SHAPES, dtype)
        self._weights[name] = weights
        return packed_ref(path)

    def add_many(self, count: int) -> list[AdapterRef]:
        return [self.add(f"a{seed}", seed=seed) for seed in range(count)]

    def tier(
        self,
        landing_elements: int = 10 * NUM_ELEMENTS,
        *,
        num_elements: int = 100 * NUM_ELEMENTS,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> GpuAdapterTier:
        size = dtype.itemsize
        host_options = {
            "load_timeout": options.pop("load_timeout", 60.0),
            "clock": options.pop("clock", time.monotonic),
        }
        host = AdapterCache(ModelShapes.of(SHAPES), dtype, 10_000_000, open_adapter=self._open, **host_options)
        host._table._claim_seconds = options.pop("host_claim_seconds", 0.0)
        options = {"claim_seconds": 0.0, "num_slots": 64, "buffer_bytes": 4096} | options
        self.tiers.append(
            GpuAdapterTier(
                host,
                TableModules(GROUPS),
                num_elements * size,
                dtype=dtype,
                device=self.device,
                landing_bytes=landing_elements * size,
                **options,
            )
        )
        landing_of(self.tiers[-1]).buffer.fill_(SECRET)
        return self.tiers[-1]

    def assert_stored(self, tier: GpuAdapterTier, slot: int, ref: AdapterRef, dtype: torch.dtype | None = None) -> None:
        """Bit by bit, cast to `dtype`; and nothing that the landing memory held of others is in the arena."""
        weights = self._weights[ref.name] if ref.packed else self.others.weights(ref)
        if dtype is not None:
            cast = {
                path: type(module)(module.a.to(dtype), module.b.to(dtype), module.scale)
                for path, module in weights.modules.items()
            }
            weights = AdapterWeights(weights.key, cast, weights.nbytes)
        assert_stored(tier, slot, weights)
        assert not (tier.arena.buffer == SECRET).any()

    def _open(self, ref: AdapterRef, *options: Any) -> AdapterSource:
        return opener_for(None)(ref, *options) if ref.packed else self.others.open(ref)


def landing_of(tier: GpuAdapterTier) -> LandingMemory:
    landing = tier._host._landing
    assert landing is not None
    return landing


@pytest.fixture
def packed(tmp_path: Path, device: str) -> Iterator[Packed]:
    made = Packed(tmp_path, device)
    yield made
    for tier in made.tiers:
        tier.close()


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the writer's buffers, each time one is filled."""
    used: list[int] = []
    real = ArenaWriter.fillable

    def counted(writer: ArenaWriter, index: int) -> Any:
        used.append(index)
        return real(writer, index)

    monkeypatch.setattr(ArenaWriter, "fillable", counted)
    return used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_file", [torch.float32, torch.bfloat16], ids=["fp32 file", "bf16 file"])
def test_it_is_sent_from_where_it_was_read(
    packed: Packed, dtype: torch.dtype, of_file: torch.dtype, buffers: list[int]
) -> None:
    tier = packed.tier(dtype=dtype)
    ref = packed.add("a", 5, dtype=of_file)
    grant = granted(tier, ref)
    packed.assert_stored(tier, grant.slot, ref, dtype)
    assert buffers == [], "no buffer between"
    assert landing_of(tier).buffer.is_pinned() == (packed.device == "cuda")
    memory = packed.others.add("m", make_weights("m", dtype=dtype))
    packed.assert_stored(tier, granted(tier, memory).slot, memory)
    assert buffers, "others go by the buffers"


def test_readers_write_to_what_was_made_under_inference_mode(packed: Packed) -> None:
    ref = packed.add("a", dtype=torch.bfloat16)  # cast on the way, by torch
    with torch.inference_mode():
        tier = packed.tier()
    packed.assert_stored(tier, granted(tier, ref).slot, ref, torch.float32)


def test_it_is_cut_where_the_arena_is(packed: Packed, buffers: list[int]) -> None:
    """Runs of the arena and the pieces that are sent do not end where the other's do."""
    tier = packed.tier(num_elements=4 * NUM_ELEMENTS, buffer_bytes=1000)
    small = packed.add_many(4)
    grants = [granted(tier, ref) for ref in small]
    for ref in (small[0], small[2]):
        tier.release(ref)
    wide = packed.add("wide", 8)
    grant = settle(tier, wide)
    assert isinstance(grant, AdapterGrant)
    assert len(tier._runs[grant.slot]) > 1
    packed.assert_stored(tier, grant.slot, wide)
    packed.assert_stored(tier, grants[1].slot, small[1])
    packed.assert_stored(tier, grants[3].slot, small[3])
    assert buffers == []


@pytest.mark.parametrize("landing_elements", [0, NUM_ELEMENTS - 8])
def test_without_room_to_land_it_goes_by_the_buffers(packed: Packed, landing_elements: int, buffers: list[int]) -> None:
    tier = packed.tier(landing_elements)
    ref = packed.add("a")
    packed.assert_stored(tier, granted(tier, ref).slot, ref)
    assert buffers


def test_who_cannot_leave_costs_nobody_a_wait(packed: Packed, buffers: list[int]) -> None:
    tier = packed.tier(2 * NUM_ELEMENTS, host_claim_seconds=1000.0)
    refs = packed.add_many(3)
    for ref in refs[:2]:  # read, and never asked for again
        tier._host.acquire(ref)
        wait_until(lambda ref=ref: tier._host._table.find(ref) is not None)  # type: ignore[misc]
    assert landing_of(tier).num_free == 0
    packed.assert_stored(tier, granted(tier, refs[2]).slot, refs[2])
    assert buffers
    assert tier.stats().resident == 3


def test_idle_ones_leave_for_the_next_the_one_used_longest_ago_first(packed: Packed, buffers: list[int]) -> None:
    tier = packed.tier(2 * NUM_ELEMENTS)
    a, b, c = packed.add_many(3)
    for ref in (a, b):
        granted(tier, ref)
    wait_until(lambda: all(not resident.pins for resident in tier._host._table._lru.values()))
    granted(tier, c)
    assert {ref.name for ref in tier._host._table._versions} == {"a1", "a2"}
    assert (tier.stats().resident, landing_of(tier).num_free) == (2, 0)
    assert buffers == []


def test_a_smaller_one_leaves_no_more_than_it_must(packed: Packed) -> None:
    tier = packed.tier(2 * NUM_ELEMENTS + 64)
    a, b = packed.add_many(2)
    for ref in (a, b):
        granted(tier, ref)
    wait_until(lambda: all(not resident.pins for resident in tier._host._table._lru.values()))
    assert arena_elements(make_weights("x", 1)) > 64
    granted(tier, packed.add("small", 1))
    assert {ref.name for ref in tier._host._table._versions} == {"a1", "small"}
    granted(tier, packed.add("huge", 33))
    assert {ref.name for ref in tier._host._table._versions} == {"a1", "small", "huge"}, "what no leaving helps"


def test_more_than_can_land_are_all_served_twice_round(packed: Packed, buffers: list[int]) -> None:
    tier = packed.tier(3 * NUM_ELEMENTS, num_elements=2 * NUM_ELEMENTS)
    refs = packed.add_many(7)
    for ref in (*refs, *refs):
        packed.assert_stored(tier, granted(tier, ref).slot, ref)
        tier.release(ref)
    assert tier.stats().resident <= 3, "what has left is read again"


def fault_while_reading(monkeypatch: pytest.MonkeyPatch, fault: Callable[[], None], *, at_least: int = 256) -> None:
    """`fault` happens when the elements of a file are about to be read."""
    real = SourceFile.read_into

    def read_into(file: SourceFile, buffer: memoryview, start: int) -> None:
        if len(buffer) >= at_least and start >= 4096:
            fault()
        real(file, buffer, start)

    monkeypatch.setattr(SourceFile, "read_into", read_into)


@pytest.mark.parametrize("fault", ["cut", "rewritten", "not finite"])
def test_a_file_that_is_refused_leaves_all_as_it_was(
    packed: Packed, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = packed.tier(num_elements=NUM_ELEMENTS)
    first, bad = packed.add_many(2)
    grant = granted(tier, first)
    tier.release(first)
    before = tier.arena.buffer.clone()
    path = tmp_path / "a1.punica"
    if fault == "cut":
        fault_while_reading(monkeypatch, lambda: os.truncate(path, path.stat().st_size - 64))
    elif fault == "rewritten":
        fault_while_reading(monkeypatch, lambda: path.write_bytes(path.read_bytes()))
    else:
        path.write_bytes(path.read_bytes()[:-4] + b"\0\0\xc0\x7f")
        bad = packed_ref(path)
    error = settle(tier, bad)
    assert isinstance(error, AdapterInvalid if fault == "not finite" else AdapterChanged)
    kept = sum(room.elements.numel() for room in tier._host._landed.values())
    assert landing_of(tier).num_free == NUM_ELEMENTS - kept, "its place was given back"
    assert torch.equal(tier.arena.buffer, before), "nothing was sent"
    assert tier.acquire(first) == grant, "and nobody left"


def test_an_element_that_was_not_read_cannot_be_sent(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that asks for too little is our own fault: it is caught before anything is sent."""

    def shorter(name: str, header: PackedHeader, start: int) -> TensorEntry:
        return TensorEntry(name, header.dtype, (header.num_elements - 8,), start, header.data_bytes - 32)

    monkeypatch.setattr("punica_core.lora.packed.elements_of", shorter)
    tier = packed.tier()
    (ref,) = packed.add_many(1)
    assert "could not be loaded" in str(settle(tier, ref))
    assert tier.stats().gpu_resident == 0


def test_two_files_of_equal_content_share_one_copy(packed: Packed, tmp_path: Path) -> None:
    tier = packed.tier()
    (ref,) = packed.add_many(1)
    twin = tmp_path / "twin.punica"
    twin.write_bytes((tmp_path / "a0.punica").read_bytes())
    assert granted(tier, ref).slot == granted(tier, packed_ref(twin)).slot
    assert landing_of(tier).num_free == 9 * NUM_ELEMENTS


def test_a_forgotten_one_gives_its_room_back(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = packed.tier()
    landing = landing_of(tier)
    a, b = packed.add_many(2)
    granted(tier, a)
    tier.forget(a.path)
    wait_until(lambda: landing.num_free == 10 * NUM_ELEMENTS)
    fault_while_reading(monkeypatch, lambda: tier.forget(b.path))  # while it is read
    assert tier.acquire(b) is SkipReason.ADAPTER_LOADING
    wait_until(lambda: any(load.name == "a1" for load in tier.stats().loads))
    assert landing.num_free == 10 * NUM_ELEMENTS
    assert tier.stats().resident == 0


def test_a_read_that_hangs_keeps_its_room_until_it_returns(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may still be written to: nobody else may land there."""
    now = [time.monotonic()]  # `settle` polls by this clock
    tier = packed.tier(2 * NUM_ELEMENTS, clock=lambda: now[0], load_timeout=60.0)
    landing = landing_of(tier)
    stuck, other = packed.add_many(2)
    reached, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        if threading.current_thread() is readers[0]:
            reached.set()
            assert go_on.wait(PATIENCE)

    readers: list[threading.Thread] = []
    real = SourceFile.__init__

    def opened(file: SourceFile, path: str, *arguments: Any) -> None:
        readers.append(threading.current_thread())
        real(file, path, *arguments)

    monkeypatch.setattr(SourceFile, "__init__", opened)
    fault_while_reading(monkeypatch, hang)
    tier.acquire(stuck)
    assert reached.wait(PATIENCE)
    assert landing.num_free == NUM_ELEMENTS
    now[0] += 61.0
    assert isinstance(dict(tier.poll(now[0]))[stuck], AdapterLoadTimeout)
    assert landing.num_free == NUM_ELEMENTS
    packed.assert_stored(tier, granted(tier, other).slot, other)
    go_on.set()
    wait_until(lambda: landing.num_free == NUM_ELEMENTS)
    tier.forget(other.path)
    wait_until(lambda: landing.num_free == 2 * NUM_ELEMENTS)


def test_a_thousand_random_requests_always_find_what_was_granted(packed: Packed) -> None:
    choose = random.Random(3)
    tier = packed.tier(4 * NUM_ELEMENTS, num_elements=7 * NUM_ELEMENTS)
    ranks = (1, 2, 3, 5, 8, 16)
    refs = [packed.add(f"p{i}", rank, seed=i) for i, rank in enumerate(ranks * 2)]
    refs += [packed.others.add(f"m{i}", make_weights(f"m{i}", 4, seed=100 + i)) for i in range(4)]
    held: list[tuple[AdapterRef, AdapterGrant]] = []
    num_requests = num_grants = 0
    deadline = time.monotonic() + PATIENCE
    while num_requests < 1000 or num_grants < 100:
        assert time.monotonic() < deadline
        num_requests += 1
        if held and choose.random() < 0.5:
            ref, grant = held.pop(choose.randrange(len(held)))
            packed.assert_stored(tier, grant.slot, ref)
            tier.release(ref)
        ref = choose.choice(refs)
        if choose.random() < 0.03:
            tier.forget(ref.path)
        answer = tier.acquire(ref)
        if isinstance(answer, AdapterGrant):
            num_grants += 1
            packed.assert_stored(tier, answer.slot, ref)
            held.append((ref, answer))
        elif choose.random() < 0.3:
            tier.wait_for_load(0.01)
    for ref, _ in held:
        tier.release(ref)
    for ref in refs:
        tier.forget(ref.path)
    wait_until(lambda: landing_of(tier).num_free == 4 * NUM_ELEMENTS)
    wait_until(lambda: tier.arena.num_free == 7 * NUM_ELEMENTS)
    tier._host._table.check()
    assert tier.poll(time.monotonic()) == []


@pytest.mark.gpu
def test_it_comes_in_while_a_step_runs(packed: Packed) -> None:
    if packed.device != "cuda":
        pytest.skip("needs a stream of its own")
    tier = packed.tier(2 * NUM_ELEMENTS, num_elements=2 * NUM_ELEMENTS)
    refs = packed.add_many(5)
    granted(tier, refs[0])
    tier.release(refs[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    step = torch.cuda.Event()
    step.record()
    slots = []
    for ref in refs:
        slots.append(granted(tier, ref).slot)
        tier.release(ref)
    assert not step.query(), "no call waited for the step, and no copy did"
    torch.cuda.synchronize()
    packed.assert_stored(tier, slots[-1], refs[-1])
