"""Streams as a client sees them go by: comments while nothing comes, and stop strings that no reader has to find."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from punica_core.errors import AdapterInvalid
from punica_core.protocol import Outputs, SequenceOutput
from tests.app.conftest import BASE, MakeServer, Server
from tests.support.tokenizer_folders import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass
class Client:
    """A request in progress. reads: cleared, the client stops reading and the server's sends wait."""

    status: int | None = None
    body: list[bytes] = field(default_factory=list)
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    leaves: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def requesting(server: Server, path: str, **body: Any) -> AsyncIterator[Client]:
    """POST a body and look on while it is answered; the request ends with the block."""
    client = Client()
    client.reads.set()
    messages = [{"type": "http.request", "body": json.dumps({"model": BASE} | body).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await client.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await client.reads.wait()
        if message["type"] == "http.response.start":
            client.status = message["status"]
        else:
            client.body.append(message["body"])

    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
        "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": [],
    }  # fmt: skip
    task = asyncio.create_task(server.app(scope, receive, send))
    try:
        yield client
    finally:
        client.reads.set()
        client.leaves.set()
        await task


def data(client: Client) -> list[Any]:
    events = b"".join(client.body).split(b"\n\n")
    return [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]


async def test_a_silent_stream_starts_and_sends_comments(make_server: MakeServer) -> None:
    async with (
        make_server(settings={"stream_keep_alive": 0.01}, auto=False) as server,
        requesting(server, "/v1/completions", prompt="ab", max_tokens=2, stream=True) as client,
    ):
        await client.until(lambda: len(client.body) >= 3)
        assert client.status == 200
        assert set(client.body) == {KEEP_ALIVE}
        server.engine.step()
        await client.until(lambda: bool(data(client)))
        before = client.body.count(KEEP_ALIVE)
        await client.until(lambda: client.body.count(KEEP_ALIVE) > before)  # also between tokens
        server.engine.step()
        await client.until(lambda: client.body[-1].endswith(b"[DONE]\n\n"))
        assert [chunk["choices"][0]["text"] for chunk in data(client)] == ["a", "b"]


async def test_an_error_after_a_comment_is_an_event(make_server: MakeServer) -> None:
    async with (
        make_server(
            settings={"stream_keep_alive": 0.01}, auto=False, reply=lambda sequence: AdapterInvalid("damaged")
        ) as server,
        requesting(server, "/v1/completions", prompt="a", stream=True) as client,
    ):
        await client.until(lambda: KEEP_ALIVE in client.body)
        server.engine.step()
        await client.until(lambda: client.body[-1].endswith(b"[DONE]\n\n"))
        assert [event["error"]["code"] for event in data(client)] == ["adapter_invalid"]


async def test_what_is_not_streamed_or_not_silent_gets_no_comment(make_server: MakeServer) -> None:
    async with (
        make_server(settings={"stream_keep_alive": 0.01}, auto=False) as server,
        requesting(server, "/v1/completions", prompt="a", max_tokens=1) as client,
    ):
        await asyncio.sleep(0.05)
        assert (client.status, client.body) == (None, [])
        server.engine.step()
        await client.until(lambda: bool(client.body))
        assert json.loads(client.body[0])["choices"][0]["text"] == "a"
    async with (
        make_server(settings={"stream_keep_alive": 5.0}, step_seconds=0.01) as server,
        requesting(server, "/v1/completions", prompt="a", max_tokens=5, stream=True) as client,
    ):
        await client.until(lambda: bool(client.body) and client.body[-1].endswith(b"[DONE]\n\n"))
        assert KEEP_ALIVE not in client.body


@pytest.mark.parametrize("stop", ["END", None])
async def test_a_stop_string_ends_the_sequence_though_the_client_does_not_read(
    make_server: MakeServer, stop: str | None
) -> None:
    text = "one END two three"
    async with (
        make_server(auto=False, reply=lambda sequence: TOKENIZER.encode(text).ids) as server,
        requesting(server, "/v1/completions", prompt="a", max_tokens=50, stream=True, stop=stop) as client,
    ):
        await client.until(lambda: bool(server.engine.submissions))
        server.engine.step()
        await client.until(lambda: bool(data(client)))
        client.reads.clear()
        for _ in range(len("one END")):
            server.engine.step()
            await asyncio.sleep(0.002)
        assert server.engine.cancelled == ([1] if stop else [])  # without the stop string it goes on
        while server.engine.running:
            server.engine.step()
        client.reads.set()
        await client.until(lambda: client.body[-1].endswith(b"[DONE]\n\n"))
        assert "".join(chunk["choices"][0]["text"] for chunk in data(client)) == ("one " if stop else text)
        assert data(client)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_found_between_reads_loses_nothing(make_server: MakeServer) -> None:
    reply = TOKENIZER.encode("one END two").ids
    async with (
        make_server(auto=False, reply=lambda sequence: reply) as server,
        requesting(
            server, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=50, n=2,
            stop=["END"], logprobs=True,
        ) as client,
    ):  # fmt: skip
        await client.until(lambda: bool(server.engine.submissions))
        for _ in range(len(reply)):  # in one turn of the event loop
            server.engine.step()
        await client.until(lambda: bool(client.body))
        answer = json.loads(client.body[0])
        assert server.service.batcher.in_flight == 0
    for choice in answer["choices"]:
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
        assert len(choice["logprobs"]["content"]) == len("one END")
    assert answer["usage"]["completion_tokens"] == 2 * len("one END")


async def test_a_client_that_leaves_during_the_silence_cancels(make_server: MakeServer) -> None:
    async with make_server(settings={"stream_keep_alive": 0.01}, auto=False) as server:
        async with requesting(server, "/v1/completions", prompt="ab", max_tokens=2, stream=True) as client:
            await client.until(lambda: KEEP_ALIVE in client.body)
            client.leaves.set()
            await client.until(lambda: server.engine.cancelled == [1])
        sent = len(client.body)
        await asyncio.sleep(0.05)
        assert len(client.body) == sent  # its timer ended with it


async def test_the_fingerprint_names_the_adapter_whichever_choice_comes_first(make_server: MakeServer) -> None:
    async with (
        make_server(auto=False) as server,
        requesting(server, "/v1/completions", model="sql", prompt="a", max_tokens=1, n=2, stream=True) as client,
    ):
        await client.until(lambda: bool(server.engine.submissions))
        second = server.engine.submissions[0][1].request_id
        server.engine.emit(Outputs([SequenceOutput(second, [1], adapter_key="the-key")]))
        await client.until(lambda: bool(data(client)))
        assert data(client)[0]["system_fingerprint"].endswith(":the-key")
        client.leaves.set()
