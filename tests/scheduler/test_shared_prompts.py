"""What is asked for twice at once is computed once."""

from __future__ import annotations

import pytest

from punica_core.scheduler.plan import SkipReason
from tests.support.residency import adapter_ref
from tests.support.scheduling import Rig, expected_tokens, make_rig, new_sequence

PROMPT = list(range(20, 37))  # four full blocks and one token
OTHER = list(range(37, 48))


def rows(rig: Rig) -> list[list[tuple[int, int, int]]]:
    """(request_id, start, count) of every row of every step."""
    return [[(row.sequence.request_id, row.start, row.count) for row in plan.rows] for plan in rig.plans]


def ask(rig: Rig, *prompts: list[int], **options: object) -> None:
    """Put a request for each prompt at once; each must get the tokens it would get alone."""
    requests = [new_sequence(i, prompt, **options) for i, prompt in enumerate(prompts)]  # type: ignore[arg-type]
    rig.add(*requests)
    rig.run()
    for request in requests:
        assert rig.tokens(request.request_id) == expected_tokens(request)
    rig.assert_idle()


def test_choices_of_one_prompt_compute_it_once() -> None:
    rig = make_rig(max_num_batched_tokens=64)
    ask(rig, PROMPT, PROMPT, PROMPT, max_tokens=2)
    assert rows(rig) == [[(0, 0, 17)], [(0, 17, 1), (1, 16, 1), (2, 16, 1)], [(1, 17, 1), (2, 17, 1)]]
    assert rig.scheduler.counters.prefill_tokens == 17 + 1 + 1


def test_without_a_prefix_cache_they_start_together() -> None:
    rig = make_rig(max_num_batched_tokens=64, prefix_cache=False)
    ask(rig, PROMPT, PROMPT, max_tokens=2)
    assert rows(rig)[0] == [(0, 0, 17), (1, 0, 17)]


def test_a_chunked_prompt_is_waited_for_until_it_is_computed() -> None:
    rig = make_rig(max_num_batched_tokens=8, max_num_seqs=4)
    ask(rig, PROMPT, PROMPT, max_tokens=1)
    assert rows(rig) == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 1), (1, 16, 1)]]


@pytest.mark.parametrize(("num_shared", "waits"), [(8, False), (12, True), (16, True)])
def test_less_than_half_of_a_prompt_is_not_worth_a_wait(num_shared: int, waits: bool) -> None:
    rig = make_rig(max_num_batched_tokens=64)
    ask(rig, PROMPT[:16], PROMPT[:num_shared] + OTHER[: 16 - num_shared] + [1], max_tokens=1)
    assert len(rows(rig)[0]) == (1 if waits else 2)


def test_tokens_that_were_found_do_not_count_as_shared() -> None:
    """Two thirds of the prompts are in the cache already, and the rest differs."""
    rig = make_rig(max_num_batched_tokens=64)
    ask(rig, PROMPT[:9])
    rig.plans.clear()
    rig.add(*(new_sequence(9 + i, [*PROMPT[:8], i, *OTHER[:4]], max_tokens=1) for i in range(2)))
    rig.run()
    assert rows(rig) == [[(9, 8, 5), (10, 8, 5)]]


@pytest.mark.parametrize(
    "other",
    [{"tenant": "u"}, {"adapter": adapter_ref("a")}, {"prompt_logprobs": 0}],
    ids=["tenant", "adapter", "scored"],
)
def test_what_cannot_be_shared_is_not_waited_for(other: dict[str, object]) -> None:
    rig = make_rig(max_num_batched_tokens=64)
    rig.add(new_sequence(0, PROMPT), new_sequence(1, PROMPT, **other))  # type: ignore[arg-type]
    assert len(rig.step().rows) == 2


def test_others_go_on_meanwhile_and_the_reason_is_told() -> None:
    rig = make_rig(max_num_batched_tokens=32)
    rig.add(new_sequence(0, PROMPT), new_sequence(1, PROMPT), new_sequence(2, OTHER))
    assert [row.sequence.request_id for row in rig.step().rows] == [0, 2]
    assert rig.scheduler.waiting_by_reason == {SkipReason.PREFIX_COMPUTING: 1}


def test_nobody_waits_for_one_that_was_cancelled() -> None:
    rig = make_rig(max_num_batched_tokens=8)
    rig.add(*(new_sequence(i, PROMPT, max_tokens=1) for i in range(3)))
    rig.step()
    rig.cancel(0)
    assert [row.sequence.request_id for row in rig.step().rows] == [1], "the next one computes it, for both"
    rig.run()
    assert rig.tokens(1) == rig.tokens(2) == expected_tokens(new_sequence(1, PROMPT, max_tokens=1))


def test_an_overdue_sequence_does_not_wait() -> None:
    rig = make_rig(max_num_batched_tokens=8, max_scored_tokens=4, max_model_len=128, overtake_limit=0.25)
    long = [i % 48 for i in range(100)]
    rig.add(new_sequence(0, long, max_tokens=1, prompt_logprobs=0), new_sequence(1, long, max_tokens=1))
    for _ in range(4):
        rig.step()
    assert rows(rig) == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 4)], [(0, 12, 4), (1, 12, 4)]]
    rig.run()
    assert rig.tokens(0) == rig.tokens(1)
