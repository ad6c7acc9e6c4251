"""How many logprobs a request and all requests may have, and who computes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app import generation
from app.budget import Budget
from tests.app.conftest import MakeServer, Server, events


@pytest.mark.parametrize(
    ("asked", "field", "shown"),
    [
        ({"n": 3, "echo": True, "logprobs": 1, "stream": True}, "echo", "30 logprobs (15 prompt tokens"),
        ({"prompt": ["hello"] * 3, "echo": True, "logprobs": 1}, "echo", "30 logprobs (15 prompt tokens"),
        ({"prompt": ["hello"] * 3, "prompt_logprobs": 1}, "prompt_logprobs", "30 logprobs"),
        ({"prompt": "a prompt that is longer", "prompt_logprobs": 1}, "prompt_logprobs", "46 logprobs"),
        ({"prompt": ["hello"] * 3, "prompt_logprobs": 0, "echo": True, "logprobs": 1}, "echo", "30 logprobs"),
        ({"n": 3, "logprobs": 0, "max_tokens": 8}, "logprobs", "24 generated tokens"),
        ({"prompt": ["a", "b", "c"], "logprobs": 0, "max_tokens": 8}, "logprobs", "24 generated tokens"),
        ({"logprobs": 2, "max_tokens": 8}, "logprobs", "8 generated tokens"),
        ({"best_of": 3, "n": 2, "max_tokens": 8}, "best_of", "24 generated tokens"),
        ({"best_of": 3, "n": 2, "logprobs": 1, "max_tokens": 8}, "logprobs", "24 generated tokens"),
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


@pytest.mark.parametrize(("capacity", "num_tokens"), [(40, 21), (90, 30)])
@pytest.mark.parametrize("options", [{}, {"stop": ["never"]}, {"stream": True}], ids=str)
async def test_an_answer_of_open_length_is_given_logprobs_while_there_is_room(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, capacity: int, num_tokens: int, options: dict[str, Any]
) -> None:
    """Two logprobs a token. The token that finds no room is the last; beside it somebody has reserved 12."""
    monkeypatch.setattr(generation, "RESERVED_TOKENS", 4)
    async with make_server(auto=False, reply=lambda sequence: [97] * min(sequence.sampling.max_tokens, 29)) as server:
        server.service.logprobs.capacity = capacity + 12
        bounded = asyncio.create_task(server.complete(logprobs=1, max_tokens=6))
        chat = asyncio.create_task(server.chat(max_tokens=None, logprobs=True, top_logprobs=1, **options))
        while len(server.engine.running) < 2:
            await asyncio.sleep(0)
        assert server.service.logprobs.used == 12 + 8
        for step in range(30):
            if step == 6:
                assert len((await bounded).json()["choices"][0]["logprobs"]["tokens"]) == 6
                held = server.service.logprobs.take(12)
            server.engine.step()
            await asyncio.sleep(0)
            assert server.service.logprobs.used <= capacity + 12
        answer = await chat
        assert held is not None
        held.end()
        assert server.service.logprobs.used == 0
        assert len(server.engine.cancelled) == (num_tokens == 21)
        if "stream" in options:
            choices = [event["choices"][0] for event in events(answer) if event["choices"]]
            content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        else:
            choices = answer.json()["choices"]
            content = choices[-1]["logprobs"]["content"]
        assert choices[-1]["finish_reason"] == ("length" if num_tokens == 21 else "stop")
        assert len(content) == (num_tokens if num_tokens == 21 else 29)


def test_a_share_grows_with_what_is_spent_and_gives_all_of_it_back() -> None:
    budget = Budget(10)
    share, other = budget.take(4), budget.take(3)
    assert share is not None
    assert other is not None
    assert share.spend(4)
    assert budget.used == 7
    assert share.spend(3)
    assert budget.used == 10
    assert not share.spend(1)
    assert other.spend(3), "what was reserved is there"
    other.end()
    assert share.spend(3)
    assert budget.used == 10
    share.end()
    assert budget.used == 0
    assert not share.spend(1), "nobody would give it back"
    assert budget.used == 0
