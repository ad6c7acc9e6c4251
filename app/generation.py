"""From a validated request to what the engine is asked for: prompts as ids, sampling parameters, and their limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from app.flight import SequenceRequest
from app.messages import Message
from app.schemas import ChatRequest, CompletionRequest, GenerationRequest, TokenizeRequest
from app.template_processes import AdapterTemplate
from app.tokenizer import LONG_TEXT, Tokenizer
from punica_core.errors import ContextLengthExceeded, InvalidRequest
from punica_core.protocol import MAX_LOGPROBS, SamplingParams

_DEFAULT_COMPLETION_TOKENS = 16
_MESSAGE_COST = 64
RESERVED_TOKENS = 1024
"""Tokens of an open answer whose logprobs are reserved; those of more are had while there is room for them."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and its text if `echo` gives it back."""

    ids: list[int]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the engine sees it: sequence `i` belongs to prompt `i // n`.

    choices: how many of a prompt's n sequences are given back, the likeliest of them if fewer. A prompt whose logprobs
    are asked for is scored by its first sequence, and in streams, which must not wait for that, by each.
    is_open: nobody said how long the answer may be.
    """

    prompts: list[Prompt]
    n: int
    choices: int
    requests: list[SequenceRequest]
    is_open: bool = False

    @property
    def num_logprobs(self) -> int:
        """Logprobs that the engine may send for it, alternatives included; of an open answer those of its beginning,
        since few are as long as they may be."""
        return sum(self._num_logprobs(request) for request in self.requests)

    def _num_logprobs(self, request: SequenceRequest) -> int:
        sampling = request.sampling
        if self.is_open and sampling.max_tokens > RESERVED_TOKENS:
            sampling = msgspec.structs.replace(sampling, max_tokens=RESERVED_TOKENS)
        return sampling.num_logprobs(len(request.prompt_ids))


@dataclass(frozen=True, slots=True)
class Scores:
    """The logprobs that a request wants.

    generated, prompt: alternatives of each token, None for no logprobs. field, generated_field: of the request, which
    ask for the prompt's and for the others.
    """

    generated: int | None
    prompt: int | None
    field: str = "prompt_logprobs"
    generated_field: str = "logprobs"

    def room(self, num_prompt: int, num_sequences: int) -> int | None:
        """Tokens that each of a request's sequences may generate; None: as many as it likes.

        num_prompt: tokens of the prompts to be scored. Raises InvalidRequest if their logprobs alone are too many.
        """
        scored = 0 if self.prompt is None else num_prompt * (1 + self.prompt)
        if scored > MAX_LOGPROBS:
            raise InvalidRequest(
                f"{self.field} asks for {scored} logprobs ({num_prompt} prompt tokens with {self.prompt} alternatives "
                f"each); at most {MAX_LOGPROBS} are given. Ask for fewer alternatives, or split the request.",
                param=self.field,
            )
        if self.generated is None:
            return None
        return (MAX_LOGPROBS - scored) // (num_sequences * (1 + self.generated))

    def check_room(self, max_tokens: int, room: int | None, num_sequences: int) -> None:
        """Raise InvalidRequest for more generated tokens than there is room for."""
        if room is not None and max_tokens > room:
            raise InvalidRequest(
                f"{self.generated_field} asks for the logprobs of {max_tokens * num_sequences} generated tokens "
                f"(prompts x choices x max_tokens) with {self.generated} alternatives each; at most {MAX_LOGPROBS} are "
                "given, the prompts' included. Ask for fewer alternatives or choices, or lower max_tokens.",
                param=self.generated_field,
            )


async def chat_job(
    body: ChatRequest,
    tokenizer: Tokenizer,
    max_model_len: int,
    template: AdapterTemplate | None = None,
) -> Job:
    """Render and tokenize a conversation. Raises InvalidRequest, ContextLengthExceeded, or what `chat_text` raises.

    template: in place of the base's own.
    """
    text = await chat_text(body, body.messages, tokenizer, template, body.model)
    ids = await off_loop_if_large(
        len(text), lambda: fitting_ids(text, tokenizer, max_model_len, "messages", add_special_tokens=False)
    )
    n = body.n or 1
    scores = Scores((body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs)
    room = scores.room(len(ids), n)
    default = None if room is None else max(room, 1)
    limit = _output_limit(
        len(ids),
        body.output_limit,
        max_model_len,
        default=default,
        prompt_field="messages",
        limit_field=body.limit_field,
    )
    scores.check_room(limit, room, n)
    sampling = _sampling(body, tokenizer.vocab_size, limit, scores)
    is_open = body.output_limit is None
    return _job([Prompt(ids)], [sampling], n, n, score_all=False, is_open=is_open)


async def chat_text(
    body: ChatRequest | TokenizeRequest,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    template: AdapterTemplate | None,
    model: str,
) -> str:
    """A conversation as the prompt's text. Raises InvalidRequest, and what `AdapterTemplate.render` raises.

    template: of the adapter that is named `model`, in place of the base's own.
    """
    options: dict[str, Any] = {
        "add_generation_prompt": body.add_generation_prompt is not False,
        "continue_final_message": bool(body.continue_final_message),
        "variables": body.template_variables(),
    }
    cost = rendering_cost(messages, body.chat_template_kwargs)

    def for_template() -> list[dict[str, Any]]:
        return [message.for_template() for message in messages]

    if template is not None:
        return await template.render(model, await off_loop_if_large(cost, for_template), **options)
    return await off_loop_if_large(cost, lambda: tokenizer.render_chat(for_template(), **options))


async def completion_job(body: CompletionRequest, tokenizer: Tokenizer, max_model_len: int) -> Job:
    """Tokenize the prompts of a completion. Raises InvalidRequest or ContextLengthExceeded."""
    given = body.prompts()
    size = sum(map(len, given))
    prompts = await off_loop_if_large(
        size, lambda: _completion_prompts(given, tokenizer, max_model_len, with_text=bool(body.echo))
    )
    scores, n = _scores(body), body.candidates
    count = n * len(prompts)
    score_all = bool(body.stream) or body.max_tokens == 0
    scored = sum(len(prompt.ids) for prompt in prompts) * (n if score_all else 1)
    room = scores.room(scored, count)
    default = _DEFAULT_COMPLETION_TOKENS if room is None else min(_DEFAULT_COMPLETION_TOKENS, max(room, 1))
    samplings = []
    for prompt in prompts:
        limit = _output_limit(len(prompt.ids), body.max_tokens, max_model_len, default=default, prompt_field="prompt")
        scores.check_room(limit, room, count)
        samplings.append(_sampling(body, tokenizer.vocab_size, limit, scores))
    return _job(prompts, samplings, n, body.choices, score_all=score_all)


def _scores(body: CompletionRequest) -> Scores:
    generated, generated_field = body.logprobs, "logprobs"
    if body.candidates > body.choices and generated is None:
        generated, generated_field = 0, "best_of"  # the best are chosen by them
    scored = _scored_alternatives(body)
    field = "prompt_logprobs" if body.prompt_logprobs is not None and body.prompt_logprobs == scored else "echo"
    return Scores(generated, scored, field, generated_field)


def _scored_alternatives(body: CompletionRequest) -> int | None:
    """Alternatives to report for the prompt's tokens; None if they are not scored."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    if body.max_tokens == 0:
        wanted.append(0)  # the one thing for which the engine runs a prompt without generating
    return max((count for count in wanted if count is not None), default=None)


async def off_loop_if_large(size: int, work: Callable[[], ResultT]) -> ResultT:
    """Run `work` on `size` characters or ids, on a thread if it would hold the event loop."""
    return work() if size <= LONG_TEXT else await asyncio.to_thread(work)


def rendering_cost(messages: Sequence[Message], variables: bytes | msgspec.Raw) -> int:
    """Characters of a conversation, and what it costs to render so many messages. variables: JSON of the template's,
    which it may repeat for each message."""
    return sum(message.size + _MESSAGE_COST + len(bytes(variables)) for message in messages)


def _completion_prompts(
    given: list[str] | list[list[int]], tokenizer: Tokenizer, max_model_len: int, *, with_text: bool
) -> list[Prompt]:
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            ids = fitting_ids(prompt, tokenizer, max_model_len, "prompt", add_special_tokens=True)
            prompts.append(Prompt(ids, prompt if with_text else ""))
        else:
            check_ids(prompt, tokenizer.vocab_size, "prompt")
            text = tokenizer.decode(prompt, skip_special_tokens=False) if with_text else ""
            prompts.append(Prompt(prompt, text))
    return prompts


def fitting_ids(
    text: str, tokenizer: Tokenizer, max_model_len: int, field: str, *, add_special_tokens: bool
) -> list[int]:
    """The text's token ids. Raises ContextLengthExceeded for one that cannot fit, mostly before all is tokenized."""
    fewest = tokenizer.fewest_tokens(text)
    if fewest <= max_model_len and tokenizer.surely_exceeds(text, max_model_len):
        fewest = max_model_len + 1
    if fewest > max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, {field} has {len(text)} "
            f"characters, which are at least {fewest} tokens (context_length_exceeded).",
            param=field,
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_ids(ids: list[int], vocab_size: int, field: str) -> None:
    """Raises InvalidRequest for ids outside the vocabulary."""
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise InvalidRequest(
            f"{field}: token id {highest} is outside the vocabulary (ids are below {vocab_size}).", param=field
        )


def _output_limit(
    prompt_tokens: int,
    asked: int | None,
    max_model_len: int,
    *,
    default: int | None,
    prompt_field: str,
    limit_field: str = "max_tokens",
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
            param=limit_field if prompt_tokens < max_model_len else prompt_field,
        )
    return wanted


def _sampling(body: GenerationRequest, vocab_size: int, max_tokens: int, scores: Scores) -> SamplingParams:
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
        logprobs=scores.generated,
        prompt_logprobs=scores.prompt,
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


def _job(
    prompts: list[Prompt],
    samplings: list[SamplingParams],
    n: int,
    choices: int,
    *,
    score_all: bool,
    is_open: bool = False,
) -> Job:
    requests = [
        SequenceRequest(prompt.ids, _of_choice(sampling, choice, scored=score_all or choice == 0))
        for prompt, sampling in zip(prompts, samplings, strict=True)
        for choice in range(n)
    ]
    return Job(prompts, n, choices, requests, is_open)


def _of_choice(sampling: SamplingParams, choice: int, *, scored: bool) -> SamplingParams:
    if not scored and sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return _with_seed(sampling, choice)


def _with_seed(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Choice i of a seeded request draws from seed + i (modulo 2^64, as signed)."""
    if sampling.seed is None or choice == 0:
        return sampling
    seed = (sampling.seed + choice + 2**63) % 2**64 - 2**63

    return msgspec.structs.replace(sampling, seed=seed)
