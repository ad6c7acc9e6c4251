"""Bodies made to cost much cost little."""

from __future__ import annotations

import contextlib
import gc
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import normalizers

from app.schemas import ChatRequest, CompletionRequest, parse
from app.tokenizer import Tokenizer
from punica_core.errors import InvalidRequest
from tests.app.conftest import BASE, MakeServer
from tests.support.tokenizer_folders import BYTE_LEVEL_VOCAB, byte_level_tokenizer


@pytest.mark.parametrize("ok", [True, False])
def test_a_body_of_many_lists_is_read_without_collecting_garbage(ok: bool) -> None:
    collections: list[str] = []
    body = json.dumps({"model": BASE, "prompt": "a", "metadata": [[]] * 20_000, "n": 1 if ok else 0}).encode()

    def watch(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.collect()
    gc.callbacks.append(watch)
    try:
        with contextlib.nullcontext() if ok else pytest.raises(InvalidRequest):
            parse(CompletionRequest, body)
        during = len(collections)
    finally:
        gc.callbacks.remove(watch)
    assert during <= 2  # at most the one that was due when parsing had ended
    assert gc.isenabled()


_MANY = 20_000
_OBJECT = {f"k{index}": 1 for index in range(_MANY)}


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (CompletionRequest, _OBJECT),
        (CompletionRequest, {"metadata": _OBJECT}),
        (CompletionRequest, {"odd": [[]] * _MANY}),
        (CompletionRequest, {"logit_bias": _OBJECT}),
        (CompletionRequest, {"prompt": [{}] * _MANY}),
        (CompletionRequest, {"prompt": [[1]] * _MANY}),
        (CompletionRequest, {"prompt": [[{}] * 200] * 100}),
        (ChatRequest, {"messages": [{}] * _MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"} | _OBJECT]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * _MANY}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * _MANY}]}),
        (ChatRequest, {"chat_template_kwargs": _OBJECT}),
        (ChatRequest, {"tools": [[]] * _MANY}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_what_is_unknown_or_wrong_in_a_body_does_not_become_objects(kind: type[Any], field: dict[str, Any]) -> None:
    body = json.dumps({"model": BASE, "messages": [{"role": "user", "content": "a"}], "prompt": "a"} | field).encode()
    assert memory_of(lambda: json.loads(body)) > 6 * len(body)  # what a parser of everything makes of it

    def read() -> None:
        with contextlib.suppress(InvalidRequest):
            request = parse(kind, body)
            request.biases()
            request.prompts() if kind is CompletionRequest else request.template_variables()

    read()  # once for what is made once
    assert memory_of(read) < 3 * len(body)  # a copy or two of a part of it


def memory_of(work: Callable[[], object]) -> int:
    """Bytes in use at the worst moment of `work` beyond those before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


async def test_a_hopelessly_long_text_is_refused_without_being_tokenized(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[int] = []
    encode = Tokenizer.encode

    def counted(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenized.append(len(text))
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    async with make_server(max_model_len=40) as server:
        text = "x" * 1000  # the longest token has 13 bytes
        completion = await server.complete(prompt=text)
        chat = await server.chat(messages=[{"role": "user", "content": text}])
        hopeful = await server.complete(prompt="x" * 45)
    for response, field in ((completion, "prompt"), (chat, "messages"), (hopeful, "prompt")):
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert response.json()["error"]["param"] == field
    assert tokenized == [45]


@pytest.mark.parametrize("text", ["", "x", "<|endoftext|>" * 50, "é" * 50, "a\u0301" * 50, " " * 99])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_the_fewest_tokens_of_a_text_are_never_more_than_it_has(text: str, normalizer: Any) -> None:
    rust = byte_level_tokenizer()
    rust.normalizer = normalizer
    tokenizer = Tokenizer(rust, BYTE_LEVEL_VOCAB, {}, None)
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
