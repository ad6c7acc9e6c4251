"""The load client: what it sends when, and what it makes of every kind of answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from app.bench.load import Run, check_loopback, run_load
from punica_core.bench.workload import PlannedRequest

URL = "http://127.0.0.1:1"


def event(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"text":"' + text.encode() + b'"}],"usage":null}\n\n'


def usage(prompt: int, completion: int) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n' % (prompt, completion)


DONE = b"data: [DONE]\n\n"
WHOLE = (event("a"), event("b") + event("c"), usage(3, 3) + DONE)


class Stream(httpx.AsyncByteStream):
    """A body in pieces; an exception among them is raised, an Event is waited for."""

    def __init__(self, *pieces: bytes | Exception | asyncio.Event) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, asyncio.Event):
                await piece.wait()
            else:
                yield piece
            await asyncio.sleep(0)


def plan(count: int, *, at: float | None = None) -> list[PlannedRequest]:
    return [PlannedRequest(f"m{i}", (5, 6, 7), 3, at) for i in range(count)]


def load(
    requests: list[PlannedRequest],
    answer: Callable[[httpx.Request], object],
    *,
    clients: int = 4,
    max_seconds: float = 60.0,
) -> Run:
    async def handle(request: httpx.Request) -> httpx.Response:
        found = answer(request)
        found = await found if asyncio.iscoroutine(found) else found
        return found if isinstance(found, httpx.Response) else httpx.Response(200, stream=found)  # type: ignore[arg-type]

    transport = httpx.MockTransport(handle)
    return asyncio.run(run_load(URL, requests, clients=clients, max_seconds=max_seconds, transport=transport))


def test_a_complete_stream_is_counted_and_timed() -> None:
    (outcome,) = load(plan(1), lambda request: Stream(*WHOLE)).outcomes
    assert outcome.error == ""
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (3, 3)
    assert outcome.events == 5
    assert len(outcome.arrivals) == 3
    assert outcome.planned <= outcome.sent <= outcome.arrivals[0] <= outcome.arrivals[-1] <= outcome.ended


def test_a_stream_cut_into_single_bytes_is_the_same_stream() -> None:
    pieces = [bytes([byte]) for byte in b"".join(WHOLE)]
    (outcome,) = load(plan(1), lambda request: Stream(*pieces)).outcomes
    assert (outcome.error, outcome.completion_tokens, outcome.events) == ("", 3, 5)
    assert len(outcome.arrivals) == 5


def test_the_request_asks_for_exactly_the_planned_tokens() -> None:
    bodies: list[dict[str, object]] = []
    load(plan(1), lambda request: bodies.append(json.loads(request.content)) or Stream(*WHOLE))  # type: ignore[func-returns-value]
    (body,) = bodies
    assert body["prompt"] == [5, 6, 7]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("m0", 3, True, True)


def test_a_text_prompt_and_a_free_length_are_sent_as_such() -> None:
    bodies: list[dict[str, object]] = []
    asked = [PlannedRequest("m", (5, 6), 3, text="the of", ignore_eos=False)]
    load(asked, lambda request: bodies.append(json.loads(request.content)) or Stream(*WHOLE))  # type: ignore[func-returns-value]
    assert bodies[0]["prompt"] == "the of"
    assert "ignore_eos" not in bodies[0]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda: httpx.Response(429, json={"error": {}}), "http_429"),
        (lambda: httpx.Response(503), "http_503"),
        (lambda: Stream(event("a"), b'data: {"error":{"code":"worker_lost"}}\n\n' + DONE), "error_event"),
        (lambda: Stream(event("a"), event("b")), "truncated"),
        (lambda: Stream(), "truncated"),
        (lambda: Stream(event("a"), httpx.RemoteProtocolError("gone")), "disconnect"),
        (lambda: Stream(event("a"), httpx.ReadTimeout("slow")), "timeout"),
    ],
)
def test_every_failure_has_its_kind_and_the_others_go_on(answer: Callable[[], object], kind: str) -> None:
    run = load(plan(6), lambda request: answer() if b'"m2"' in request.content else Stream(*WHOLE))
    assert [outcome.error for outcome in run.outcomes] == ["", "", kind, "", "", ""]


def test_a_refused_connection_is_an_outcome() -> None:
    def refuse(request: httpx.Request) -> object:
        raise httpx.ConnectError("refused")

    assert [outcome.error for outcome in load(plan(2), refuse).outcomes] == ["connect", "connect"]


@pytest.mark.parametrize("clients", [1, 3, 50])
def test_a_closed_loop_keeps_its_clients_busy_and_no_more(clients: int) -> None:
    running, most = 0, 0

    async def answer(request: httpx.Request) -> Stream:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return Stream(*WHOLE)

    run = load(plan(20), answer, clients=clients)
    assert len(run.outcomes) == 20
    assert most == min(clients, 20)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    async def answer_all_at_once() -> Run:
        everyone_is_here, here = asyncio.Event(), 0

        async def handle(request: httpx.Request) -> httpx.Response:
            nonlocal here
            here += 1
            if here == 10:
                everyone_is_here.set()
            return httpx.Response(200, stream=Stream(everyone_is_here, *WHOLE))

        transport = httpx.MockTransport(handle)
        return await run_load(URL, plan(10, at=0.0), clients=1, max_seconds=60.0, transport=transport)

    assert [outcome.error for outcome in asyncio.run(answer_all_at_once()).outcomes] == [""] * 10


def test_latency_counts_from_the_planned_arrival() -> None:
    requests = [PlannedRequest("m", (1,), 1, at) for at in (0.0, 0.001, 0.002)]
    outcomes = load(requests, lambda request: Stream(*WHOLE)).outcomes
    assert [outcome.planned for outcome in outcomes] == [0.0, 0.001, 0.002]
    for outcome in outcomes:
        assert outcome.sent >= outcome.planned
        assert outcome.ttft == outcome.arrivals[0] - outcome.planned
        assert outcome.latency == outcome.ended - outcome.planned


@pytest.mark.parametrize("at", [None, 0.0])
def test_a_run_ends_when_its_time_is_over(at: float | None) -> None:
    run = load(plan(5, at=at), lambda request: Stream(event("a"), asyncio.Event()), clients=2, max_seconds=0.05)
    assert {outcome.error for outcome in run.outcomes} == {"cut"}
    assert len(run.outcomes) + run.not_sent == 5
    assert run.not_sent == (3 if at is None else 0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:80", "http://127.9.9.9"])
def test_loopback_servers_are_allowed(url: str) -> None:
    check_loopback(url)


@pytest.mark.parametrize("url", ["http://example.com", "http://10.0.0.1:8000", "http://0.0.0.0", "127.0.0.1:8000", ""])
def test_other_servers_need_a_flag(url: str) -> None:
    with pytest.raises(ValueError, match="--allow-remote"):
        check_loopback(url)
