"""The bodies of OpenAI requests, validated: what is supported, what is refused by name, and the bounds of everything.

Three kinds of fields: supported ones are declared; known ones that we do not implement are in `_REFUSED` with the
values that ask for nothing; unknown ones are ignored (and logged once). Null means "not given". Types are strict: "0.5"
is not a number.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from punica_core.errors import InvalidRequest

MAX_CHOICES = 128
MAX_PROMPTS = 512
MAX_MESSAGES = 4096
MAX_STOPS = 4
MAX_LOGPROBS = 20
MAX_BIASES = 1024


def _check_num_biases(value: Any) -> Any:
    # before the entries are validated: each wrong one would become an error object
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("too_long", "at most {limit} entries are allowed", {"limit": MAX_BIASES})
    return value


StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
LogitBias = Annotated[dict[str, Bias], Field(max_length=MAX_BIASES), BeforeValidator(_check_num_biases)]
# fail_fast: without it every wrong item of a long list costs an error object, and a body of wrong items many seconds.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())


class StreamOptions(_Strict):
    """include_usage: one last chunk with the usage and no choices."""

    include_usage: bool | None = None


_WITHOUT_EFFECT = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields of the API that ask for nothing a server like this could do differently. Accepted, not kept."""


class GenerationRequest(_Strict):
    """What chat and completions share. Bounds of token ids against the vocabulary are checked later."""

    model_config = ConfigDict(extra="allow")

    _REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str = Field(min_length=1, max_length=512)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    temperature: Finite | None = Field(None, ge=0, le=2)
    top_p: Finite | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: Finite | None = Field(None, ge=0, le=1)
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    repetition_penalty: Finite | None = Field(None, gt=0, le=10)
    logit_bias: LogitBias | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, harmless in cls._REFUSED.items():
                value = data.get(name)
                if value is not None and value not in harmless:
                    raise PydanticCustomError("unsupported_field", "{field} is not supported.", {"field": name})
        return data

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only allowed when stream is true.")
        return self

    @property
    def unknown_fields(self) -> list[str]:
        """Names of given fields that no version of the API has, as far as we know."""
        known = self._REFUSED.keys() | _WITHOUT_EFFECT
        return [name[:64] for name in self.model_extra or {} if name not in known]

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


_REFUSED_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
}


class ContentPart(_Strict):
    """A part of a message's content. Only text is supported."""

    type: str = Field(max_length=64)
    text: str | None = None

    @model_validator(mode="after")
    def _only_text(self) -> Self:
        if self.type != "text":
            raise PydanticCustomError(
                "unsupported_part", "content parts of type {kind} are not supported; use text.", {"kind": self.type}
            )
        if self.text is None:
            raise PydanticCustomError("missing_text", "a text part needs text.")
        return self


class FunctionCall(_Strict):
    """A call that the assistant made earlier in the conversation."""

    name: str = Field(max_length=256)
    arguments: str


class ToolCall(_Strict):
    """A tool call in an assistant message of the history."""

    id: str | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Strict):
    """One message. `developer` is `system`; text parts are joined."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(max_length=1024, fail_fast=True)] | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing_content", "a message needs content.")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text or "" for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    _REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = _REFUSED_EVERYWHERE | {
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
    }

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs to be true.")
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other."
            )
        return self

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate; max_completion_tokens is the newer name and wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    _REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = _REFUSED_EVERYWHERE | {"suffix": ("",)}

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise PydanticCustomError("best_of", "best_of is not supported unless it equals n.")
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "max_tokens is 0; it must be at least 1 (0 only with echo).")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one entry each: all texts, or all token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # a union of homogeneous lists: all its items are int
        return self.prompt


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """Validate a request body. Raises InvalidRequest that names the field, never echoing more than a little of it."""
    try:
        with _collector_paused():
            return kind.model_validate_json(body)
    except ValidationError as error:
        raise _as_invalid_request(error, kind.model_fields) from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's garbage collector looks again and again at the millions of new lists of a hostile body, none of which
    is garbage yet: that is three quarters of the time for which such a body holds the event loop."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _as_invalid_request(error: ValidationError, fields: Collection[str]) -> InvalidRequest:
    found = error.errors(include_url=False, include_context=False)
    same_field = [entry for entry in found if entry["loc"][:1] == found[0]["loc"][:1]]
    entry = max(same_field, key=_telling)
    message, kind = entry["msg"].rstrip("."), entry["type"]
    if kind == "json_invalid":
        return InvalidRequest(f"The request body is not valid JSON: {message.removeprefix('Invalid JSON: ')}.")
    if kind == "unsupported_field":
        return InvalidRequest(f"{message}.", param=message.split(" ", 1)[0])
    path = [str(part) for part in entry["loc"] if not _is_union_tag(part)]
    if not path:
        return InvalidRequest(f"{message}.", param=kind if kind in fields else None)
    given = entry["input"]
    shown = f" (got {given!r:.60})" if isinstance(given, str | int | float | bool) else ""
    return InvalidRequest(f"{'.'.join(path)[:200]}: {message}{shown}.", param=path[0][:200])


def _telling(entry: Any) -> tuple[bool, int]:
    """A union reports an error for each of its branches; the one that got furthest is what the client meant."""
    return not entry["type"].endswith("_type"), len(entry["loc"])


def _is_union_tag(part: str | int) -> bool:
    """pydantic puts the branch of a union into the path, e.g. "constrained-str" or "list[int]"."""
    return isinstance(part, str) and (part.startswith(("constrained", "list[", "nullable")) or part in ("str", "int"))
