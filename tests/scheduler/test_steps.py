"""What a step contains, and what its result means."""

from __future__ import annotations

from punica_core.protocol import FinishReason
from punica_core.scheduler.plan import BASE_SLOT, SkipReason
from tests.support.residency import adapter_ref
from tests.support.scheduling import expected_tokens, make_rig, new_sequence


def test_a_sequence_generates_what_it_generates_alone() -> None:
    rig = make_rig()
    requests = [new_sequence(i, prompt=5 + i, adapter=adapter_ref("ab"[i % 2])) for i in range(6)]
    rig.add(*requests)
    rig.run()
    assert all(rig.tokens(request.request_id) == expected_tokens(request) for request in requests)
    rig.assert_idle()


def test_64_sequences_of_mixed_adapters_that_arrive_together_start_in_one_step() -> None:
    rig = make_rig(num_blocks=256, num_slots=4, max_num_seqs=64, max_num_batched_tokens=512)
    adapters = [None, *(adapter_ref(name) for name in "abcd")]
    prompts = [[i % 8, i // 8, *range(6)] for i in range(64)]
    rig.add(*(new_sequence(i, prompt, adapter=adapters[i % len(adapters)]) for i, prompt in enumerate(prompts)))
    plan = rig.step()
    assert len(plan.rows) == 64
    assert all(row.samples for row in plan.rows)
    assert len({row.slot for row in plan.rows}) == 5


def test_a_prompt_longer_than_the_budget_is_prefilled_in_chunks() -> None:
    rig = make_rig(max_num_batched_tokens=8)
    request = new_sequence(1, prompt=20, max_tokens=2)
    rig.add(request)
    rig.run()
    assert [[(row.start, row.count, row.samples) for row in plan.rows] for plan in rig.plans] == [
        [(0, 8, False)],
        [(8, 8, False)],
        [(16, 4, True)],
        [(20, 1, True)],
    ]
    assert rig.tokens(1) == expected_tokens(request)


def test_decoding_sequences_get_their_token_before_a_prefill_takes_the_rest() -> None:
    rig = make_rig(max_num_batched_tokens=8)
    rig.add(new_sequence(1, prompt=3, max_tokens=9))
    rig.step()
    rig.add(new_sequence(2, prompt=30))
    plan = rig.step()
    assert {row.sequence.request_id: row.count for row in plan.rows} == {1: 1, 2: 7}


def test_rows_are_ordered_by_slot_with_the_base_model_first() -> None:
    rig = make_rig(max_num_batched_tokens=64)
    names = ["b", "", "a", "b", "", "a"]
    rig.add(*(new_sequence(i, adapter=adapter_ref(name) if name else None) for i, name in enumerate(names)))
    plan = rig.step()
    slots = [row.slot for row in plan.rows]
    assert slots == sorted(slots)
    assert slots[:2] == [BASE_SLOT] * 2
    assert [row.sequence.request_id for row in plan.rows[:2]] == [1, 4]


def test_a_sequence_ends_with_length_at_max_tokens() -> None:
    rig = make_rig()
    rig.add(new_sequence(1, max_tokens=3))
    rig.run()
    assert rig.end(1).finish_reason is FinishReason.LENGTH
    assert len(rig.tokens(1)) == 3


def test_equal_calls_give_equal_plans() -> None:
    def trace() -> list[list[tuple[int, int, tuple[int, ...]]]]:
        rig = make_rig(num_blocks=10, num_slots=2, load_steps=1)
        for i in range(9):
            adapter, tenant = adapter_ref("abc"[i % 3]), "tu"[i % 2]
            rig.add(new_sequence(i, prompt=4 + i, max_tokens=12, adapter=adapter, tenant=tenant))
        rig.run()
        assert rig.scheduler.counters.preemptions > 0, "the case is too easy"
        return [[(row.sequence.request_id, row.start, row.block_table) for row in plan.rows] for plan in rig.plans]

    assert trace() == trace()


def test_prompts_that_are_scored_share_a_budget_of_their_own() -> None:
    """Each of their tokens needs logits; other rows use what is left of the step."""
    rig = make_rig(max_num_batched_tokens=32, max_scored_tokens=8)
    scored = [new_sequence(i, prompt=10, max_tokens=2, prompt_logprobs=0) for i in range(2)]
    rig.add(*scored, plain := new_sequence(2, prompt=10, max_tokens=2))
    counts = [{row.sequence.request_id: row.count for row in rig.step().rows} for _ in range(3)]
    assert counts[0] == {0: 8, 2: 10}
    assert rig.scheduler.waiting_by_reason == {}
    assert counts[1:] == [{0: 2, 1: 6, 2: 1}, {0: 1, 1: 4}]
    rig.run()
    for request in (*scored, plain):
        assert rig.tokens(request.request_id) == expected_tokens(request)
    for request in scored:
        (entries,) = (o.prompt_logprobs for o in rig.outputs[request.request_id] if o.prompt_logprobs is not None)
        assert [entry.token_id for entry in entries] == request.prompt_ids[1:]


def test_a_scored_prompt_without_room_is_passed_until_it_is_overdue() -> None:
    rig = make_rig(max_num_batched_tokens=64, max_scored_tokens=2, overtake_limit=0.25)
    for i in range(2):
        rig.add(new_sequence(i, prompt=20, max_tokens=1, prompt_logprobs=0))
    started = {}
    for i in range(2, 6):
        rig.add(new_sequence(i, max_tokens=1))
        started[i] = any(row.sequence.request_id == i for row in rig.step().rows)
        assert rig.scheduler.waiting_by_reason[SkipReason.NO_TOKENS] == (1 if started[i] else 2)
    assert started == {2: True, 3: True, 4: True, 5: False}
    rig.run()
    rig.assert_idle()
