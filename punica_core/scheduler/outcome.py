"""What a step's result means for a sequence: how far it is, when it ends, and what its outputs say."""

from __future__ import annotations

from punica_core.errors import ContextLengthExceeded, InvalidRequest, PunicaError, to_wire
from punica_core.kv.prefix_cache import PrefixCache
from punica_core.protocol import (
    MAX_LOGPROBS,
    FinishReason,
    LogprobTable,
    NewSequence,
    SequenceOutput,
)
from punica_core.scheduler.limits import SchedulerLimits
from punica_core.scheduler.plan import RowPlan, SampledToken, StepResult
from punica_core.scheduler.sequence import Sequence


def check_servable(request: NewSequence, limits: SchedulerLimits, num_blocks: int) -> None:
    """Raise `RequestError` for a request that can never run. The front end checks earlier and says more."""
    num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise InvalidRequest("The prompt has no tokens; it needs at least one.", param="prompt")
    sizes = f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}"
    if num_prompt + max_tokens > limits.max_model_len:
        raise ContextLengthExceeded(
            f"{sizes}; together they must not exceed max_model_len, {limits.max_model_len}. "
            "Shorten the prompt or lower max_tokens."
        )
    num_inputs = num_prompt + max(max_tokens - 1, 0)  # the last token is never an input, so it needs no KV
    num_needed = limits.blocks_for(num_inputs)
    if num_needed > num_blocks:
        raise ContextLengthExceeded(
            f"{sizes}; that needs {num_needed} KV blocks and the worker has {num_blocks}. "
            "Shorten the prompt, lower max_tokens, or raise kv_tokens."
        )
    num_logprobs = request.sampling.num_logprobs(num_prompt)
    if num_logprobs > MAX_LOGPROBS:
        raise InvalidRequest(
            f"{sizes}; with their alternatives that is {num_logprobs} logprobs, and at most {MAX_LOGPROBS} are given."
        )


def finish_reason(sequence: Sequence, limits: SchedulerLimits) -> FinishReason | None:
    """Whether the newest token of `sequence` ended it."""
    token_ids, sampling = sequence.token_ids, sequence.sampling
    num_tokens, token_id = len(token_ids), token_ids[-1]
    is_stop_id = token_id in sampling.stop_token_ids or (token_id in limits.eos_token_ids and not sampling.ignore_eos)
    if is_stop_id and num_tokens - sequence.num_prompt > sampling.min_tokens:
        return FinishReason.STOP
    if num_tokens - sequence.num_prompt >= sequence.max_tokens or num_tokens >= limits.max_model_len:
        return FinishReason.LENGTH
    return None


def token_output(sequence: Sequence, sampled: SampledToken, finish: FinishReason | None) -> SequenceOutput:
    """The output for the token that was just appended to `sequence`."""
    token_ids = [sampled.token_id]
    logprobs = LogprobTable.of([sampled.logprobs]) if sampled.logprobs is not None else None
    is_first = len(sequence.token_ids) == sequence.num_prompt + 1
    if finish is None and not is_first:
        return SequenceOutput(sequence.request_id, token_ids, None, logprobs)
    return SequenceOutput(
        request_id=sequence.request_id,
        token_ids=token_ids,
        finish_reason=finish,
        logprobs=logprobs,
        prompt_logprobs=sequence.take_prompt_logprobs() if is_first else None,
        stop_token_id=sampled.token_id if finish is FinishReason.STOP else None,
        cached_tokens=sequence.cached_tokens if is_first else 0,
        adapter_key=sequence.adapter_key if is_first else "",
    )


def prompt_output(sequence: Sequence) -> SequenceOutput:
    """The only output of a sequence that generates nothing (max_tokens is 0)."""
    return SequenceOutput(
        request_id=sequence.request_id,
        finish_reason=FinishReason.LENGTH,
        prompt_logprobs=sequence.take_prompt_logprobs(),
        cached_tokens=sequence.cached_tokens,
        adapter_key=sequence.adapter_key,
    )


def error_output(request_id: int, error: PunicaError) -> SequenceOutput:
    code, message = to_wire(error)
    return SequenceOutput(
        request_id=request_id, finish_reason=FinishReason.ERROR, error_code=code, error_message=message
    )


def advance(row: RowPlan, result: StepResult, cache: PrefixCache | None, block_size: int) -> None:
    """The row's tokens are computed: publish full blocks, keep prompt logprobs."""
    sequence = row.sequence
    end = sequence.num_computed = row.start + row.count
    chain = sequence.chain
    if chain is not None and end // block_size > chain.num_blocks:
        assert cache is not None
        cache.publish(chain, sequence.token_ids, end, sequence.block_table)
    entries = result.prompt_logprobs.get(sequence.request_id)
    if entries:
        sequence.prompt_logprobs.extend(LogprobTable.of(entries))
        sequence.num_scored += len(entries)
