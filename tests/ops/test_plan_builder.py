"""The compiled plan builder writes what the numpy reference writes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from punica_core.ops import build, plan
from punica_core.ops.layout import NUM_COUNTERS, Header

SLOT_RANK = torch.tensor([16, 1, 0, 64, 200, 33, 256, 8], dtype=torch.int32)
MAX_SEGMENTS = 40
CAPACITY = plan.capacity(6000, MAX_SEGMENTS, 256)

segments = st.lists(st.tuples(st.integers(0, 150) | st.integers(200, 600), st.integers(-1, 7)), max_size=12)


@pytest.fixture(scope="module")
def compiled(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Registers the builder alone: the kernels take minutes to compile."""
    tools = build.Toolchain.find()
    library: Path = tmp_path_factory.mktemp("plan") / "plan.so"
    source = tools.sources / "src" / "bindings_plan.cpp"
    include = [f"-I{tools.sources / 'include'}", f"-I{tools.torch_include}"]
    link = ["-shared", "-Xlinker", "--no-as-needed", f"-L{tools.torch_lib}", "-ltorch"]
    subprocess.run([nvcc, *build.FLAGS, *include, str(source), *link, "-o", str(library)], check=True)
    torch.ops.load_library(str(library))
    assert torch._C._dispatch_has_kernel_for_dispatch_key("punica::build_plan", "CPU")


def blank() -> torch.Tensor:
    return torch.full((CAPACITY,), -7, dtype=torch.int32)


def columns(runs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths, slots = np.asarray(runs, np.int32).reshape(-1, 2).T
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.from_numpy(indptr), torch.from_numpy(slots.copy())


@pytest.mark.usefixtures("compiled")
@settings(deadline=None, max_examples=400)
@given(segments)
def test_plans_of_segments_are_equal_word_for_word(runs: list[tuple[int, int]]) -> None:
    indptr, slots = columns(runs)
    want, got = blank(), blank()
    used = plan._reference_plan(want, indptr, slots, SLOT_RANK, 256)
    assert plan.build_plan(got, indptr, slots, SLOT_RANK, 256) == used
    assert torch.equal(got, want)


@pytest.mark.usefixtures("compiled")
@settings(deadline=None, max_examples=200)
@given(segments)
def test_plans_of_rows_are_equal_word_for_word(runs: list[tuple[int, int]]) -> None:
    rows = torch.tensor([slot for count, slot in runs for _ in range(count)], dtype=torch.int32)
    want, got = blank(), blank()
    used = plan._reference_row_plan(want, rows, SLOT_RANK, MAX_SEGMENTS, 256)
    assert plan.build_row_plan(got, rows, SLOT_RANK, MAX_SEGMENTS, 256) == used
    assert torch.equal(got, want)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("builder", [plan.build_plan, plan._reference_plan])
@pytest.mark.parametrize(("rows", "tiles"), [(48, 3), (320, 5)], ids=["decode", "prompt"])
def test_no_tile_has_more_shares_than_the_capacity_counts_with(builder, rows: int, tiles: int) -> None:
    indptr, slot = torch.tensor([0, rows], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for rank in range(1, 257):
        words = blank()
        builder(words, indptr, slot, torch.tensor([rank], dtype=torch.int32), 256)
        assert words[Header.NUM_EXPAND_SHARES] == tiles * plan.most_shares(rank)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("builder", [plan.build_plan, plan._reference_plan])
@pytest.mark.parametrize(
    ("adapters", "rows", "rank", "heights"),
    [
        (1, 16, 64, {8}),
        (1, 32, 64, {8}),
        (4, 16, 64, {8}),
        (5, 16, 64, {16}),
        (11, 12, 64, {12}),
        (32, 8, 64, {8}),
        (15, 16, 16, {8}),
        (16, 12, 33, {12}),
        (30, 12, 64, {8, 4}),  # a prompt step
    ],
)
def test_tiles_are_short_where_that_makes_work_for_the_gpu(builder, adapters, rows, rank, heights) -> None:
    words = blank()
    builder(
        words, *columns([(rows, i) for i in range(adapters)]), torch.full((adapters,), rank, dtype=torch.int32), 256
    )
    for start, count in (
        (Header.SHRINK_OFFSET, Header.NUM_SHRINK_UNITS),
        (Header.EXPAND_OFFSET, Header.NUM_EXPAND_SHARES),
    ):
        items = words[words[start] : words[start] + 4 * words[count]].view(-1, 4)
        assert set(items[:, 1].tolist()) == heights


@pytest.mark.usefixtures("compiled")
def test_a_rank_that_is_too_large_is_returned_as_its_negative() -> None:
    indptr, slots = columns([(2, 3), (1, 4), (0, 6)])
    assert plan.build_plan(blank(), indptr, slots, SLOT_RANK, 64) == -200
    assert plan._reference_plan(blank(), indptr, slots, SLOT_RANK, 64) == -200


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("indptr", "slots", "words", "message"),
    [
        ([0, 2, 1], [0, 1], CAPACITY, "not decrease, see entry 2"),
        ([1, 2], [0], CAPACITY, "start at 0"),
        ([0, 2], [8], CAPACITY, "slot 8"),
        ([0, 2], [0, 1], CAPACITY, "one entry more"),
        ([0, 64], [4], 60, "60 words"),
        ([0, 64], [4], 60 + NUM_COUNTERS, f"{60 + NUM_COUNTERS} words"),
    ],
    ids=["order", "start", "slot", "count", "no room for counters", "room for the segments only"],
)
def test_what_is_wrong_is_named_and_nothing_behind_the_plan_is_written(indptr, slots, words, message) -> None:
    storage = blank()
    arguments = (torch.tensor(indptr, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32), SLOT_RANK, 256)
    with pytest.raises(RuntimeError, match=message):
        plan.build_plan(storage[:words], *arguments)
    assert (storage[words:] == -7).all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("builder", [plan.build_plan, plan._reference_plan])
@pytest.mark.parametrize("runs", [[(40, 3), (9, 0)], [(40, 3), (70, -1)]], ids=["units last", "blanks last"])
def test_a_plan_reaches_to_its_counters_and_no_farther(builder, runs) -> None:
    arguments = (*columns(runs), SLOT_RANK, 256)
    used = builder(blank(), *arguments)
    words = blank()[: used + NUM_COUNTERS]
    assert builder(words, *arguments) == used
    assert (words[used:] == -7).all()
    with pytest.raises(RuntimeError, match=f"does not fit {len(words) - 1} words"):
        builder(blank()[: len(words) - 1], *arguments)


@pytest.mark.usefixtures("compiled")
def test_too_many_segments_of_rows_are_refused() -> None:
    rows = torch.arange(6, dtype=torch.int32)
    for builder in (plan.build_row_plan, plan._reference_row_plan):
        with pytest.raises(RuntimeError, match="6 segments"):
            builder(blank(), rows, SLOT_RANK, 5, 256)


@pytest.mark.parametrize(
    ("rows", "rank", "is_summed"),
    [(16, 256, False), (17, 32, True), (17, 24, False), (256, 24, False), (257, 8, True)],
)
def test_who_sums_follows_from_rows_and_ranks(rows: int, rank: int, is_summed: bool) -> None:
    assert plan.sums_in_shrink(rows, rank) == is_summed
