"""Who gets an adapter, who waits for room, and for how long at most."""

from __future__ import annotations

import pytest

from punica_core.errors import AdapterInvalid
from punica_core.protocol import FinishReason
from punica_core.scheduler.plan import SkipReason
from tests.support.residency import adapter_ref
from tests.support.scheduling import Rig, expected_tokens, make_rig, new_sequence

COLD = 9999
LIMIT = 1.0
HOT_TOKENS = 6


def test_a_loading_adapter_blocks_nobody_behind_it() -> None:
    rig = make_rig(load_steps=5)
    rig.add(new_sequence(0, adapter=adapter_ref("cold")), new_sequence(1))
    plan = rig.step()
    assert [row.sequence.request_id for row in plan.rows] == [1]
    assert rig.scheduler.waiting_by_reason == {SkipReason.ADAPTER_LOADING: 1}
    rig.run()
    assert rig.tokens(0) == expected_tokens(new_sequence(0, adapter=adapter_ref("cold")))


def test_what_was_cancelled_waits_for_nothing() -> None:
    rig = make_rig(load_steps=5)
    rig.add(*(new_sequence(i, adapter=adapter_ref("cold")) for i in range(2)))
    rig.step()
    rig.cancel(0)
    assert rig.scheduler.stats().waiting_by_reason == {"adapter_loading": 2}, "the last step's, until the next"
    rig.cancel(1)
    assert rig.scheduler.stats().waiting_by_reason == {}


def test_an_adapter_without_room_blocks_nobody_behind_it() -> None:
    rig = make_rig(num_slots=1)
    rig.add(*(new_sequence(i, adapter=adapter_ref(name)) for i, name in enumerate("aba")), new_sequence(3))
    plan = rig.step()
    assert sorted(row.sequence.request_id for row in plan.rows) == [0, 2, 3]
    assert rig.scheduler.waiting_by_reason == {SkipReason.ADAPTER_NO_ROOM: 1}


def test_more_adapters_than_room_are_all_served() -> None:
    rig = make_rig(num_slots=2, load_steps=2)
    requests = [new_sequence(i, adapter=adapter_ref("abcdef"[i % 6])) for i in range(12)]
    rig.add(*requests)
    rig.run()
    assert all(rig.tokens(request.request_id) == expected_tokens(request) for request in requests)
    rig.assert_idle()


def test_an_adapter_in_use_is_pinned_once_for_each_running_sequence() -> None:
    rig = make_rig()
    ref = adapter_ref("a")
    rig.add(*(new_sequence(i, adapter=ref, max_tokens=2 + i) for i in range(3)))
    rig.step()
    assert rig.residency.pins[ref] == 3
    rig.step()
    assert rig.residency.pins[ref] == 2
    rig.run()
    assert rig.residency.pins[ref] == 0


def saturate_then_ask_for_a_cold_adapter(rig: Rig, num_hot: int, max_steps: int = 300) -> float:
    """Overlapping traffic on `num_hot` adapters that never pauses; seconds until a cold one's sequence starts."""
    next_id = 0
    for step in range(max_steps):
        if step == 10:
            rig.add(new_sequence(COLD, adapter=adapter_ref("cold")))
            asked = rig.now
        for hot in range(num_hot):
            rig.add(new_sequence(next_id, prompt=2, max_tokens=HOT_TOKENS, adapter=adapter_ref(f"hot{hot}")))
            next_id += 1
        rig.step()
        if COLD in rig.started:
            return rig.started[COLD] - asked
    return float("inf")


@pytest.mark.parametrize(("num_slots", "load_steps"), [(1, 0), (1, 4), (2, 0), (3, 2)])
def test_hot_adapters_starve_no_cold_one(num_slots: int, load_steps: int) -> None:
    rig = make_rig(
        num_slots=num_slots, load_steps=load_steps, max_num_seqs=64, max_num_batched_tokens=128, num_blocks=512
    )
    waited = saturate_then_ask_for_a_cold_adapter(rig, num_hot=num_slots)
    # One limit, then those that run when the door closes end within their tokens, then the load; 2 steps of grain.
    assert waited <= LIMIT + (HOT_TOKENS + load_steps + 2) * rig.step_seconds
    assert rig.scheduler.counters.preemptions == 0, "short sequences need not be preempted"


def test_without_the_limit_a_hot_adapter_starves_a_cold_one() -> None:
    rig = make_rig(num_slots=1, max_num_seqs=64, max_num_batched_tokens=128, num_blocks=512, adapter_wait_limit=1e9)
    assert saturate_then_ask_for_a_cold_adapter(rig, num_hot=1) == float("inf")


def waits_of_clients(num_adapters: int, num_slots: int, load_steps: int, seconds: float) -> list[float]:
    """Three clients an adapter, each asking again as soon as it was answered. Seconds that each request waited."""
    rig = make_rig(num_slots=num_slots, load_steps=load_steps, max_num_seqs=64, max_num_batched_tokens=64)
    asked: dict[int, float] = {}
    live: dict[int, int] = {}
    while rig.now < seconds:
        for client in range(3 * num_adapters):
            if client not in live or (rig.outputs[live[client]][-1:] and rig.outputs[live[client]][-1].finish_reason):
                live[client] = request_id = len(asked)
                asked[request_id] = rig.now
                name = f"adapter{client % num_adapters}"
                rig.add(new_sequence(request_id, prompt=2, max_tokens=HOT_TOKENS, adapter=adapter_ref(name)))
        rig.step()
    return [rig.started.get(request_id, rig.now) - time for request_id, time in asked.items()]


@pytest.mark.parametrize(("num_adapters", "num_slots", "load_steps"), [(3, 2, 0), (5, 2, 2), (4, 1, 1)])
def test_more_hot_adapters_than_room_take_turns(num_adapters: int, num_slots: int, load_steps: int) -> None:
    waits = waits_of_clients(num_adapters, num_slots, load_steps, seconds=40.0)
    turn = 2 * LIMIT + (HOT_TOKENS + load_steps + 2) * 0.1
    assert max(waits) <= num_adapters * turn


def test_newer_sequences_yield_after_two_limits_however_long_they_are() -> None:
    rig = make_rig(num_slots=1, num_blocks=512, max_model_len=512, max_num_seqs=8)
    rig.add(new_sequence(0, prompt=2, max_tokens=4, adapter=adapter_ref("hot")))
    rig.step()
    rig.add(new_sequence(COLD, adapter=adapter_ref("cold")))
    asked = rig.now
    rig.add(new_sequence(1, prompt=2, max_tokens=200, adapter=adapter_ref("hot")))
    while COLD not in rig.started:
        rig.step()
    assert rig.started[COLD] - asked <= 2 * LIMIT + 2 * rig.step_seconds
    assert rig.scheduler.counters.preemptions == 1
    rig.run()
    assert rig.tokens(1) == expected_tokens(new_sequence(1, prompt=2, max_tokens=200, adapter=adapter_ref("hot")))


def test_older_sequences_never_yield_their_adapter() -> None:
    rig = make_rig(num_slots=1, num_blocks=512, max_model_len=512)
    rig.add(new_sequence(0, prompt=2, max_tokens=60, adapter=adapter_ref("old")))
    rig.step()
    rig.add(new_sequence(COLD, adapter=adapter_ref("cold")))
    rig.run()
    assert rig.scheduler.counters.preemptions == 0
    assert rig.started[COLD] == pytest.approx(60 * rig.step_seconds)


def test_the_adapter_that_loses_least_work_yields() -> None:
    rig = make_rig(num_slots=3, num_blocks=512, max_model_len=512)
    rig.add(new_sequence(0, prompt=2, max_tokens=30, adapter=adapter_ref("old")))
    rig.add(new_sequence(1, prompt=2, max_tokens=4, adapter=adapter_ref("x")))
    rig.add(new_sequence(2, prompt=2, max_tokens=4, adapter=adapter_ref("y")))
    rig.step()
    rig.add(new_sequence(COLD, adapter=adapter_ref("cold")))
    rig.add(new_sequence(3, prompt=9, max_tokens=200, adapter=adapter_ref("x")))
    rig.add(new_sequence(4, prompt=2, max_tokens=200, adapter=adapter_ref("y")))
    while COLD not in rig.started:
        rig.step()
    running = {row.sequence.request_id for row in rig.plans[-1].rows}
    assert {0, 3} <= running
    assert 4 not in running


def test_a_failed_load_ends_those_that_wait_for_it_and_nobody_else() -> None:
    rig = make_rig(load_steps=5)
    bad, good = adapter_ref("bad"), adapter_ref("good")
    rig.add(*(new_sequence(i, adapter=ref) for i, ref in enumerate([bad, good, bad])))
    rig.step()
    rig.residency.fail(bad)
    outputs = rig.scheduler.fail_adapter(bad, AdapterInvalid("lora_A has no lora_B"))
    assert [output.request_id for output in outputs] == [0, 2]
    assert {(output.finish_reason, output.error_code, output.error_message) for output in outputs} == {
        (FinishReason.ERROR, "adapter_invalid", "lora_A has no lora_B")
    }
    rig.run()
    assert rig.end(1).finish_reason is FinishReason.LENGTH


def test_a_failed_load_of_other_files_under_the_same_name_is_not_taken_for_it() -> None:
    rig = make_rig(load_steps=5)
    rig.add(new_sequence(0, adapter=adapter_ref("a", version=2)))
    rig.step()
    assert rig.scheduler.fail_adapter(adapter_ref("a", version=1), AdapterInvalid("broken")) == []


def test_running_sequences_survive_a_failed_reload_of_their_adapter() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, adapter=adapter_ref("a")))
    rig.step()
    assert rig.scheduler.fail_adapter(adapter_ref("a"), AdapterInvalid("broken")) == []
    rig.run()
    assert rig.end(0).finish_reason is FinishReason.LENGTH


def test_the_adapter_key_comes_with_the_first_token_only() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, adapter=adapter_ref("a")), new_sequence(1))
    rig.run()
    assert [output.adapter_key for output in rig.outputs[0]] == ["key of a v1", "", "", ""]
    assert [output.adapter_key for output in rig.outputs[1]] == [""] * 4


def test_sequences_of_an_adapter_in_use_start_first_while_nobody_is_overdue() -> None:
    rig = make_rig(max_num_seqs=3, num_slots=8)
    rig.add(new_sequence(0, adapter=adapter_ref("a"), max_tokens=30))
    rig.step()
    names = "bcaa"
    rig.add(*(new_sequence(1 + i, adapter=adapter_ref(name)) for i, name in enumerate(names)))
    plan = rig.step()
    assert sorted(row.sequence.request_id for row in plan.rows) == [0, 3, 4]


def test_an_overdue_sequence_is_not_passed_by_one_whose_adapter_is_in_use() -> None:
    rig = make_rig(max_num_seqs=3, num_slots=8, overtake_limit=0.0)
    rig.add(new_sequence(0, adapter=adapter_ref("a"), max_tokens=30))
    rig.step()
    rig.add(*(new_sequence(1 + i, adapter=adapter_ref(name)) for i, name in enumerate("bcaa")))
    plan = rig.step()
    assert sorted(row.sequence.request_id for row in plan.rows) == [0, 1, 2]
