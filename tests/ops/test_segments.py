from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from punica_core.lora.segments import SegmentPlan
from punica_core.ops.layout import ITEM_WORDS, NUM_COUNTERS, Header

SLOT_RANK = np.asarray([16, 1, 0, 64, 200, 33], np.int32)


def items(plan: SegmentPlan, count: Header, offset: Header) -> np.ndarray:
    words = plan.plan.numpy()
    return words[words[offset] : words[offset] + ITEM_WORDS * words[count]].reshape(-1, ITEM_WORDS)


def room(plan: SegmentPlan) -> int:
    """Words between a plan and its counters."""
    words = plan.plan.numpy()
    used = words[Header.TILE_OFFSET] + ITEM_WORDS * words[Header.NUM_TILES]
    return len(words) - NUM_COUNTERS - int(used)


segments = st.lists(st.tuples(st.integers(0, 150), st.integers(-1, len(SLOT_RANK) - 1)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=200)
@given(segments)
def test_every_adapted_row_and_rank_is_covered_exactly_once(runs: list[tuple[int, int]]) -> None:
    lengths, slots = (np.asarray(column, np.int32) for column in zip(*runs, strict=True))
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    plan = SegmentPlan(2000, max_rank=256)
    plan.set_segments(indptr, slots, SLOT_RANK)
    row_slot = np.repeat(slots, lengths)
    expanded = np.zeros(len(row_slot))
    for start, count, slot, share in items(plan, Header.NUM_EXPAND_SHARES, Header.EXPAND_OFFSET):
        shares = share >> 16
        assert 0 <= share & 0xFFFF < shares
        assert 0 < count <= 64
        assert (row_slot[start : start + count] == slot).all()
        expanded[start : start + count] += 1 / shares
    tiled = np.zeros(len(row_slot), int)
    for start, count, slot, _ in items(plan, Header.NUM_TILES, Header.TILE_OFFSET):
        assert 0 < count <= 64
        assert (row_slot[start : start + count] == slot).all()
        tiled[start : start + count] += 1
    assert (tiled == [slot >= 0 and SLOT_RANK[slot] > 0 for slot in row_slot]).all()
    shrunk = np.zeros((len(row_slot), 256), int)
    for start, count, slot, ranks in items(plan, Header.NUM_SHRINK_UNITS, Header.SHRINK_OFFSET):
        assert 0 < count <= 64
        assert (row_slot[start : start + count] == slot).all()
        shrunk[start : start + count, ranks & 0xFFFF : (ranks & 0xFFFF) + (ranks >> 16)] += 1
    for row, slot in enumerate(row_slot):
        lora_rank = SLOT_RANK[slot] if slot >= 0 else 0
        assert expanded[row] == pytest.approx(1.0 if lora_rank > 0 else 0.0)
        assert (shrunk[row, :lora_rank] == 1).all()
        assert shrunk.max(initial=0) <= 1


def test_short_segments_get_short_rank_chunks_and_tall_ones_tall() -> None:
    plan = SegmentPlan(64, max_rank=64)
    plan.set_segments(np.asarray([0, 8, 41], np.int32), np.asarray([3, 3], np.int32), SLOT_RANK)
    units = items(plan, Header.NUM_SHRINK_UNITS, Header.SHRINK_OFFSET)
    assert [(int(n), int(w >> 16)) for _, n, _, w in units] == [(8, 16)] * 4 + [(16, 32), (16, 32)] * 2 + [(1, 32)] * 2


@pytest.mark.parametrize("padding", [0, 300])
def test_tiles_are_as_high_as_can_be_in_steps_of_any_number_of_rows(padding: int) -> None:
    plan = SegmentPlan(500, max_rank=64)
    slots = np.repeat(np.asarray([0, 3, 5, -1], np.int32), [130, 8, 33, padding])
    plan.set_rows(slots, SLOT_RANK)
    tiles = items(plan, Header.NUM_TILES, Header.TILE_OFFSET)
    assert tiles.tolist() == [[0, 64, 0, 0], [64, 64, 0, 0], [128, 2, 0, 0], [130, 8, 3, 0], [138, 33, 5, 0]]


@pytest.mark.parametrize(
    ("slots", "pitch"), [([0, 0, 1], 16), ([1], 8), ([5, -1, 0], 40), ([4, 3], 200), ([2, -1], 0), ([], 0)], ids=str
)
def test_low_rank_rows_lie_as_far_apart_as_the_steps_largest_rank_needs(slots: list[int], pitch: int) -> None:
    plan = SegmentPlan(8, max_rank=256)
    plan.set_rows(np.asarray(slots, np.int32), SLOT_RANK)
    assert plan.plan[Header.RANK_PITCH] == plan.rank_pitch == pitch


def test_an_empty_segment_moves_nothing_apart() -> None:
    plan = SegmentPlan(8, max_rank=256)
    plan.set_segments(np.asarray([0, 2, 2], np.int32), np.asarray([0, 4], np.int32), SLOT_RANK)
    assert plan.plan[Header.RANK_PITCH] == 16


def test_rows_become_segments_of_equal_neighbours() -> None:
    plan = SegmentPlan(8, max_rank=64)
    plan.set_rows(np.asarray([-1, 0, 0, 3, 0], np.int32), SLOT_RANK)
    assert plan.seg_indptr.tolist() == [0, 1, 3, 4, 5]
    assert plan.seg_slot.tolist() == [-1, 0, 3, 0]
    assert (plan.num_rows, plan.has_adapters) == (5, True)


def test_an_unchanged_step_is_not_sent_again() -> None:
    plan = SegmentPlan(8, max_rank=64)
    rows, ranks = np.asarray([0, 0, 3], np.int32), SLOT_RANK.copy()
    plan.set_rows(rows, ranks)
    plan.plan.fill_(-7)
    plan.set_rows(rows.copy(), ranks)
    assert (plan.plan == -7).all()


@pytest.mark.parametrize("change", ["rows", "rank", "segments between"])
def test_a_changed_step_is_sent(change: str) -> None:
    plan = SegmentPlan(8, max_rank=64)
    rows, ranks = np.asarray([0, 0, 3], np.int32), SLOT_RANK.copy()
    plan.set_rows(rows, ranks)
    if change == "rows":
        rows[1] = 1
    elif change == "rank":
        ranks[3] = 8
    else:
        plan.set_segments(np.asarray([0, 1], np.int32), np.asarray([1], np.int32), ranks)
    plan.plan.fill_(-7)
    plan.set_rows(rows, ranks)
    assert plan.plan[Header.NUM_ROWS] == 3


def test_a_step_without_rows_is_valid() -> None:
    plan = SegmentPlan(8, max_rank=64)
    plan.set_rows(np.empty(0, np.int32), SLOT_RANK)
    assert plan.plan[Header.NUM_SHRINK_UNITS] == plan.plan[Header.NUM_EXPAND_SHARES] == plan.plan[Header.NUM_ROWS] == 0
    assert not plan.has_adapters


def test_the_worst_case_fits_the_capacity() -> None:
    plan = SegmentPlan(4096, max_rank=256)
    plan.set_rows(np.arange(4096, dtype=np.int32), np.full(4096, 256, np.int32))
    assert len(items(plan, Header.NUM_SHRINK_UNITS, Header.SHRINK_OFFSET)) == 4096 * 16
    mixed = SegmentPlan(4096, max_rank=256, max_segments=100)
    lengths = np.asarray([9] * 99 + [4096 - 9 * 99])
    mixed.set_rows(np.repeat(np.arange(100, dtype=np.int32), lengths), np.full(100, 256, np.int32))
    assert mixed.num_rows == 4096


@pytest.mark.parametrize("max_rank", [1, 8, 16, 33, 64, 96, 97, 256])
@pytest.mark.parametrize(("segments", "length"), [(256, 1), (32, 8), (100, 9), (7, 33), (2, 500), (1, 1024)], ids=str)
def test_steps_of_the_largest_rank_fit_the_capacity(segments: int, length: int, max_rank: int) -> None:
    plan = SegmentPlan(segments * length, max_rank=max_rank, max_segments=segments)
    plan.set_rows(np.repeat(np.arange(segments, dtype=np.int32), length), np.full(segments, max_rank, np.int32))
    assert room(plan) >= 0


@pytest.mark.parametrize("max_rank", [64, 256])
def test_the_capacity_has_no_room_for_more_than_the_worst_step(max_rank: int) -> None:
    plan = SegmentPlan(1000, max_rank=max_rank)
    plan.set_rows(np.arange(1000, dtype=np.int32), np.full(1000, max_rank, np.int32))
    assert 0 <= room(plan) <= 2 * ITEM_WORDS  # not a share a tile
    plan.set_rows(np.arange(1000, dtype=np.int32), np.full(1000, max_rank // 2, np.int32))
    assert room(plan) >= 1000 * ITEM_WORDS


@pytest.mark.parametrize(
    ("indptr", "slots", "message"),
    [
        ([0, 9], [0], "9 rows"),
        ([0, 1, 2, 3], [0, 1, 3], "3 segments"),
        ([0, 1], [4], "lora_rank 200"),
        ([0], [0], "seg_indptr"),
    ],
    ids=["rows", "segments", "rank", "indptr"],
)
def test_what_does_not_fit_is_named(indptr, slots, message) -> None:
    plan = SegmentPlan(8, max_rank=64, max_segments=2)
    with pytest.raises(ValueError, match=message):
        plan.set_segments(np.asarray(indptr, np.int32), np.asarray(slots, np.int32), SLOT_RANK)
