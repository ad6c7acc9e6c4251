"""When blocks run out: who yields, and that nothing of it shows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from punica_core.scheduler.plan import SkipReason
from tests.support.scheduling import BLOCK_SIZE, Rig, expected_tokens, make_rig, new_sequence


def crowded_rig(num_sequences: int = 2, **options: int) -> Rig:
    """Sequences whose prompts fit the 6 blocks together and whose outputs do not."""
    rig = make_rig(num_blocks=6, prefix_cache=False, **options)  # type: ignore[arg-type]
    rig.add(*(new_sequence(i, prompt=8, max_tokens=12) for i in range(num_sequences)))
    return rig


def test_preempted_equals_unpreempted() -> None:
    rig = crowded_rig()
    rig.run()
    assert rig.scheduler.counters.preemptions > 0
    for i in range(2):
        assert rig.tokens(i) == expected_tokens(new_sequence(i, prompt=8, max_tokens=12))
    rig.assert_idle()


def test_without_a_shortage_nothing_is_preempted() -> None:
    rig = crowded_rig(num_sequences=1)
    rig.run()
    assert rig.scheduler.counters.preemptions == 0


def test_the_newest_yields_and_the_oldest_never() -> None:
    rig = crowded_rig()
    rig.run()
    rows_of_oldest = [row for plan in rig.plans for row in plan.rows if row.sequence.request_id == 0]
    assert [row.start for row in rows_of_oldest] == [0, *range(8, 19)]


def test_emitted_tokens_are_computed_again_as_a_prompt_and_never_sampled_again() -> None:
    rig = crowded_rig()
    rig.run()
    rows = [row for plan in rig.plans for row in plan.rows if row.sequence.request_id == 1]
    resumed = next(row for row in rows[1:] if row.start == 0)
    assert resumed.count > 8
    assert sum(row.samples for row in rows) == 12


def test_prompt_logprobs_survive_a_preemption_in_mid_prefill_and_come_once() -> None:
    rig = make_rig(num_blocks=8, prefix_cache=False, max_num_seqs=2, max_num_batched_tokens=2)
    rig.add(new_sequence(0, prompt=4, max_tokens=20))
    for _ in range(3):
        rig.step()
    rig.add(new_sequence(1, prompt=16, max_tokens=2, prompt_logprobs=0))
    rig.run()
    rows = [row for plan in rig.plans for row in plan.rows if row.sequence.request_id == 1]
    second_start = [index for index, row in enumerate(rows) if row.start == 0][1]
    assert 0 < rows[second_start - 1].start < 15, "the case did not preempt in mid prefill"
    reports = [output.prompt_logprobs for output in rig.outputs[1]]
    assert [report is not None for report in reports] == [True, False]
    assert [entry.token_id for entry in reports[0] or []] == new_sequence(1, prompt=16).prompt_ids[1:]
    assert not any(len(row.sequence.prompt_logprobs) for row in rows), "what was sent is kept"


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_what_was_scored_is_computed_again_without_the_bound_on_scored_tokens(prompt_logprobs: int | None) -> None:
    rig = make_rig(num_blocks=6, max_scored_tokens=4, max_num_seqs=2)
    rig.add(new_sequence(0, prompt=8, max_tokens=12))
    rig.add(new_sequence(1, prompt=8, max_tokens=12, prompt_logprobs=prompt_logprobs))
    rig.run()
    rows = [row for plan in rig.plans for row in plan.rows if row.sequence.request_id == 1]
    again = max(index for index, row in enumerate(rows) if row.count > 1)
    assert rig.scheduler.counters.preemptions == 1
    assert [row.count for row in rows[:2]] == ([4, 4] if prompt_logprobs == 0 else [8, 1])
    assert rows[again].start > 0, "its own blocks were not found in the cache"
    assert rows[again].start + rows[again].count > 8
    assert rig.tokens(1) == expected_tokens(new_sequence(1, prompt=8, max_tokens=12))


def test_a_preempted_sequence_resumes_from_its_own_cached_blocks() -> None:
    rig = make_rig(num_blocks=6, prefix_cache=True)
    rig.add(*(new_sequence(i, prompt=8, max_tokens=12) for i in range(2)))
    rig.run()
    rows = [row for plan in rig.plans for row in plan.rows if row.sequence.request_id == 1]
    starts = [row.start for row in rows]
    assert rig.scheduler.counters.preemptions > 0
    assert any(0 < later < earlier for earlier, later in pairwise(starts))
    assert rig.tokens(1) == expected_tokens(new_sequence(1, prompt=8, max_tokens=12))


def test_blocks_found_by_the_sequence_itself_after_a_preemption_are_not_reported_as_cached() -> None:
    rig = make_rig(num_blocks=6, prefix_cache=True)
    rig.add(*(new_sequence(i, prompt=8, max_tokens=12) for i in range(2)))
    rig.run()
    assert rig.outputs[1][0].cached_tokens == 0
    assert rig.scheduler.counters.prefix_query_tokens == 16


def test_a_newcomer_leaves_a_block_for_each_running_sequence() -> None:
    rig = make_rig(num_blocks=6, prefix_cache=False)
    rig.add(new_sequence(0, prompt=8, max_tokens=12), new_sequence(1, prompt=4 * BLOCK_SIZE, max_tokens=2))
    plan = rig.step()
    assert [row.sequence.request_id for row in plan.rows] == [0]
    assert rig.scheduler.waiting_by_reason == {SkipReason.NO_BLOCKS: 1}


def test_a_sequence_that_needs_every_block_runs_alone() -> None:
    rig = make_rig(num_blocks=6, max_model_len=24, prefix_cache=False)
    rig.add(new_sequence(0, prompt=8, max_tokens=4), new_sequence(1, prompt=20, max_tokens=4), new_sequence(2))
    rig.run()
    assert rig.tokens(1) == expected_tokens(new_sequence(1, prompt=20, max_tokens=4))


def wait_of_a_big_sequence_among_small_ones(overtake_limit: float) -> tuple[float, int]:
    """Small sequences arrive every step and always find blocks. Returns the big one's wait and who overtook it."""
    rig = make_rig(num_blocks=12, prefix_cache=False, overtake_limit=overtake_limit, max_num_seqs=4)
    for i in range(80):
        rig.add(new_sequence(i, prompt=4, max_tokens=4))
        rig.step()
        if i == 4:
            rig.add(new_sequence(99, prompt=42, max_tokens=2))
            arrival = rig.now
        if 99 in rig.started:
            break
    num_overtook = sum(start > arrival for request_id, start in rig.started.items() if request_id != 99)
    return rig.started.get(99, float("inf")) - arrival, num_overtook


def test_small_sequences_overtake_a_big_one_only_until_it_is_overdue() -> None:
    waited, num_overtook = wait_of_a_big_sequence_among_small_ones(overtake_limit=1.0)
    assert num_overtook > 0, "nothing overtook it: the case shows nothing"
    assert waited <= 1.0 + 5 * 0.1, "its limit, then at most the 4 steps of the small ones that run"


def test_without_the_limit_small_sequences_starve_a_big_one() -> None:
    waited, num_overtook = wait_of_a_big_sequence_among_small_ones(overtake_limit=1e9)
    assert waited == float("inf")
    assert num_overtook > 50
