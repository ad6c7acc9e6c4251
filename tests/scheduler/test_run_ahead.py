"""A step is planned while another executes: which rows it has, and what happens to them when the other one ends."""

from __future__ import annotations

import msgspec
import pytest

from punica_core.protocol import FinishReason, SamplingParams, SequenceOutput
from punica_core.scheduler.plan import StepPlan, StepResult
from punica_core.scheduler.sequence import needs_known_tokens
from tests.support.residency import adapter_ref
from tests.support.scheduling import BLOCK_SIZE, FakeStep, Rig, expected_tokens, make_rig, new_sequence


def launch(rig: Rig) -> FakeStep:
    """Plan a step and put it behind those in flight."""
    plan = rig.scheduler.schedule(rig.now)
    rig.record(plan)
    return rig.model.launch(plan)


def collect(rig: Rig, step: FakeStep) -> None:
    rig.now += rig.step_seconds
    rig.finish(step.plan, step.result())


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool, bool]]:
    return [(row.sequence.request_id, row.start, row.count, row.samples, row.pending) for row in plan.rows]


def run_ahead(rig: Rig) -> list[StepPlan]:
    """Run to the end with a step ahead whenever there is one; returns the plans that were made behind another."""
    ahead: list[StepPlan] = []
    flying: list[FakeStep] = []
    for _ in range(1000):
        if not rig.scheduler.has_unfinished() and not flying:
            return ahead
        step = launch(rig)
        if flying:
            ahead += [step.plan] if step.plan.rows else []
            collect(rig, flying.pop())
        if step.plan.rows:
            flying.append(step)
    raise AssertionError(f"still unfinished: {rig.scheduler.waiting_by_reason}")


def test_a_sequence_that_decodes_gets_a_row_for_the_token_that_is_being_sampled() -> None:
    rig = make_rig()
    rig.add(new_sequence(1, prompt=6, max_tokens=4))
    first, second = launch(rig), launch(rig)
    assert shape(first.plan) == [(1, 0, 6, True, False)]
    assert shape(second.plan) == [(1, 6, 1, True, True)]
    collect(rig, first)
    third = launch(rig)
    assert shape(third.plan) == [(1, 7, 1, True, True)]
    collect(rig, second)
    collect(rig, third)
    assert rig.tokens(1) == expected_tokens(new_sequence(1, prompt=6, max_tokens=4))[:3]


def test_when_the_step_before_was_updated_its_token_is_an_ordinary_input() -> None:
    rig = make_rig()
    rig.add(new_sequence(1, prompt=6))
    collect(rig, launch(rig))
    assert shape(launch(rig).plan) == [(1, 6, 1, True, False)]


def test_a_pending_row_has_a_block_for_its_token_and_keeps_its_table_while_it_fits() -> None:
    rig = make_rig()
    rig.add(new_sequence(1, prompt=BLOCK_SIZE, max_tokens=8))
    tables = [launch(rig).plan.rows[0].block_table, (second := launch(rig)).plan.rows[0].block_table]
    assert [len(table) for table in tables] == [1, 2]
    collect(rig, rig.model.queue[0])
    third = launch(rig)
    assert third.plan.rows[0].block_table is second.plan.rows[0].block_table


def test_chunks_of_a_prompt_follow_each_other() -> None:
    rig = make_rig(max_num_batched_tokens=8)
    rig.add(request := new_sequence(1, prompt=20, max_tokens=3))
    steps = [launch(rig), launch(rig)]
    for _ in range(2):
        collect(rig, steps[-2])
        steps.append(launch(rig))
    assert [shape(step.plan)[0][1:] for step in steps] == [
        (0, 8, False, False),
        (8, 8, False, False),
        (16, 4, True, False),
        (20, 1, True, True),
    ]
    collect(rig, steps[-2])
    collect(rig, steps[-1])
    run_ahead(rig)
    assert rig.tokens(1) == expected_tokens(request)


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
def test_a_sequence_has_no_row_behind_its_last_token(max_tokens: int) -> None:
    rig = make_rig()
    rig.add(request := new_sequence(1, prompt=6, max_tokens=max_tokens, prompt_logprobs=0))
    run_ahead(rig)
    assert sum(len(plan.rows) for plan in rig.plans) == max(max_tokens, 1)
    assert rig.end(1).finish_reason is FinishReason.LENGTH
    assert rig.tokens(1) == expected_tokens(request)
    reports = [output.prompt_logprobs for output in rig.outputs[1]]
    assert [report is not None for report in reports] == [True] + [False] * (max_tokens - 1)
    rig.assert_idle()


def end_in_flight(rig: Rig, how: str) -> tuple[FakeStep, FakeStep]:
    """A sequence ends at the update of a step while the step behind has a row of it. Returns both steps."""
    before, behind = launch(rig), launch(rig)
    assert [row.pending for row in behind.plan.rows] == [True]
    result = before.result()
    if how == "cancel":
        rig.cancel(1)
    elif how == "failure":
        result = StepResult(failed={1: "not finite"})
    rig.finish(before.plan, result)
    return before, behind


@pytest.mark.parametrize("how", ["stop id", "cancel", "failure"])
def test_what_ended_holds_blocks_and_adapter_until_the_step_behind_is_over_and_is_ignored_there(how: str) -> None:
    rig = make_rig()
    request = new_sequence(1, prompt=11, max_tokens=4, adapter=adapter_ref("a"))
    token = expected_tokens(request)[0]
    sampling = msgspec.structs.replace(request.sampling, stop_token_ids=(token,) if how == "stop id" else ())
    rig.add(msgspec.structs.replace(request, sampling=sampling))
    _before, behind = end_in_flight(rig, how)
    end = rig.end(1)
    assert not rig.scheduler.has_unfinished()
    assert not any(map(rig.pool.is_free, behind.plan.rows[0].block_table))
    assert rig.residency.pins[adapter_ref("a")] == 1
    rig.add(new_sequence(2, prompt=[*request.prompt_ids, token, 0], adapter=adapter_ref("a")))
    counted = rig.scheduler.counters.decode_tokens, rig.scheduler.counters.prefill_tokens
    collect(rig, behind)
    assert rig.end(1) is end
    assert (rig.scheduler.counters.decode_tokens, rig.scheduler.counters.prefill_tokens) == counted
    assert rig.pool.num_free == rig.pool.num_blocks
    assert rig.residency.num_pins() == 0
    run_ahead(rig)
    # Of the three full blocks the ignored row completed the third.
    assert rig.outputs[2][0].cached_tokens == (2 * BLOCK_SIZE if how == "stop id" else 0)
    rig.assert_idle()


def test_a_block_is_published_when_its_tokens_are_known() -> None:
    rig = make_rig()
    rig.add(first := new_sequence(1, prompt=7, max_tokens=4))
    before, behind = launch(rig), launch(rig)
    collect(rig, before)
    assert rig.pool.num_cached == 1
    collect(rig, behind)
    assert rig.pool.num_cached == 2
    assert rig.cache is not None
    tokens = [*first.prompt_ids, *expected_tokens(first)]
    assert rig.cache.match("", "", tokens).num_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_sequence_with_penalties_waits_for_its_token_and_no_other_waits_for_it(penalty: str) -> None:
    rig = make_rig()
    rig.add(plain := new_sequence(1, max_tokens=8), penalised := new_sequence(2, max_tokens=4, **{penalty: 0.5}))
    ahead = run_ahead(rig)
    rows = [[row.sequence.request_id for row in plan.rows] for plan in rig.plans if plan.rows]
    assert rows == [[1, 2], [1], [1, 2], [1], [1, 2], [1], [1, 2], [1]]
    assert len(ahead) == 7
    assert all(row.sequence.request_id == 1 for plan in rig.plans for row in plan.rows if row.pending)
    assert rig.tokens(1) == expected_tokens(plain)
    assert rig.tokens(2) == expected_tokens(penalised)


def test_with_penalised_sequences_alone_nothing_runs_ahead() -> None:
    rig = make_rig()
    rig.add(request := new_sequence(1, max_tokens=4, presence_penalty=0.5))
    assert run_ahead(rig) == []
    assert rig.tokens(1) == expected_tokens(request)


@pytest.mark.parametrize(
    ("field", "value", "needs"),
    [
        ("presence_penalty", 0.1, True),
        ("presence_penalty", -0.1, True),
        ("frequency_penalty", 0.1, True),
        ("repetition_penalty", 1.1, True),
        ("repetition_penalty", 1.0, False),
        ("logit_bias", {5: 1.0}, False),
        ("min_tokens", 5, False),
        ("stop_token_ids", (5,), False),
        ("logprobs", 5, False),
        ("temperature", 0.7, False),
        ("seed", 5, False),
    ],
)
def test_only_penalties_need_known_tokens(field: str, value: object, needs: bool) -> None:
    assert needs_known_tokens(SamplingParams(max_tokens=9, **{field: value})) is needs  # type: ignore[arg-type]


def crowded_rig() -> Rig:
    """Two sequences whose prompts fit the 6 blocks together and whose outputs do not."""
    rig = make_rig(num_blocks=6, prefix_cache=False)
    rig.add(*(new_sequence(i, prompt=8, max_tokens=12) for i in range(2)))
    return rig


def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    rig = crowded_rig()
    flying = launch(rig)
    while (behind := launch(rig)).plan.rows:
        collect(rig, flying)
        flying = behind
    # Both have three full blocks and need a fourth; the tokens in flight are not lost to that.
    assert [row.start + row.count for row in flying.plan.rows] == [12, 12]
    assert (rig.pool.num_free, rig.scheduler.counters.preemptions) == (0, 0)
    collect(rig, flying)
    assert [len(rig.tokens(i)) for i in range(2)] == [5, 5]
    alone = launch(rig)
    assert shape(alone.plan) == [(0, 12, 1, True, False)]
    assert rig.scheduler.counters.preemptions == 1
    collect(rig, alone)
    run_ahead(rig)
    for i in range(2):
        assert rig.tokens(i) == expected_tokens(new_sequence(i, prompt=8, max_tokens=12))
    rig.assert_idle()


def test_the_oldest_never_yields_when_steps_run_ahead() -> None:
    rig = crowded_rig()
    run_ahead(rig)
    assert rig.scheduler.counters.preemptions > 0
    rows_of_oldest = [row for plan in rig.plans for row in plan.rows if row.sequence.request_id == 0]
    assert [row.start for row in rows_of_oldest] == [0, *range(8, 19)]


def test_newer_sequences_yield_their_adapter_when_steps_run_ahead() -> None:
    rig = make_rig(num_slots=1, num_blocks=512, max_model_len=512)
    rig.add(new_sequence(0, prompt=2, max_tokens=4, adapter=adapter_ref("hot")))
    flying = launch(rig)
    rig.add(new_sequence(9, adapter=adapter_ref("cold")))
    asked = rig.now
    rig.add(newer := new_sequence(1, prompt=2, max_tokens=200, adapter=adapter_ref("hot")))
    while 9 not in rig.started:
        behind = launch(rig)
        collect(rig, flying)
        flying = behind
    assert rig.started[9] - asked <= 2 * rig.limits.adapter_wait_limit + 3 * rig.step_seconds
    assert rig.scheduler.counters.preemptions == 1
    collect(rig, flying)
    run_ahead(rig)
    assert rig.tokens(1) == expected_tokens(newer)
    rig.assert_idle()


def test_a_plan_taken_back_is_made_again_with_what_became_known() -> None:
    rig = make_rig(max_num_batched_tokens=9)
    requests = [new_sequence(1, prompt=6, max_tokens=4), new_sequence(2, prompt=12, max_tokens=2)]
    rig.add(*requests)
    before, behind = launch(rig), launch(rig)
    assert shape(behind.plan) == [(1, 6, 1, True, True), (2, 3, 8, False, False)]
    counters = msgspec.structs.asdict(rig.scheduler.stats())
    rig.scheduler.abandon(behind.plan)
    rig.scheduler.check()
    assert msgspec.structs.asdict(rig.scheduler.stats()) == counters
    behind.result()
    collect(rig, before)
    again = launch(rig)
    assert shape(again.plan) == [(1, 6, 1, True, False), (2, 3, 8, False, False)]
    collect(rig, again)
    run_ahead(rig)
    for request in requests:
        assert rig.tokens(request.request_id) == expected_tokens(request)
    counters_now = rig.scheduler.counters
    assert counters_now.prefill_tokens + counters_now.decode_tokens == 6 + 3 + 12 + 1
    rig.assert_idle()


def test_a_cancelled_sequence_is_released_when_the_plan_that_used_it_is_taken_back() -> None:
    rig = make_rig()
    rig.add(new_sequence(1))
    before = launch(rig)
    rig.add(new_sequence(2, adapter=adapter_ref("a")))
    behind = launch(rig)
    rig.cancel(2)
    assert rig.residency.num_pins() == 1
    rig.scheduler.abandon(behind.plan)
    assert rig.residency.num_pins() == 0
    collect(rig, before)
    run_ahead(rig)
    rig.assert_idle()


def test_a_newcomer_starts_behind_the_step_in_flight() -> None:
    rig = make_rig()
    rig.add(new_sequence(1))
    launch(rig)
    rig.add(new_sequence(2, prompt=5))
    assert shape(launch(rig).plan) == [(1, 6, 1, True, True), (2, 0, 5, True, False)]


def test_two_plans_are_in_flight_at_most_and_end_in_order() -> None:
    rig = make_rig()
    rig.add(new_sequence(1))
    first, second = launch(rig), launch(rig)
    with pytest.raises(AssertionError, match="the plan before the last"):
        rig.scheduler.schedule(rig.now)
    with pytest.raises(AssertionError, match="an older plan"):
        rig.scheduler.update(second.plan, StepResult(), rig.now)
    with pytest.raises(AssertionError, match="a newer plan"):
        rig.scheduler.abandon(first.plan)
    collect(rig, first)
    collect(rig, second)


def test_a_request_id_may_be_used_again_behind_a_cancelled_row() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, max_tokens=9))
    before, behind = launch(rig), launch(rig)
    rig.cancel(0)
    rig.add(again := new_sequence(0, prompt=9, max_tokens=2))
    collect(rig, before)
    third = launch(rig)
    collect(rig, behind)
    assert rig.outputs[0] == []
    collect(rig, third)
    run_ahead(rig)
    assert rig.tokens(0) == expected_tokens(again)
    outputs: list[SequenceOutput] = rig.outputs[0]
    assert [output.finish_reason for output in outputs] == [None, FinishReason.LENGTH]
