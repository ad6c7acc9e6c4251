"""What answers look like: the OpenAPI document's description of them, which tests hold against real ones.

Generation answers are put together as dictionaries and bytes (`app.formats`); these types are their contract.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

EndReason = Literal["stop", "length"]


class ErrorBody(msgspec.Struct, frozen=True):
    """message: what went wrong and what to do. param: the field at fault. code: stable, for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    """Every error that is not a 2xx."""

    error: ErrorBody


class CachedTokens(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens that were not computed again."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: each prompt once, all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptToken(msgspec.Struct, frozen=True):
    """rank: place among the reported alternatives, from 1; null for a token that is none of them."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class TopLogprob(msgspec.Struct, frozen=True):
    """An alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    """A token of a chat choice and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Those of a chat choice."""

    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(msgspec.Struct, frozen=True):
    """A chat choice's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(msgspec.Struct, frozen=True):
    """A choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists over a choice's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """A choice of a text completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """The answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(msgspec.Struct, frozen=True):
    """A model that may be asked for. parent: the base of an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    """The answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, frozen=True):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The answer of POST /detokenize."""

    prompt: str


class Status(msgspec.Struct, frozen=True):
    """The answer of GET /health and /ready."""

    status: str


class Version(msgspec.Struct, frozen=True):
    """The answer of GET /version."""

    version: str
    model: str
    architecture: str
    device: str
    dtype: str
    torch: str
    transformers: str
