"""The prefix cache as the scheduler uses it: a hit equals a miss, and only what may be shared is."""

from __future__ import annotations

import pytest

from punica_core.protocol import AdapterRef
from punica_core.scheduler.plan import StepResult
from tests.support.residency import adapter_ref
from tests.support.scheduling import BLOCK_SIZE, Rig, expected_tokens, make_rig, new_sequence

PROMPT = list(range(20, 37))  # four full blocks and one token


def cached_tokens(rig: Rig, request_id: int) -> int:
    return rig.outputs[request_id][0].cached_tokens


def ask_twice(first: dict[str, object], second: dict[str, object]) -> Rig:
    rig = make_rig()
    for request_id, options in enumerate((first, second)):
        rig.add(new_sequence(request_id, PROMPT, **options))  # type: ignore[arg-type]
        rig.run()
    return rig


def test_a_hit_equals_a_miss() -> None:
    rig = ask_twice({}, {})
    assert (cached_tokens(rig, 0), cached_tokens(rig, 1)) == (0, 16)
    assert rig.tokens(0) == rig.tokens(1) == expected_tokens(new_sequence(1, PROMPT))
    assert rig.scheduler.counters.prefix_hit_tokens == 16
    assert rig.scheduler.counters.prefix_query_tokens == 34


def test_without_a_prefix_cache_nothing_is_found() -> None:
    rig = make_rig(prefix_cache=False)
    for request_id in range(2):
        rig.add(new_sequence(request_id, PROMPT))
        rig.run()
    assert cached_tokens(rig, 1) == 0


@pytest.mark.parametrize("other", [None, adapter_ref("b"), adapter_ref("a", version=2)])
def test_another_adapter_or_other_files_under_its_name_share_nothing(other: AdapterRef | None) -> None:
    rig = ask_twice({"adapter": adapter_ref("a")}, {"adapter": other})
    assert cached_tokens(rig, 1) == 0
    assert rig.tokens(1) == expected_tokens(new_sequence(1, PROMPT, adapter=other))


def test_the_same_adapter_shares() -> None:
    rig = ask_twice({"adapter": adapter_ref("a")}, {"adapter": adapter_ref("a")})
    assert cached_tokens(rig, 1) == 16


def test_tenants_share_nothing() -> None:
    assert cached_tokens(ask_twice({"tenant": "t"}, {"tenant": "u"}), 1) == 0
    assert cached_tokens(ask_twice({"tenant": "t"}, {"tenant": "t"}), 1) == 16


def test_prompt_logprobs_never_read_the_cache_but_fill_it() -> None:
    assert cached_tokens(ask_twice({}, {"prompt_logprobs": 0}), 1) == 0
    assert cached_tokens(ask_twice({"prompt_logprobs": 0}, {}), 1) == 16


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation() -> None:
    rig = make_rig()
    rig.add(first := new_sequence(0, PROMPT, max_tokens=8))
    rig.run()
    history = [*PROMPT, *expected_tokens(first)]
    rig.add(new_sequence(1, [*history, 1, 2]))
    rig.run()
    assert cached_tokens(rig, 1) == 24
    assert rig.tokens(1) == expected_tokens(new_sequence(1, [*history, 1, 2]))


def test_running_sequences_share_blocks_and_free_them_last_one_out() -> None:
    rig = make_rig(num_blocks=10)
    rig.add(new_sequence(0, PROMPT, max_tokens=8))
    rig.step()
    rig.step()
    rig.add(new_sequence(1, PROMPT, max_tokens=3))
    plan = rig.step()
    tables = {row.sequence.request_id: row.block_table for row in plan.rows}
    assert tables[0][:4] == tables[1][:4]
    rig.run()
    rig.assert_idle()


def test_what_a_cancelled_step_computed_is_not_published() -> None:
    rig = make_rig(max_num_batched_tokens=32)
    rig.add(new_sequence(0, PROMPT))
    plan = rig.scheduler.schedule(0.0)
    rig.cancel(0)
    rig.finish(plan, rig.model.execute(plan))
    rig.add(new_sequence(1, PROMPT))
    rig.run()
    assert cached_tokens(rig, 1) == 0


def test_blocks_of_a_row_that_failed_are_not_found_again() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, PROMPT))
    rig.step()
    plan = rig.scheduler.schedule(rig.now)
    assert len(PROMPT) > plan.rows[0].start > BLOCK_SIZE, "no block was published before the failure"
    rig.finish(plan, StepResult(failed={0: "logits are not finite"}))
    rig.add(new_sequence(1, PROMPT))
    rig.run()
    assert cached_tokens(rig, 1) == 0


def test_a_pool_full_of_cached_blocks_is_as_good_as_an_empty_one() -> None:
    rig = make_rig(num_blocks=6)
    for request_id in range(8):
        rig.add(new_sequence(request_id, prompt=17))
        rig.run()
        assert rig.tokens(request_id) == expected_tokens(new_sequence(request_id, prompt=17))
    assert rig.scheduler.counters.preemptions == 0
