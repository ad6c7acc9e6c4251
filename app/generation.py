"""From a validated request to what the engine is asked for: prompts as ids, sampling parameters, and their limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from app.chat_template import ChatTemplate
from app.flight import SequenceRequest
from app.messages import Message
from app.schemas import ChatRequest, CompletionRequest, GenerationRequest
from app.tokenizer import LONG_TEXT, Tokenizer
from punica_core.errors import ContextLengthExceeded, InvalidRequest
from punica_core.protocol import SamplingParams

_DEFAULT_COMPLETION_TOKENS = 16
MAX_SCORED_TOKENS = 1 << 17
"""Prompt tokens that a request may have scored, over all its choices: each gets an entry of up to 20 alternatives."""
_MESSAGE_COST = 64

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and its text if `echo` gives it back."""

    ids: list[int]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the engine sees it: sequence `i` belongs to prompt `i // n`.

    choices: how many of a prompt's n sequences are given back, the likeliest of them if fewer.
    """

    prompts: list[Prompt]
    n: int
    choices: int
    requests: list[SequenceRequest]


async def chat_job(
    body: ChatRequest, tokenizer: Tokenizer, max_model_len: int, template: ChatTemplate | None = None
) -> Job:
    """Render and tokenize a conversation. Raises InvalidRequest or ContextLengthExceeded.

    template: in place of the base's own.
    """
    variables = body.template_variables()

    def prompt_ids() -> list[int]:
        text = tokenizer.render_chat(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            variables=variables,
            template=template,
        )
        check_hopeless(text, tokenizer, max_model_len, "messages")
        return tokenizer.encode(text, add_special_tokens=False)

    ids = await off_loop_if_large(text_size(body.messages), prompt_ids)
    n = body.n or 1
    if body.prompt_logprobs is not None:
        _check_scored([Prompt(ids)], n, "prompt_logprobs")
    limit = _output_limit(len(ids), body.output_limit, max_model_len, default=None, prompt_field="messages")
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    sampling = _sampling(body, tokenizer.vocab_size, limit, logprobs=alternatives, prompt_logprobs=body.prompt_logprobs)
    return _job([Prompt(ids)], [sampling], n, n)


async def completion_job(body: CompletionRequest, tokenizer: Tokenizer, max_model_len: int) -> Job:
    """Tokenize the prompts of a completion. Raises InvalidRequest or ContextLengthExceeded."""
    given = body.prompts()
    size = sum(map(len, given))
    prompts = await off_loop_if_large(
        size, lambda: _completion_prompts(given, tokenizer, max_model_len, with_text=bool(body.echo))
    )
    samplings = []
    prompt_logprobs = _scored_alternatives(body)
    logprobs = body.logprobs
    if body.candidates > body.choices and logprobs is None:
        logprobs = 0  # the best are chosen by them
    if prompt_logprobs is not None:
        _check_scored(prompts, body.candidates, "echo" if body.prompt_logprobs is None else "prompt_logprobs")
    for prompt in prompts:
        limit = _output_limit(
            len(prompt.ids),
            body.max_tokens,
            max_model_len,
            default=_DEFAULT_COMPLETION_TOKENS,
            prompt_field="prompt",
        )
        samplings.append(
            _sampling(body, tokenizer.vocab_size, limit, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        )
    return _job(prompts, samplings, body.candidates, body.choices)


def _scored_alternatives(body: CompletionRequest) -> int | None:
    """Alternatives to report for the prompt's tokens; None if they are not scored."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    if body.max_tokens == 0:
        wanted.append(0)  # the one thing for which the engine runs a prompt without generating
    return max((count for count in wanted if count is not None), default=None)


def _check_scored(prompts: list[Prompt], n: int, field: str) -> None:
    scored = n * sum(len(prompt.ids) for prompt in prompts)
    if scored > MAX_SCORED_TOKENS and n * len(prompts) > 1:
        raise InvalidRequest(
            f"{field} asks for the logprobs of {scored} prompt tokens (prompts x n); at most {MAX_SCORED_TOKENS} "
            "are given. Lower n or split the request.",
            param=field,
        )


async def off_loop_if_large(size: int, work: Callable[[], ResultT]) -> ResultT:
    """Run `work` on `size` characters or ids, on a thread if it would hold the event loop."""
    return work() if size <= LONG_TEXT else await asyncio.to_thread(work)


def text_size(messages: Sequence[Message]) -> int:
    """Characters of a conversation, and what it costs to render so many messages."""
    return sum(message.size + _MESSAGE_COST for message in messages)


def _completion_prompts(
    given: list[str] | list[list[int]], tokenizer: Tokenizer, max_model_len: int, *, with_text: bool
) -> list[Prompt]:
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            check_hopeless(prompt, tokenizer, max_model_len, "prompt")
            ids = tokenizer.encode(prompt, add_special_tokens=True)
            prompts.append(Prompt(ids, prompt if with_text else ""))
        else:
            check_ids(prompt, tokenizer.vocab_size, "prompt")
            text = tokenizer.decode(prompt, skip_special_tokens=False) if with_text else ""
            prompts.append(Prompt(prompt, text))
    return prompts


def check_hopeless(text: str, tokenizer: Tokenizer, max_model_len: int, field: str) -> None:
    """Raises ContextLengthExceeded for a text that cannot fit, before it is tokenized."""
    fewest = tokenizer.fewest_tokens(text)
    if fewest > max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, {field} has {len(text)} "
            f"characters, which are at least {fewest} tokens (context_length_exceeded).",
            param=field,
        )


def check_ids(ids: list[int], vocab_size: int, field: str) -> None:
    """Raises InvalidRequest for ids outside the vocabulary."""
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise InvalidRequest(
            f"{field}: token id {highest} is outside the vocabulary (ids are below {vocab_size}).", param=field
        )


def _output_limit(
    prompt_tokens: int, asked: int | None, max_model_len: int, *, default: int | None, prompt_field: str
) -> int:
    """Tokens to generate: what was asked for must fit; a default is cut to what fits."""
    if prompt_tokens == 0:
        raise InvalidRequest("The prompt is empty: it has no tokens.", param=prompt_field)
    room = max_model_len - prompt_tokens
    if asked is None and room > 0:
        return room if default is None else min(default, room)
    wanted = 1 if asked is None else asked
    if wanted > room:
        output = f"{asked} in the output" if asked is not None else "at least 1 in the output"
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the prompt, {output}). Please shorten the prompt or "
            "the output (context_length_exceeded).",
            param="max_tokens" if prompt_tokens < max_model_len else prompt_field,
        )
    return wanted


def _sampling(
    body: GenerationRequest,
    vocab_size: int,
    max_tokens: int,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    stop_token_ids = tuple(body.stop_token_ids or ())
    if stop_token_ids:
        check_ids(list(stop_token_ids), vocab_size, "stop_token_ids")
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens ({min_tokens}) exceeds max_tokens ({max_tokens}).", param="min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=_given(body.min_p, 0.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body, vocab_size),
        seed=body.seed,
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _logit_bias(body: GenerationRequest, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in body.biases().items():
        if not (key.isascii() and key.isdigit() and len(key) < 11 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {key[:40]!r} is not a token id (0 to {vocab_size - 1}).", param="logit_bias"
            )
        bias[int(key)] = float(value)
    return bias


def _job(prompts: list[Prompt], samplings: list[SamplingParams], n: int, choices: int) -> Job:
    requests = [
        SequenceRequest(prompt.ids, _with_seed(sampling, choice))
        for prompt, sampling in zip(prompts, samplings, strict=True)
        for choice in range(n)
    ]
    return Job(prompts, n, choices, requests)


def _with_seed(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Choice i of a seeded request draws from seed + i (modulo 2^64, as signed)."""
    if sampling.seed is None or choice == 0:
        return sampling
    seed = (sampling.seed + choice + 2**63) % 2**64 - 2**63

    return msgspec.structs.replace(sampling, seed=seed)
