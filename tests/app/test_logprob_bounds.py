"""How many logprobs a request and all requests may have, and who computes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app import generation
from tests.app.conftest import MakeServer, Server, events


@pytest.mark.parametrize(
    ("asked", "field", "shown"),
    [
        ({"n": 3, "echo": True, "logprobs": 1, "stream": True}, "echo", "30 logprobs (15 prompt tokens"),
        ({"prompt": ["hello"] * 3, "echo": True, "logprobs": 1}, "echo", "30 logprobs (15 prompt tokens"),
        ({"prompt": ["hello"] * 3, "prompt_logprobs": 1}, "prompt_logprobs", "30 logprobs"),
        ({"prompt": "a prompt that is longer", "prompt_logprobs": 1}, "prompt_logprobs", "46 logprobs"),
        ({"n": 3, "logprobs": 0, "max_tokens": 8}, "logprobs", "24 generated tokens"),
        ({"prompt": ["a", "b", "c"], "logprobs": 0, "max_tokens": 8}, "logprobs", "24 generated tokens"),
        ({"logprobs": 2, "max_tokens": 8}, "logprobs", "8 generated tokens"),
        ({"best_of": 3, "n": 2, "max_tokens": 8}, "logprobs", "24 generated tokens"),
        ({"echo": True, "logprobs": 1, "max_tokens": 6}, "logprobs", "6 generated tokens"),
    ],
    ids=str,
)
async def test_the_logprobs_of_a_request_are_bounded(
    server: Server, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], field: str, shown: str
) -> None:
    monkeypatch.setattr(generation, "MAX_LOGPROBS", 20)
    refused = await server.complete(**{"prompt": "hello"} | asked)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
    assert shown in error["message"]
    assert "at most 20" in error["message"]
    assert not server.engine.submissions


@pytest.mark.parametrize(
    "asked",
    [
        {"n": 2, "echo": True, "logprobs": 0, "max_tokens": 5},
        {"n": 3, "prompt_logprobs": 3, "max_tokens": 8},
        {"n": 2, "prompt_logprobs": 1, "max_tokens": 8},
        {"n": 3, "max_tokens": 8},
        {"logprobs": 1, "max_tokens": 10},
        {"prompt_logprobs": 3, "max_tokens": 0, "logprobs": 1, "echo": True},
        {"best_of": 2, "n": 1, "max_tokens": 8},
    ],
    ids=str,
)
async def test_what_stays_within_the_bound_is_served(
    server: Server, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setattr(generation, "MAX_LOGPROBS", 20)
    assert (await server.complete(**{"prompt": "hello"} | asked)).status_code == 200


async def test_without_max_tokens_a_chat_gets_what_its_logprobs_leave(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_LOGPROBS", 60)
    bounded = await server.chat(max_tokens=None, n=2, logprobs=True, top_logprobs=2)
    assert [choice["finish_reason"] for choice in bounded.json()["choices"]] == ["length"] * 2
    assert {len(choice["logprobs"]["content"]) for choice in bounded.json()["choices"]} == {10}
    unbounded = await server.chat(max_tokens=None, n=2)
    assert unbounded.json()["usage"]["completion_tokens"] > 100
    none_left = await server.chat(max_tokens=None, n=2, logprobs=True, top_logprobs=20, prompt_logprobs=0)
    assert (none_left.status_code, none_left.json()["error"]["param"]) == (400, "logprobs")


@pytest.mark.parametrize("end", ["done", "gone", "lost"])
async def test_logprobs_of_all_unfinished_answers_are_bounded(make_server: MakeServer, end: str) -> None:
    async with make_server(auto=False) as server:
        server.service.logprobs.capacity = 40
        first = asyncio.create_task(server.complete(logprobs=3, max_tokens=8))
        while not server.engine.running:
            await asyncio.sleep(0)
        refused = await server.complete(logprobs=1, max_tokens=8)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        assert "32 logprobs" in refused.json()["error"]["message"]
        if end == "gone":
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        elif end == "lost":
            server.engine.lose()
            assert (await first).status_code == 503
            while not server.service.is_healthy:
                await asyncio.sleep(0.01)
        else:
            for _ in range(8):
                server.engine.step()
            assert (await first).status_code == 200
        assert server.service.logprobs.used == 0
        too_long = await server.complete(logprobs=1, prompt="x" * 1000)
        assert too_long.status_code == 400
        assert server.service.logprobs.used == 0
        second = asyncio.create_task(server.complete(logprobs=1, max_tokens=1))
        while not server.engine.running:
            await asyncio.sleep(0)
        server.engine.step()
        assert (await second).status_code == 200


async def test_a_prompt_is_scored_once_for_all_its_choices(server: Server) -> None:
    asked = {"prompt": ["hello", "ab"], "n": 3, "echo": True, "logprobs": 1, "prompt_logprobs": 2, "seed": 1}
    answer = (await server.complete(**asked)).json()
    sampled = [sequence.sampling.prompt_logprobs for sequence in server.engine.submissions[0]]
    assert sampled == [2, None, None] * 2
    for prompt in (0, 3):
        first, *others = answer["choices"][prompt : prompt + 3]
        assert len(first["prompt_logprobs"]) == (5 if prompt == 0 else 2)
        for other in others:
            assert other["prompt_logprobs"] == first["prompt_logprobs"]
            assert other["logprobs"] == first["logprobs"]
    await server.chat(n=2, prompt_logprobs=0)
    assert [sequence.sampling.prompt_logprobs for sequence in server.engine.submissions[1]] == [0, None]
    streamed = await server.complete(prompt="hello", n=2, echo=True, logprobs=1, stream=True)
    assert [sequence.sampling.prompt_logprobs for sequence in server.engine.submissions[2]] == [1, 1]
    echoed = [chunk["choices"][0] for chunk in events(streamed) if chunk["choices"][0]["text"] == "hello"]
    assert sorted(choice["index"] for choice in echoed) == [0, 1]
    scored_only = await server.complete(prompt="hello", n=2, echo=True, logprobs=1, max_tokens=0)
    assert [len(choice["logprobs"]["tokens"]) for choice in scored_only.json()["choices"]] == [5, 5]
