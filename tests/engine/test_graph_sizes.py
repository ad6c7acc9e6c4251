"""Which captured step a step is padded to."""

from __future__ import annotations

import pytest

from punica_core.engine.graphs import MAX_PROMPTS, GraphSizes, mixed_sizes
from punica_core.engine.step_batch import BatchSizes
from punica_core.lora.table_step import LoRAOrder
from punica_core.scheduler.plan import StepWork

SIZES = GraphSizes.of(max_num_seqs=128, max_num_batched_tokens=512)


@pytest.mark.parametrize("limit", [1, 2, 3, 31, 64, 100, 128, 256, 1000])
def test_decode_sizes_ascend_and_the_last_fits_the_limit(limit: int) -> None:
    sizes = GraphSizes.of(limit, 2048)
    assert sorted(set(sizes.decode)) == list(sizes.decode)
    assert sizes.decode[-1] >= min(limit, 256)
    assert len(sizes.decode) == 1 or sizes.decode[-2] < limit
    assert sizes.mixed[0] == 0
    assert sizes.mixed[-1] == sizes.decode[-1]
    assert sorted(set(sizes.mixed)) == list(sizes.mixed)


@pytest.mark.parametrize(
    ("rows", "fitting"),
    [
        ((1, 0, 0), BatchSizes(2)),
        ((9, 0, 0), BatchSizes(16)),
        ((128, 0, 0), BatchSizes(128)),
        ((129, 0, 0), None),
        ((0, 2, 1), mixed_sizes(0, 64)),
        ((1, 65, 1), mixed_sizes(32, 128)),
        ((33, 512, MAX_PROMPTS), mixed_sizes(64, 512)),
        ((33, 513, 1), None),
        ((33, 100, MAX_PROMPTS + 1), None),
        ((129, 100, 1), None),
    ],
)
def test_a_step_is_padded_to_the_smallest_that_fits(rows: tuple[int, int, int], fitting: BatchSizes | None) -> None:
    assert SIZES.fit(*rows) == fitting


def test_every_step_that_can_be_chosen_is_captured_and_none_exceeds_the_largest() -> None:
    steps = SIZES.steps()
    assert steps == sorted(steps, key=lambda step: -step.num_rows)
    chosen = {
        SIZES.fit(decode, rows, prompts) for decode in range(129) for rows, prompts in ((0, 0), (70, 2), (500, 9))
    }
    assert chosen <= set(steps)
    assert len(steps) == len(set(steps))
    largest = SIZES.largest
    for step in steps:
        assert step.num_decode <= largest.num_decode
        assert step.num_prompt_rows <= largest.num_prompt_rows
        assert step.num_logits <= largest.num_logits


@pytest.mark.parametrize("whole_mixed", [False, True])
def test_decode_rows_are_captured_both_ways_beside_prompts_only_if_asked(whole_mixed: bool) -> None:
    sizes = GraphSizes.of(max_num_seqs=128, max_num_batched_tokens=512, whole_mixed=whole_mixed)
    for order in (LoRAOrder.BESIDE, LoRAOrder.NONE):
        assert sizes.cuts(BatchSizes(32), order) == (True, False)
        assert sizes.cuts(mixed_sizes(32, 64), order) == ((True, False) if whole_mixed else (True,))
        assert sizes.cuts(mixed_sizes(0, 64), order) == (True,), "no decode rows, no contexts of theirs"
    beside = sum(1 for step in sizes.steps() if step.num_decode and step.num_prompts)
    assert beside == 4 * 6
    assert sizes.num_graphs(lora=False) == 2 * len(sizes.decode) + 5 * 6 + (beside if whole_mixed else 0)


@pytest.mark.parametrize("inside_rows", [0, 64, 128])
@pytest.mark.parametrize("whole_mixed", [False, True])
def test_there_is_a_graph_of_every_order_that_a_step_may_need(whole_mixed: bool, inside_rows: int) -> None:
    sizes = GraphSizes.of(
        max_num_seqs=128, max_num_batched_tokens=512, whole_mixed=whole_mixed, inside_rows=inside_rows
    )
    keys = {step: sizes.keys(step, lora=True) for step in sizes.steps()}
    for step, each in keys.items():
        orders = {LoRAOrder.BESIDE, LoRAOrder.NONE}
        orders |= {LoRAOrder.AHEAD} if step.num_rows > 256 else set()
        orders |= {LoRAOrder.INSIDE} if step.num_rows <= inside_rows else set()
        assert {(key.order, key.cut) for key in each} == {(o, cut) for o in orders for cut in sizes.cuts(step, o)}
        assert all(key.sizes == step for key in each)
        base = [(key.order, key.cut) for key in sizes.keys(step, lora=False)]
        assert base == [(LoRAOrder.NONE, cut) for cut in sizes.cuts(step, LoRAOrder.NONE)]
    assert {len({key.order for key in each}) for each in keys.values()} == {2, 3}
    assert sizes.num_graphs(lora=True) == len({key for each in keys.values() for key in each})


def test_large_steps_behind_the_base_product_are_captured_with_contexts_in_pieces_only() -> None:
    sizes = GraphSizes.of(max_num_seqs=128, max_num_batched_tokens=512, whole_mixed=True)
    large, small = mixed_sizes(32, 256), mixed_sizes(32, 192)
    assert sizes.cuts(large, LoRAOrder.BESIDE) == (True,)
    assert sizes.cuts(large, LoRAOrder.AHEAD) == sizes.cuts(large, LoRAOrder.NONE) == (True, False)
    assert sizes.cuts(small, LoRAOrder.BESIDE) == (True, False)


def test_without_graphs_nothing_fits() -> None:
    assert GraphSizes().fit(1, 0, 0) is None
    assert GraphSizes().fit(1, 10, 1) is None
    assert GraphSizes().largest == BatchSizes(0)


@pytest.mark.parametrize(("decode", "prompt_rows", "prompts"), [(1, 0, 0), (33, 0, 0), (1, 65, 1), (70, 512, 16)])
def test_who_plans_steps_is_told_what_they_are_padded_to(decode: int, prompt_rows: int, prompts: int) -> None:
    fitting = SIZES.fit(decode, prompt_rows, prompts)
    padded = SIZES.step_sizes().padded(StepWork(decode, prompt_rows, prompts, 7))
    assert fitting is not None
    assert (padded.decode_rows, padded.prompt_rows) == (fitting.num_decode, fitting.num_prompt_rows)


def test_what_is_not_captured_is_not_padded() -> None:
    work = StepWork(129, 513, MAX_PROMPTS + 1, 7)
    assert SIZES.fit(work.decode_rows, work.prompt_rows, work.prompts) is None
    assert SIZES.step_sizes().padded(work) == work
    assert GraphSizes().step_sizes().padded(work) == work
