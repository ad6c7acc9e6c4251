"""Where the parts of an adapter lie, and how they fit between others."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from punica_core.lora.arena_layout import ModuleShape, Run, lay_out, pieces, record_words
from punica_core.lora.free_ranges import FreeRanges, fewest_to_give
from punica_core.lora.tables import AdapterTables, Arena, ModuleWeights, shape_of
from punica_core.ops.layout import ROW_ALIGNMENT
from punica_core.ops.reference import read_record


def test_parts_follow_one_another_aligned_and_padded() -> None:
    layout = lay_out({"q": ModuleShape(5, 20, 12, has_bias=True), "v": ModuleShape(16, 20, 3, has_gain=True)})
    q, v = layout.places["q"], layout.places["v"]
    assert [(part.start, part.height, part.width, part.pitch) for part in (*q.parts, *v.parts)] == [
        (0, 5, 20, 20),  # 100 elements, padded to 104
        (104, 12, 5, 8),
        (200, 1, 12, 12),  # padded to 16
        (216, 16, 20, 20),
        (536, 3, 16, 16),
        (584, 1, 3, 3),
    ]
    assert q.gain is None
    assert v.bias is None
    assert layout.num_elements == 592 == sum(layout.part_sizes)


def test_a_record_gives_the_addresses_of_the_runs() -> None:
    layout = lay_out({0: ModuleShape(5, 20, 12, has_gain=True)})
    runs = (Run(0, 104, 1000), Run(104, 96, 40), Run(200, 16, 8))
    table = torch.tensor(record_words(layout.places[0], -0.25, runs)).view(1, 1, -1)
    record = read_record(table, 0, 0)
    assert (record.a_offset, record.b_offset, record.gain_offset, record.bias_offset) == (1000, 40, 8, -1)
    assert (record.lora_rank, record.scale) == (5, -0.25)
    with pytest.raises(ValueError, match="in none of 1 runs"):
        record_words(layout.places[0], 1.0, runs[:1])


def test_it_is_the_layout_that_the_tables_write() -> None:
    a, b = torch.randn(3, 10), torch.randn(7, 3)
    module = ModuleWeights(a, b, 2.0, torch.randn(7), torch.randn(7))
    arena, tables = Arena(512, dtype=torch.float32), AdapterTables(1, 1)
    arena.allocate(64)
    tables.write(0, {0: module}, arena)
    layout = lay_out({0: shape_of(module)})
    expected = record_words(layout.places[0], 2.0, (Run(0, layout.num_elements, 64),))
    assert tables.records[0, 0].tolist() == expected


def test_pieces_are_what_the_runs_hold_of_an_interval() -> None:
    runs = (Run(0, 16, 100), Run(16, 8, 50), Run(24, 40, 200))
    assert list(pieces(runs, 8, 32)) == [(8, 16, 108), (16, 24, 50), (24, 32, 200)]
    assert list(pieces(runs, 0, 8)) == [(0, 8, 100)]


def test_one_range_is_taken_where_there_is_one_even_behind_smaller_ones() -> None:
    free = FreeRanges(80)
    assert [free.take(8) for _ in range(10)] == list(range(0, 80, 8))
    for start in (0, 16, 40, 48, 56):
        free.give(start, 8)
    assert free.take_parts([8, 16]) == (Run(0, 24, 40),)
    assert free.num_free == 16


def test_without_one_the_parts_are_spread_over_several() -> None:
    free = FreeRanges(64)
    free.take(64)
    for start, length in ((0, 8), (16, 16), (40, 24)):
        free.give(start, length)
    assert free.take_parts([16, 8, 8, 8]) == (Run(0, 16, 16), Run(16, 24, 40))
    assert free.num_free == 8
    assert free.take(8) == 0


def test_parts_that_do_not_fit_change_nothing() -> None:
    free = FreeRanges(64)
    free.take(64)
    for start in (0, 16, 32):
        free.give(start, 8)
    assert free.take_parts([8, 16]) is None, "24 are free, but no 16 in a row"
    assert free.take_parts([8, 8, 8, 8]) is None
    assert free.num_free == 24
    assert free.take_parts([8, 8, 8]) == (Run(0, 8, 0), Run(8, 8, 16), Run(16, 8, 32))


sizes_of_parts = st.lists(st.integers(1, 5).map(lambda n: n * ROW_ALIGNMENT), min_size=1, max_size=6)


@given(st.data(), st.lists(sizes_of_parts, min_size=1, max_size=25))
@settings(max_examples=100, deadline=None)
def test_nobody_ever_gets_what_another_has_and_all_comes_back(data: st.DataObject, adapters: list[list[int]]) -> None:
    capacity = 256
    free, held = FreeRanges(capacity), []
    for sizes in adapters:
        if held and data.draw(st.booleans()):
            free.give_runs(held.pop(data.draw(st.integers(0, len(held) - 1))))
        before = free.num_free
        runs = free.take_parts(sizes)
        if runs is None:
            num_gaps = len(free._ranges)
            assert before < sum(sizes) + num_gaps * max(sizes), "the stated bound on what fits"
            assert free.num_free == before
            continue
        held.append(runs)
        assert [run.source for run in runs] == [sum(r.length for r in runs[:i]) for i in range(len(runs))]
        cuts = {sum(sizes[:count]) for count in range(len(sizes) + 1)}
        assert all({run.source, run.source + run.length} <= cuts for run in runs), "no part is cut"
        taken = sorted((run.start, run.start + run.length) for adapter in held for run in adapter)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
        assert taken[0][0] >= 0
        assert taken[-1][1] <= capacity
        assert free.num_free == capacity - sum(end - start for start, end in taken)
    for runs in held:
        free.give_runs(runs)
    assert free._ranges == [(0, capacity)]


def one_by_one(free: FreeRanges, owners: list[tuple[Run, ...]], sizes: list[int], at_least: int) -> int | None:
    """What `fewest_to_give` finds, by trying every count."""
    for count in range(at_least, len(owners) + 1):
        trial = free.copy()
        for runs in owners[:count]:
            trial.give_runs(runs)
        if trial.take_parts(sizes) is not None:
            return count
    return None


@given(st.data(), st.lists(sizes_of_parts, min_size=1, max_size=25), sizes_of_parts, st.integers(0, 2))
@settings(max_examples=300, deadline=None)
def test_as_few_give_their_ranges_as_it_takes(
    data: st.DataObject, adapters: list[list[int]], sizes: list[int], at_least: int
) -> None:
    free = FreeRanges(256)
    owners = [runs for runs in map(free.take_parts, adapters) if runs is not None]
    stay = data.draw(st.sets(st.integers(0, len(owners)))) if owners else set()
    owners = data.draw(st.permutations([runs for index, runs in enumerate(owners) if index not in stay]))
    before = list(free._ranges)
    assert fewest_to_give(free, owners, sizes, at_least=at_least) == one_by_one(free, owners, sizes, at_least)
    assert free._ranges == before


def test_the_search_among_thousands_tries_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs under the lock that the engine's steps take."""
    free = FreeRanges(4096 * 16)
    owners = [(Run(0, 16, start),) for start in range(0, free.num_free, 16)]
    assert free.take(free.num_free) == 0
    pinned_apart = owners[1::2][::-1] + owners[0:2048:2]  # of the first 2048 none has a neighbour
    trials: list[None] = []
    copy = FreeRanges.copy

    def counted(ranges: FreeRanges) -> FreeRanges:
        trials.append(None)
        return copy(ranges)

    monkeypatch.setattr(FreeRanges, "copy", counted)
    count = fewest_to_give(free, pinned_apart, [2048])
    assert count is not None
    assert count > 2048, "there is a lot to try: enough is free after 128"
    assert len(trials) < 30
    monkeypatch.undo()
    assert count == one_by_one(free, pinned_apart, [2048], at_least=count - 1)
