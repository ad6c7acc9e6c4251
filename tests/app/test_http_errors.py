"""Bad input costs a clear 4xx in the envelope and nothing else."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from app.api_errors import STATUS_BY_CODE
from app.schemas import ChatRequest, CompletionRequest
from punica_core.errors import ConfigError, InternalError, PunicaError
from tests.app.conftest import BASE, MakeServer, Server

CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def codes(kind: type[PunicaError]) -> set[str]:
    return {kind.code}.union(*(codes(sub) for sub in kind.__subclasses__()))


def test_every_code_of_the_tree_has_a_status() -> None:
    assert codes(PunicaError) - {ConfigError.code} == STATUS_BY_CODE.keys()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "hi"}] * 5000}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 5_000_000}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 7}, "stop"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 10**9, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1000000000000000000000": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e9}}, "logit_bias"),
        ({"logit_bias": {str(index): 0 for index in range(100_000)}}, "logit_bias"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"audio": {}}, "audio"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"guided_json": {}}, "guided_json"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs"),
        ({"best_of": 2}, "best_of"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else value,
)
async def test_a_wrong_field_is_a_400_that_names_it(server: Server, change: dict[str, Any], param: str) -> None:
    response = await server.http.post("/v1/chat/completions", json=CHAT | change)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "invalid_value"), error
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert len(response.content) < 1000
    assert server.engine.submissions == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a"] * 513}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"suffix": "end"}, "suffix"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else value,
)
async def test_a_wrong_field_of_a_completion_is_a_400_that_names_it(
    server: Server, change: dict[str, Any], param: str
) -> None:
    response = await server.complete(**change)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert server.engine.submissions == []


@pytest.mark.parametrize(
    "change",
    [
        {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "functions": []},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True},
        {"unknown_field": {"deep": [1, 2]}, "another": None},
        {"temperature": None, "top_p": None, "n": None, "stop": None, "seed": None, "logit_bias": None, "stream": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "temperature": 1},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=lambda change: ",".join(change)[:40],
)
async def test_harmless_fields_are_accepted(server: Server, change: dict[str, Any]) -> None:
    response = await server.http.post("/v1/chat/completions", json=CHAT | change)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "base", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "base", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "base", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"a":' * 50_000,
        b"[" * 500_000,
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_what_is_no_json_object_is_a_400(server: Server, body: bytes) -> None:
    response = await server.http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_too_long_a_prompt_names_both_numbers(make_server: MakeServer) -> None:
    async with make_server(max_model_len=40) as server:
        response = await server.chat(messages=[{"role": "user", "content": "x" * 100}], max_tokens=8)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 40 tokens" in error["message"]
    assert "127 tokens (119 in the prompt, 8 in the output)" in error["message"]
    assert "context_length_exceeded" in error["message"]


async def test_a_prompt_that_fills_the_context_alone_is_what_the_error_names(make_server: MakeServer) -> None:
    async with make_server(max_model_len=40) as server:
        chat = await server.chat(messages=[{"role": "user", "content": "x" * 100}], max_tokens=None)
        completion = await server.complete(prompt="x" * 100, max_tokens=None)
        exact = await server.complete(prompt="x" * 40, max_tokens=None)
    assert [response.json()["error"]["param"] for response in (chat, completion, exact)] == [
        "messages", "prompt", "prompt",
    ]  # fmt: skip
    assert "100 in the prompt, at least 1 in the output" in completion.json()["error"]["message"]


def test_the_documentation_names_every_field_and_code() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
    for model in (ChatRequest, CompletionRequest):
        for name in (*model.__struct_fields__, *model.REFUSED):
            assert f"`{name}`" in text or name.startswith("guided_") or f"`{name}." in text, name
    undocumented = [code for code in STATUS_BY_CODE if f"`{code}`" not in text]
    assert undocumented == ["invalid_request", "adapter_error", "capacity", "engine_error"]  # only their children occur


@pytest.mark.parametrize(
    "name",
    [
        "typo",
        "SQL",
        "sqll",
        "sql/",
        "./sql",
        "../adapters/sql",
        "/etc",
        "sql\x00",
        "a\\b",
        " sql ",
        '"sql',
        "x" * 300,
        "Base",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_a_404_and_never_the_base(server: Server, name: str, stream: bool) -> None:
    chat, completion = await server.chat(model=name, stream=stream), await server.complete(model=name, stream=stream)
    for response in (chat, completion):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
    assert server.engine.submissions == []


async def test_an_unknown_model_is_told_what_there_is(server: Server) -> None:
    message = (await server.chat(model="sqll")).json()["error"]["message"]
    assert "'sql'" in message or '"sql"' in message or " sql" in message
    assert "base" in message


@pytest.mark.parametrize("declared", [True, False])
async def test_too_large_a_body_is_a_413(make_server: MakeServer, declared: bool) -> None:
    body = json.dumps(CHAT | {"user": "x" * 2000}).encode()

    async def in_pieces() -> Any:
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    async with make_server(settings={"max_body_bytes": 1000}) as server:
        response = await server.http.post("/v1/chat/completions", content=body if declared else in_pieces())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)],
)
async def test_errors_of_the_router_have_the_envelope(server: Server, method: str, path: str, status: int) -> None:
    response = await server.http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert ("GET /v1/models lists what is served" in error["message"]) == (status == 404)


async def test_an_unexpected_exception_is_a_500_in_the_envelope(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(server.service.batcher, "open", broken)
    response = await server.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "abc"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == InternalError.code
    assert "secret" not in response.text
    assert "abc" in response.json()["error"]["message"]
    assert "secret detail" in caplog.text


async def test_request_id_is_echoed_or_made(server: Server) -> None:
    given = await server.http.get("/health", headers={"x-request-id": "abc-1"})
    made = [(await server.http.get("/health")).headers["x-request-id"] for _ in range(2)]
    odd = await server.http.get("/health", headers={"x-request-id": "x" * 500})
    assert given.headers["x-request-id"] == "abc-1"
    assert len(set(made)) == 2
    assert len(odd.headers["x-request-id"]) == 32


async def test_a_full_queue_is_a_429_with_retry_after(make_server: MakeServer) -> None:
    settings = {"max_num_seqs": 1, "max_queue": 1, "max_num_batched_tokens": 8}
    async with make_server(settings=settings, auto=False) as server:
        waiting = [asyncio.create_task(server.complete(max_tokens=1)) for _ in range(2)]
        while not server.engine.submissions:
            await asyncio.sleep(0)
        refused = await server.complete()
        server.engine.step()
        answers = await asyncio.gather(*waiting)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_too_many_waiting_prompt_tokens_are_a_429(make_server: MakeServer) -> None:
    async with make_server(settings={"max_queue_tokens": 8}, auto=False) as server:
        waiting = asyncio.create_task(server.complete(prompt=[1] * 5, max_tokens=2))
        while not server.engine.submissions:
            await asyncio.sleep(0)
        refused = await server.complete(prompt=[1] * 5)
        metrics = (await server.http.get("/metrics")).text
        server.engine.step()  # the first token: it waits no more
        admitted = asyncio.create_task(server.complete(prompt=[1] * 5, max_tokens=1))
        while len(server.engine.submissions) < 2:
            await asyncio.sleep(0)
        server.engine.step()
        answers = await asyncio.gather(waiting, admitted)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert "punica_queued_prompt_tokens 5.0" in metrics
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_unknown_fields_are_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="app.service")
    for _ in range(3):
        await server.http.post("/v1/chat/completions", json=CHAT | {"wibble": 1, "user": "me", "tools": None})
    assert [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()] == [
        "Requests carry the unknown field 'wibble'; it is ignored."
    ]


async def test_the_openapi_document_has_the_bodies_and_resolves(server: Server) -> None:
    document = (await server.http.get("/openapi.json")).json()
    for path, name in (("/v1/chat/completions", "ChatRequest"), ("/v1/completions", "CompletionRequest")):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= document["components"]["schemas"].keys()
    assert "Message" in references


def nonsense(random: Random) -> Any:
    """A JSON value that some client might send."""
    scalars: list[Any] = [None, True, 0, -1, 1, 0.5, 2**31, 2**63, -(2**64), 1e308, "", "a", "\u0000", "😀" * 9]
    if random.random() < 0.7:
        return random.choice(scalars)
    if random.random() < 0.5:
        return [nonsense(random) for _ in range(random.randrange(4))]
    keys = ("role", "content", "type", "text", "1", "300", "include_usage", "name", "tool_calls")
    return {random.choice(keys): nonsense(random) for _ in range(random.randrange(4))}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_fuzzed_bodies_never_give_a_5xx(server: Server, path: str) -> None:
    random, statuses = Random(7), Counter[int]()
    fields = [*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *ChatRequest.REFUSED, "odd"]
    valid: dict[str, Any] = CHAT | {"prompt": "hello"}
    for _ in range(400):
        body = valid | {random.choice(fields): nonsense(random) for _ in range(random.randrange(1, 3))}
        response = await server.http.post(path, content=json.dumps(body))
        statuses[response.status_code] += 1
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert min(statuses[200], statuses[400]) > 20
    assert (await server.chat()).status_code == 200
