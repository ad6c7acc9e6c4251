"""How a sequence ends: stop ids, limits, cancels, failures. Each ends once, and then holds nothing."""

from __future__ import annotations

import pytest

from punica_core.errors import ContextLengthExceeded, InvalidRequest
from punica_core.protocol import FinishReason, SequenceOutput
from punica_core.scheduler.plan import SampledToken, StepPlan, StepResult
from tests.support.residency import adapter_ref
from tests.support.scheduling import EOS, Rig, make_rig, new_sequence


def feed(rig: Rig, *token_ids: int) -> list[SequenceOutput]:
    """Step once for each token id, sampling it for every row; stops when all is over. Returns request 0's outputs."""
    for token_id in token_ids:
        if not rig.scheduler.has_unfinished():
            break
        plan = rig.scheduler.schedule(rig.now)
        rig.finish(plan, sampled(plan, token_id))
    return rig.outputs[0]


def sampled(plan: StepPlan, token_id: int) -> StepResult:
    return StepResult(sampled={row.sequence.request_id: SampledToken(token_id) for row in plan.rows if row.samples})


def test_the_end_of_sequence_id_stops_and_is_the_last_token() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, max_tokens=9, ignore_eos=False))
    *_rest, last = feed(rig, 1, EOS, 2)
    assert (last.finish_reason, last.stop_token_id, last.token_ids) == (FinishReason.STOP, EOS, [EOS])
    assert rig.tokens(0) == [1, EOS]


def test_ignore_eos_goes_on() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, max_tokens=3, ignore_eos=True))
    *_rest, last = feed(rig, EOS, EOS, 2)
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.LENGTH, None)


def test_a_stop_token_id_stops_also_with_ignore_eos() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, max_tokens=9, ignore_eos=True, stop_token_ids=(5,)))
    *_rest, last = feed(rig, EOS, 5, 2)
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, 5)


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 1), (1, 2), (3, 4)])
def test_no_stop_id_ends_a_sequence_before_min_tokens(min_tokens: int, num_tokens: int) -> None:
    rig = make_rig()
    rig.add(new_sequence(0, max_tokens=9, ignore_eos=False, min_tokens=min_tokens))
    outputs = feed(rig, *[EOS] * 9)
    assert len(outputs) == num_tokens


def test_a_stop_id_at_max_tokens_is_a_stop() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, max_tokens=2, ignore_eos=False))
    *_rest, last = feed(rig, 1, EOS)
    assert last.finish_reason is FinishReason.STOP


def test_nothing_to_generate_ends_with_length_after_the_prompt() -> None:
    rig = make_rig(max_num_batched_tokens=8)
    rig.add(new_sequence(0, prompt=20, max_tokens=0, prompt_logprobs=1))
    rig.run()
    (only,) = rig.outputs[0]
    assert (only.finish_reason, only.token_ids) == (FinishReason.LENGTH, [])
    assert only.prompt_logprobs is not None
    assert len(only.prompt_logprobs) == 19  # the first token has none


def test_prompt_logprobs_of_several_chunks_come_once_with_the_first_token() -> None:
    rig = make_rig(max_num_batched_tokens=8)
    request = new_sequence(0, prompt=20, max_tokens=2, prompt_logprobs=0)
    rig.add(request)
    rig.run()
    first, second = rig.outputs[0]
    assert first.prompt_logprobs is not None
    assert [entry.token_id for entry in first.prompt_logprobs] == request.prompt_ids[1:]
    assert second.prompt_logprobs is None


def test_logprobs_come_with_every_token_if_asked_for() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, max_tokens=3, logprobs=0), new_sequence(1, max_tokens=3))
    rig.run()
    assert [[entry.token_id for entry in output.logprobs or []] for output in rig.outputs[0]] == [
        [token] for token in rig.tokens(0)
    ]
    assert [output.logprobs for output in rig.outputs[1]] == [None] * 3


def test_a_row_that_failed_ends_with_an_error_and_its_neighbours_go_on() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, adapter=adapter_ref("a")), new_sequence(1))
    plan = rig.scheduler.schedule(0.0)
    result = rig.model.execute(plan)
    del result.sampled[0]
    result.failed[0] = "logits are not finite"
    rig.finish(plan, result)
    last = rig.end(0)
    assert (last.finish_reason, last.error_code, last.error_message) == (
        FinishReason.ERROR,
        "internal_error",
        "logits are not finite",
    )
    rig.run()
    assert rig.end(1).finish_reason is FinishReason.LENGTH
    rig.assert_idle()


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(61, 4), (65, 0), (64, 1)])
def test_a_sequence_beyond_max_model_len_is_refused_with_both_numbers(num_prompt: int, max_tokens: int) -> None:
    rig = make_rig(max_model_len=64)
    with pytest.raises(ContextLengthExceeded, match=f"{num_prompt} tokens and max_tokens is {max_tokens}.*64"):
        rig.scheduler.add(new_sequence(0, prompt=num_prompt, max_tokens=max_tokens), 0.0)
    rig.assert_idle()


def test_a_sequence_with_more_blocks_than_the_pool_is_refused() -> None:
    rig = make_rig(num_blocks=3)
    with pytest.raises(ContextLengthExceeded, match="needs 4 KV blocks and the worker has 3"):
        rig.scheduler.add(new_sequence(0, prompt=8, max_tokens=6), 0.0)


def test_a_sequence_that_just_fits_the_pool_runs() -> None:
    rig = make_rig(num_blocks=3)
    rig.add(new_sequence(0, prompt=8, max_tokens=5))
    rig.run()
    assert len(rig.tokens(0)) == 5


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        make_rig().scheduler.add(new_sequence(0, prompt=[]), 0.0)


def test_a_cancelled_waiting_sequence_never_runs() -> None:
    rig = make_rig(max_num_seqs=1)
    rig.add(new_sequence(0), new_sequence(1))
    rig.step()
    rig.cancel(1)
    rig.run()
    assert 1 not in rig.started
    assert rig.end(1).finish_reason is FinishReason.CANCELLED


def test_a_sequence_cancelled_while_its_adapter_loads_leaves_nothing_behind() -> None:
    rig = make_rig(load_steps=3)
    rig.add(new_sequence(0, adapter=adapter_ref("a")))
    rig.step()
    rig.cancel(0)
    for _ in range(4):
        rig.step()
    rig.assert_idle()


def test_a_cancelled_running_sequence_frees_blocks_and_adapter_at_once() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, adapter=adapter_ref("a")))
    rig.step()
    rig.cancel(0)
    rig.assert_idle()


def test_a_cancel_during_a_step_keeps_what_the_step_uses_until_it_ends() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, adapter=adapter_ref("a")))
    plan = rig.scheduler.schedule(0.0)
    output = rig.cancel(0)
    assert output is not None
    assert not rig.scheduler.has_unfinished()
    assert rig.residency.pins[adapter_ref("a")] == 1
    assert not any(map(rig.pool.is_free, plan.rows[0].block_table))
    rig.finish(plan, rig.model.execute(plan))
    assert rig.end(0).finish_reason is FinishReason.CANCELLED
    rig.assert_idle()


def test_a_request_id_may_be_used_again_while_its_cancelled_step_executes() -> None:
    rig = make_rig()
    rig.add(new_sequence(0, max_tokens=3))
    plan = rig.scheduler.schedule(0.0)
    rig.cancel(0)
    rig.add(new_sequence(0, max_tokens=2))
    rig.finish(plan, rig.model.execute(plan))
    assert rig.outputs[0] == []
    rig.run()
    assert len(rig.tokens(0)) == 2


def test_cancelling_what_is_unknown_or_over_says_nothing() -> None:
    rig = make_rig()
    rig.add(new_sequence(0))
    rig.run()
    assert rig.cancel(0) is None
    assert rig.scheduler.cancel(12345, rig.now) is None


def test_a_live_request_id_is_not_taken_twice() -> None:
    rig = make_rig()
    rig.add(new_sequence(0))
    with pytest.raises(AssertionError, match="request_id 0"):
        rig.scheduler.add(new_sequence(0), 0.0)


@pytest.mark.parametrize(
    "asked", [{"logprobs": 20, "max_tokens": 200_000}, {"prompt_logprobs": 2**22, "max_tokens": 1}]
)
def test_more_logprobs_than_a_message_may_hold_are_refused(asked: dict[str, int]) -> None:
    rig = make_rig(num_blocks=100_000, max_model_len=10**6)
    with pytest.raises(InvalidRequest, match="at most 4194304"):
        rig.add(new_sequence(0, **asked))
    rig.add(new_sequence(1, **asked | {"logprobs": None, "prompt_logprobs": None, "max_tokens": 1}))
    rig.run()
    assert rig.end(1).finish_reason is FinishReason.LENGTH
