"""Adapters that live in memory: a host tier without files, and what the GPU tier made of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Self

import torch

from punica_core.errors import AdapterInvalid, PunicaError
from punica_core.lora.gpu_tier import GpuAdapterTier
from punica_core.lora.layers import LinearGroup
from punica_core.lora.tables import ModuleWeights, matrices
from punica_core.lora.weights import AdapterWeights
from punica_core.ops.layout import row_pitch
from punica_core.ops.reference import read_record
from punica_core.protocol import AdapterRef
from punica_core.scheduler.plan import AdapterGrant, SkipReason
from tests.support.residency import adapter_ref

PATIENCE = 30.0
"""Seconds after which a test gives up on a thread; never waited for when all is well."""

GROUPS = (
    LinearGroup(0, ("layers.0.q", "layers.0.k"), 24, (13, 8)),
    LinearGroup(1, ("layers.0.o",), 13, (24,)),
    LinearGroup(2, ("layers.1.q", "layers.1.k"), 24, (13, 8)),
)
"""The linears of a base, of widths off every tile."""

SHAPES = {
    path: (group.in_features, out)
    for group in GROUPS
    for path, out in zip(group.paths, group.out_features, strict=True)
}


def make_weights(
    key: str, lora_rank: int = 4, *, seed: int = 0, extras: bool = False, dtype: torch.dtype = torch.float32
) -> AdapterWeights:
    """An adapter for GROUPS, on all linears; extras: with row gains and biases."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    modules = {
        path: ModuleWeights(
            draw(lora_rank, in_features),
            draw(out, lora_rank),
            0.5 + seed,
            draw(out) if extras else None,
            draw(out) if extras else None,
        )
        for path, (in_features, out) in SHAPES.items()
    }
    nbytes = sum(tensor.nbytes for module in modules.values() for tensor in matrices(module))
    return AdapterWeights(key, modules, nbytes)


def arena_elements(weights: AdapterWeights) -> int:
    """Elements of the arena that an adapter takes."""
    return sum(
        row_pitch(m.a.numel())
        + row_pitch(m.b.size(0) * row_pitch(m.b.size(1)))
        + sum(row_pitch(vector.numel()) for vector in (m.row_gain, m.bias) if vector is not None)
        for m in weights.modules.values()
    )


NUM_ELEMENTS = arena_elements(make_weights("x"))
"""Of the usual adapter: rank 4."""


class MemoryAdapters:
    """Implements `OpenAdapter`. reads: names of adapters, in the order in which they were read."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self._weights: dict[str, AdapterWeights] = {}

    def add(self, name: str, weights: AdapterWeights) -> AdapterRef:
        """A ref to `weights`; "broken" in its key stands for files that are refused."""
        self._weights[name] = weights
        return adapter_ref(name)

    def weights(self, ref: AdapterRef) -> AdapterWeights:
        return self._weights[ref.name]

    def open(self, ref: AdapterRef, *options: object) -> _Source:
        return _Source(self, ref.name, self._weights[ref.name])


class _Source:
    def __init__(self, adapters: MemoryAdapters, name: str, weights: AdapterWeights) -> None:
        self._adapters = adapters
        self._name = name
        self._weights = weights
        self.nbytes = weights.nbytes

    def read(self, progress: Callable[[], None] = lambda: None) -> AdapterWeights:
        self._adapters.reads.append(self._name)
        if "broken" in self._weights.key:
            raise AdapterInvalid("it is broken.")
        return self._weights

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def stored_matrices(tier: GpuAdapterTier, path: str, slot: int, shapes: Mapping[str, tuple[int, int]] = SHAPES) -> dict:
    """What the tables and the arena say of a module: lora_rank, scale and the matrices at its addresses."""
    index = [path for group in GROUPS for path in group.paths].index(path)
    in_features, out = shapes[path]
    record = read_record(tier.tables.records[index : index + 1].cpu(), 0, slot)
    rank, pitch = record.lora_rank, row_pitch(record.lora_rank)
    arena = tier.arena.buffer
    return {
        "lora_rank": rank,
        "scale": record.scale,
        "a": arena[record.a_offset :][: rank * in_features].view(rank, in_features).cpu(),
        "b": arena[record.b_offset :][: out * pitch].view(out, pitch)[:, :rank].cpu(),
        "gain": None if record.gain_offset < 0 else arena[record.gain_offset :][:out].cpu(),
        "bias": None if record.bias_offset < 0 else arena[record.bias_offset :][:out].cpu(),
    }


def assert_stored(tier: GpuAdapterTier, slot: int, weights: AdapterWeights) -> None:
    """Bit by bit: `slot` is this adapter. An adapter with modules left out has records of rank 0 there."""
    ranks = []
    for path in SHAPES:
        module = weights.modules.get(path)
        stored = stored_matrices(tier, path, slot)
        if module is None:
            assert stored["lora_rank"] == 0, path
            continue
        ranks.append(stored["lora_rank"])
        assert (stored["lora_rank"], stored["scale"]) == (module.a.size(0), module.scale), path
        for part, expected in (("a", module.a), ("b", module.b), ("gain", module.row_gain), ("bias", module.bias)):
            found = stored[part]
            assert (found is None) == (expected is None), (path, part)
            assert expected is None or torch.equal(found, expected), (path, part)
    assert tier.slot_rank[slot] == max(ranks)
    has_extras = any(m.row_gain is not None or m.bias is not None for m in weights.modules.values())
    assert tier.tables.slot_affine[slot] == has_extras


def settle(tier: GpuAdapterTier, ref: AdapterRef) -> AdapterGrant | PunicaError | SkipReason:
    """Ask as the scheduler does until there is an answer; no room is one."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        answer = tier.acquire(ref)
        if answer is not SkipReason.ADAPTER_LOADING:
            return answer
        failures = dict(tier.poll(time.monotonic()))
        if ref in failures:
            return failures[ref]
        tier.wait_for_load(0.05)
    raise AssertionError(f"no answer for {ref.name}")


def granted(tier: GpuAdapterTier, ref: AdapterRef) -> AdapterGrant:
    answer = settle(tier, ref)
    assert isinstance(answer, AdapterGrant), answer
    return answer


def add(adapters: MemoryAdapters, count: int, lora_rank: int = 4) -> list[AdapterRef]:
    return [adapters.add(f"a{seed}", make_weights(f"key {seed}", lora_rank, seed=seed)) for seed in range(count)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
