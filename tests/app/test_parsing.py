"""What the one pass over a body accepts, refuses and says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.parsing import SMALL_BODY
from app.schemas import ChatRequest, CompletionRequest, parse, prompts_of
from punica_core.errors import InvalidRequest
from tests.app.conftest import BASE, Server

CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}


def refusal(kind: type[Any], body: dict[str, Any] | bytes) -> InvalidRequest:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, text)
    return caught.value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 5_000_000}, "n: expected int <= 128 (got 5000000)."),
        ({"temperature": "hot"}, 'temperature: expected float | null, got str (got "hot").'),
        ({"messages": [{"content": "hi"}]}, "messages.0.role: this field is required."),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role: invalid enum value 'robot'."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0: content parts of type image_url are not supported; use text.",
        ),
        ({"tools": [{}]}, "tools is not supported."),
        ({"stop": "x" * 2000}, "stop: expected str of length <= 1024."),
        ({"model": None}, "model: expected str, got null."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_message_says_what_was_got_and_what_is_wanted(change: dict[str, Any], message: str) -> None:
    assert refusal(ChatRequest, CHAT | change).message == message


def test_a_missing_field_is_named() -> None:
    error = refusal(ChatRequest, {"model": BASE})
    assert (error.message, error.param) == ("messages: this field is required.", "messages")


@pytest.mark.parametrize("padding", [0, SMALL_BODY], ids=["small", "large"])
def test_a_body_of_any_size_is_judged_alike(padding: int) -> None:
    body = CHAT | {"user": "x" * padding}
    assert refusal(ChatRequest, body | {"tools": [{}]}).param == "tools"
    assert refusal(ChatRequest, body | {"n": 0}).message == "n: expected int >= 1 (got 0)."
    assert parse(ChatRequest, json.dumps(body | {"odd": 1, "tools": None, "n": 2}).encode()).n == 2


def test_unknown_fields_are_told_and_known_ones_are_not() -> None:
    told: list[str] = []
    body = CHAT | {"odd": 1, "user": "me", "tools": [], "n": 1, "x" * 300: 2}
    parse(ChatRequest, json.dumps(body).encode(), told.extend)
    assert told == ["odd", "x" * 64]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "not valid JSON"),
        (b"[]", "expected object, got array"),
        (b'{"model": "a"} x', "not valid JSON"),
        (b'{"model": "\\ud800"}', "half of a surrogate pair"),
        (b'{"model": "a\\ud800b", "messages": []}', "half of a surrogate pair"),
        (b'{"model": "\\udc00"}', "invalid utf-16 surrogate pair"),
        (b'{"model": "\\ud800\\u0041"}', "invalid utf-16 surrogate pair"),
        (b'{"model": "\\u12"}', "escape"),
        (b'{"model": "a", "temperature": NaN}', "not valid JSON"),
        (b'{"model": "a", "messages": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"model": "a", "odd": ' + b"[" * 200_000, "nested too deeply"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)
def test_what_is_no_json_object_is_told_so(body: bytes, problem: str) -> None:
    assert problem in refusal(ChatRequest, body).message


@pytest.mark.parametrize("padding", [0, SMALL_BODY])
def test_of_a_field_given_twice_the_last_counts(padding: int) -> None:
    def body(fields: str) -> bytes:
        return f'{{"pad": "{"x" * padding}", "model": "first", "prompt": "a", {fields}, "model": "last"}}'.encode()

    assert parse(CompletionRequest, body('"n": 3, "n": 2')).n == 2
    assert parse(CompletionRequest, body('"suffix": "x", "suffix": ""')).model == "last"
    for fields in ('"n": 2, "n": 0', '"n": 0, "n": 2', '"suffix": "", "suffix": "x"', '"suf\\u0066ix": "x"'):
        with pytest.raises(InvalidRequest):
            parse(CompletionRequest, body(fields))


def test_a_prompt_has_four_forms() -> None:
    def prompts(value: Any, indent: int | None = None) -> Any:
        body = json.dumps({"model": BASE, "prompt": value}, indent=indent).encode()
        return prompts_of(parse(CompletionRequest, body).prompt)

    for indent in (None, 40):
        assert prompts("a [[") == prompts("a [[", indent) == ["a [["]
        assert prompts(["a", "[b"], indent) == ["a", "[b"]
        assert prompts([1, 2], indent) == [[1, 2]]
        assert prompts([[1, 2], [3]], indent) == [[1, 2], [3]]


async def test_all_four_forms_reach_the_engine_alike(server: Server) -> None:
    ids = (await server.http.post("/tokenize", json={"prompt": "hello"})).json()["tokens"]
    for prompt in ("hello", ["hello"], ids, [ids]):
        assert (await server.complete(prompt=prompt)).json()["choices"][0]["text"] == "hellohel"
    assert {tuple(message[0].prompt_ids) for message in server.engine.submissions} == {tuple(ids)}


async def test_a_wrong_method_is_told_the_right_one(server: Server) -> None:
    response = await server.http.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
