"""The bodies of OpenAI requests: what is supported, what is refused by name, and the bounds of everything.

Three kinds of fields: supported ones are declared; known ones that we do not implement are in `REFUSED` with the
values that ask for nothing; unknown ones are ignored (and logged once). Null means "not given".

Fields that can be large are declared `Raw`: they are decoded by a method, after a look at their size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Raw

from app import parsing
from app.messages import Message
from punica_core.errors import InvalidRequest

MAX_CHOICES = 128
MAX_PROMPTS = 512
MAX_MESSAGES = 4096
MAX_STOPS = 4
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_IDS = 1 << 22
"""Token ids of one /detokenize."""
_MAX_BIAS_BYTES = 1 << 16
_MAX_VARIABLES_BYTES = 1 << 16

StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Limit = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
_BIASES = Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)]
_VARIABLES = Annotated[dict[str, Any], Meta(max_length=64)]

_PROMPT_START = re.compile(rb"\s*(\[?)\s*([\[\"]?)")


def _not_given() -> Any:
    return msgspec.field(default_factory=Raw)


_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS_SCHEMA = {"type": "array", "items": _ID_SCHEMA, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_BIAS_SCHEMA = {
    "type": ["object", "null"],
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_BIASES,
}
_VARIABLES_SCHEMA = {"type": ["object", "null"], "maxProperties": 64}

RawBiases = Annotated[Raw, Meta(extra_json_schema=_BIAS_SCHEMA)]
RawVariables = Annotated[Raw, Meta(extra_json_schema=_VARIABLES_SCHEMA)]
RawPrompt = Annotated[Raw, Meta(extra_json_schema=_PROMPT_SCHEMA)]

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields of the API that ask for nothing a server like this could do differently. Accepted, not kept."""

_REFUSED_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
}


class StreamOptions(msgspec.Struct, frozen=True):
    """include_usage: one last chunk with the usage and no choices."""

    include_usage: bool | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Any request. REFUSED: known fields that are not implemented, each with the values that ask for nothing."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class GenerationRequest(Body, frozen=True, kw_only=True):
    """What chat and completions share. Bounds of token ids against the vocabulary are checked later."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: RawBiases = _not_given()
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Logprobs | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is not given in a stream.", param="prompt_logprobs")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, whichever way they were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def biases(self) -> dict[str, float]:
        """Decode `logit_bias`. Raises InvalidRequest."""
        if not parsing.is_given(self.logit_bias):
            return {}
        biases: dict[str, float] = parsing.part(_BIASES, self.logit_bias, "logit_bias", max_bytes=_MAX_BIAS_BYTES)
        return biases


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = _REFUSED_EVERYWHERE | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "reasoning_effort": (),
        "verbosity": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "best_of": (1,),
    }

    messages: Messages
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: RawVariables = _not_given()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        check_continuation(self.continue_final_message, self.add_generation_prompt)

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate; max_completion_tokens is the newer name and wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_field(self) -> str:
        """Which of the two it is."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def template_variables(self) -> dict[str, Any]:
        """Decode `chat_template_kwargs`. Raises InvalidRequest."""
        return variables_of(self.chat_template_kwargs)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = _REFUSED_EVERYWHERE | {"suffix": ("",)}

    prompt: RawPrompt
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    logprobs: Logprobs | None = None
    echo: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens is 0; it must be at least 1 (0 only with echo).", param="max_tokens")
        if self.candidates < self.choices:
            raise InvalidRequest(f"best_of ({self.best_of}) must be at least n ({self.choices}).", param="best_of")
        if self.candidates > self.choices and self.stream:
            raise InvalidRequest("best_of greater than n cannot be streamed.", param="best_of")

    @property
    def choices(self) -> int:
        """Choices to give back for each prompt."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Choices to generate for each prompt."""
        return self.choices if self.best_of is None else self.best_of

    def prompts(self) -> list[str] | list[list[int]]:
        """Decode `prompt`, one entry each: all texts, or all token ids. Raises InvalidRequest."""
        return prompts_of(self.prompt)


def prompts_of(raw: Raw) -> list[str] | list[list[int]]:
    """A prompt in any of its four forms as a list. Raises InvalidRequest."""
    text = bytes(raw)
    start = _PROMPT_START.match(text)
    assert start is not None  # the pattern matches any text
    if start[1] and start[2] == b"[":
        count = text.count(b"[") - 1  # there is no text in it that could hold another bracket
        if count > MAX_PROMPTS:
            raise InvalidRequest(f"prompt has {count} prompts; at most {MAX_PROMPTS} are allowed.", param="prompt")
        return list(_prompt_part(Annotated[list[TokenIds], Meta(min_length=1)], raw))
    if start[1] and start[2] == b'"':
        return list(_prompt_part(Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)], raw))
    if start[1]:
        return [_prompt_part(TokenIds, raw)]
    return [_prompt_part(str, raw)]


def _prompt_part(kind: Any, raw: Raw) -> Any:
    return parsing.part(kind, raw, "prompt", max_bytes=len(bytes(raw)))


def variables_of(raw: Raw) -> dict[str, Any]:
    """Decode `chat_template_kwargs`. Raises InvalidRequest."""
    if not parsing.is_given(raw):
        return {}
    field = "chat_template_kwargs"
    variables: dict[str, Any] = parsing.part(_VARIABLES, raw, field, max_bytes=_MAX_VARIABLES_BYTES)
    return variables


def check_continuation(continue_final_message: bool | None, add_generation_prompt: bool | None) -> None:
    """Raises InvalidRequest when both are asked for."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
        )


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """Body of POST /tokenize: a prompt or messages. model: null is the base."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"tools": ([],), "chat_template": ()}

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: RawVariables = _not_given()

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        check_continuation(self.continue_final_message, self.add_generation_prompt)

    def template_variables(self) -> dict[str, Any]:
        """Decode `chat_template_kwargs`. Raises InvalidRequest."""
        return variables_of(self.chat_template_kwargs)


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """Body of POST /detokenize. model: null is the base."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]
    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None


BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], body: bytes, on_unknown: Callable[[Sequence[str]], None] = lambda names: None) -> BodyT:
    """Validate a request body; `on_unknown` is told of fields that nobody knows. Raises InvalidRequest."""
    return parsing.parse(kind, body, refused=kind.REFUSED, ignored=WITHOUT_EFFECT, on_unknown=on_unknown)
