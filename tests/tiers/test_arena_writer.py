"""What arrives in the arena is what `AdapterTables.write` would put there, however it is cut on the way."""

from __future__ import annotations

import pytest
import torch

from punica_core.lora.arena_layout import Run, lay_out
from punica_core.lora.arena_writer import ArenaWriter, device_bytes
from punica_core.lora.tables import AdapterTables, Arena, ModuleWeights, shape_of


def modules(dtype: torch.dtype, *ranks: int) -> dict[int, ModuleWeights]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        2 * i: ModuleWeights(draw(rank, 37), draw(19, rank), -0.5 * rank, draw(19) if i % 2 else None)
        for i, rank in enumerate(ranks)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("buffer_bytes", [1 << 20, 600, 160])
@pytest.mark.parametrize("num_runs", [1, 3])
def test_every_bit_is_that_of_the_tables_own_write(
    device: str, dtype: torch.dtype, buffer_bytes: int, num_runs: int
) -> None:
    adapter = modules(dtype, 1, 5, 16, 33)
    layout = lay_out({index: shape_of(module) for index, module in adapter.items()})
    expected_arena, expected_tables = Arena(layout.num_elements, dtype=dtype), AdapterTables(8, 3)
    expected_tables.write(1, adapter, expected_arena)

    arena, tables = Arena(20_000, dtype=dtype, device=device), AdapterTables(8, 3, device=device)
    arena.buffer.fill_(torch.nan)
    tables.records.fill_(77)
    writer = ArenaWriter(arena, tables, buffer_bytes=buffer_bytes)
    runs = cut(layout.part_sizes, num_runs)
    writer.write(1, adapter, layout, runs)

    there = arena.buffer.cpu()
    joined = torch.cat([there[run.start : run.start + run.length] for run in runs])
    # The gaps that align parts hold nothing that is read; the writer clears them, `write` leaves them.
    assert torch.equal(joined, expected_arena.buffer.nan_to_num())
    assert int(torch.isfinite(there).sum()) == layout.num_elements, "nothing else was touched"
    records = tables.records.cpu()
    assert (records[:, [0, 2]] == 77).all()
    if num_runs == 1:
        shift = torch.tensor([runs[0].start] * 3 + [0, 0, 0])
        own = expected_tables.records[:, 1]
        moved = torch.where((own >= 0) & (own[:, 4:5] != 0), own + shift, own)
        assert torch.equal(records[:, 1], moved)
    assert (records[1::2, 1] == 0).all(), "modules that are not adapted have rank 0"


def cut(sizes: list[int], num_runs: int) -> tuple[Run, ...]:
    """Runs that lie apart, in another order than their sources, cut between parts."""
    bounds = [sum(sizes[: len(sizes) * i // num_runs]) for i in range(num_runs + 1)]
    starts = [12_000, 160, 6_400]
    return tuple(Run(bounds[i], bounds[i + 1] - bounds[i], starts[i]) for i in range(num_runs))


def test_tensors_of_another_dtype_and_views_are_taken_too() -> None:
    a, b = torch.randn(4, 16), torch.randn(40, 4)
    module = ModuleWeights(a, b[8:27], 1.0, bias=torch.randn(19, dtype=torch.float64))
    layout = lay_out({0: shape_of(module)})
    arena, tables = Arena(layout.num_elements, dtype=torch.bfloat16), AdapterTables(1, 1)
    ArenaWriter(arena, tables).write(0, {0: module}, layout, (Run(0, layout.num_elements, 0),))
    place = layout.places[0]
    assert torch.equal(arena.buffer[place.a.start :][:64].view(4, 16), a.bfloat16())
    assert torch.equal(arena.buffer[place.b.start :][: 19 * 8].view(19, 8)[:, :4], b[8:27].bfloat16())
    assert place.bias is not None
    assert torch.equal(arena.buffer[place.bias.start :][:19], module.bias.bfloat16())  # type: ignore[union-attr]


def test_a_write_that_is_ended_points_no_slot_at_half_an_adapter(device: str) -> None:
    adapter = modules(torch.float32, 16, 16)
    layout = lay_out({index: shape_of(module) for index, module in adapter.items()})
    arena, tables = Arena(20_000, dtype=torch.float32, device=device), AdapterTables(8, 1, device=device)
    writer = ArenaWriter(arena, tables, buffer_bytes=512)
    calls: list[None] = []

    def stop() -> None:
        calls.append(None)
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        writer.write(0, adapter, layout, (Run(0, layout.num_elements, 0),), stop)
    writer.wait()
    assert not tables.records.any()
    writer.write(0, adapter, layout, (Run(0, layout.num_elements, 0),))
    assert torch.equal(arena.buffer[: 16 * 37].cpu().view(16, 37), adapter[0].a)


def test_a_row_longer_than_the_buffer_is_our_own_fault() -> None:
    adapter = {0: ModuleWeights(torch.zeros(65, 8), torch.zeros(4, 65), 1.0)}
    layout = lay_out({index: shape_of(module) for index, module in adapter.items()})
    writer = ArenaWriter(Arena(2000, dtype=torch.float32), AdapterTables(1, 1), buffer_bytes=128)
    with pytest.raises(AssertionError, match="longer than the buffer"):
        writer.write(0, adapter, layout, (Run(0, layout.num_elements, 0),))


def test_the_tables_take_what_is_said(device: str) -> None:
    arena, tables = Arena(8, dtype=torch.float32, device=device), AdapterTables(224, 4096, device=device)
    writer = ArenaWriter(arena, tables, buffer_bytes=64)
    assert tables.records.nbytes == 224 * 4096 * 48
    assert device_bytes(224, 4096) == tables.records.nbytes + writer._device_rows.nbytes
