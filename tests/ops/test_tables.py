from __future__ import annotations

import dataclasses

import pytest
import torch

from punica_core.lora.tables import AdapterTables, Arena, ArenaFull, ModuleWeights
from punica_core.ops.layout import ROW_ALIGNMENT
from punica_core.ops.reference import read_record


def weights(lora_rank: int, seed: int = 0) -> ModuleWeights:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(lora_rank, 20, generator=generator)
    b = torch.randn(12, lora_rank, generator=generator)
    return ModuleWeights(a, b, 0.25, torch.ones(12), torch.full((12,), 2.0))


def test_an_arena_merges_what_is_given_back() -> None:
    arena = Arena(64, dtype=torch.float32)
    first, second, third = arena.allocate(10), arena.allocate(16), arena.allocate(32)
    assert (first, second, third) == (0, 16, 32)
    with pytest.raises(ArenaFull, match="0 of 64 are free"):
        arena.allocate(1)
    arena.release(first, 10)
    arena.release(third, 32)
    with pytest.raises(ArenaFull):
        arena.allocate(40)
    arena.release(second, 16)
    assert arena.num_free == 64
    assert arena.allocate(64) == 0


def test_a_written_module_reads_back_at_aligned_offsets() -> None:
    arena, tables = Arena(4096, dtype=torch.float32), AdapterTables(2, 3)
    arena.buffer.fill_(torch.nan)
    module = weights(5)
    tables.write(2, {1: module}, arena)
    record = read_record(tables.group(0, 2), 1, 2)
    assert (record.lora_rank, record.scale) == (5, 0.25)
    offsets = (record.a_offset, record.b_offset, record.gain_offset, record.bias_offset)
    assert all(offset % ROW_ALIGNMENT == 0 for offset in offsets)
    assert torch.equal(arena.buffer[record.a_offset :][:100].view(5, 20), module.a)
    stored = arena.buffer[record.b_offset :][: 12 * 8].view(12, 8)
    assert torch.equal(stored[:, :5], module.b)
    assert (stored[:, 5:] == 0).all()
    assert (arena.buffer[record.bias_offset :][:12] == 2).all()
    assert read_record(tables.group(0, 2), 0, 2).lora_rank == 0


def test_the_records_of_a_slot_lie_together() -> None:
    arena, tables = Arena(4096, dtype=torch.float32), AdapterTables(2, 3000)
    tables.write(2999, {0: weights(4), 1: weights(9)}, arena)
    slot = tables.records[:, 2999]
    assert slot.is_contiguous()
    assert (slot.storage_offset() + slot.numel()) == tables.records.numel()


def test_a_slot_knows_its_largest_rank_until_it_is_cleared() -> None:
    arena, tables = Arena(4096, dtype=torch.float32), AdapterTables(2, 3)
    tables.write(1, {0: weights(4), 1: weights(9)}, arena)
    assert tables.slot_rank.tolist() == [0, 9, 0]
    tables.clear(1, arena)
    assert tables.slot_rank.tolist() == [0, 0, 0]
    assert arena.num_free == 4096
    assert not tables.records.any()


@pytest.mark.parametrize("part", ["row_gain", "bias"])
def test_a_slot_knows_of_any_gain_or_bias_until_it_is_cleared(part: str) -> None:
    arena, tables = Arena(4096, dtype=torch.float32), AdapterTables(2, 3)
    changed = dataclasses.replace(weights(4), row_gain=None, bias=None)
    tables.write(1, {0: changed, 1: dataclasses.replace(changed, **{part: torch.ones(12)})}, arena)
    tables.write(2, {0: changed, 1: changed}, arena)
    assert tables.slot_affine.tolist() == [False, True, False]
    tables.clear(1, arena)
    assert not tables.slot_affine.any()


def test_an_adapter_that_does_not_fit_changes_nothing() -> None:
    arena, tables = Arena(256, dtype=torch.float32), AdapterTables(1, 2)
    with pytest.raises(ArenaFull):
        tables.write(0, {0: weights(64)}, arena)
    assert arena.num_free == 256
    tables.write(0, {0: weights(1)}, arena)
    with pytest.raises(ValueError, match="in use"):
        tables.write(0, {0: weights(1)}, arena)
