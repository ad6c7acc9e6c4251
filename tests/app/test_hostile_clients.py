"""Clients that send slowly, read nothing or take every connection cost others nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from app import body as body_module
from app import http_protocol
from app.body import Bodies, Body
from punica_core.errors import InvalidRequest, QueueFull, RequestTooLarge
from tests.app.conftest import BASE, MakeServer
from tests.app.test_live_server import Process, resident_bytes, running


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Upload:
    """A body that arrives as the test says."""

    def __init__(self, bodies: Bodies, max_bytes: int = 1000) -> None:
        self.body: Body = bodies.begin()
        self._chunks: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        request = Request({"type": "http", "headers": []}, self._chunks.get)
        self.read = asyncio.ensure_future(self.body.read(request, max_bytes))

    async def send(self, chunk: bytes, *, last: bool = False) -> None:
        self._chunks.put_nowait({"type": "http.request", "body": chunk, "more_body": not last})
        for _ in range(10):
            await asyncio.sleep(0)

    async def leave(self) -> None:
        self._chunks.put_nowait({"type": "http.disconnect"})
        with pytest.raises(InvalidRequest):
            await self.read


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_a_body_counts_from_its_first_byte_until_its_end(clock: Clock) -> None:
    bodies = Bodies(100, clock)
    upload = Upload(bodies)
    await upload.send(b"x" * 30)
    assert bodies.used == 30
    await upload.send(b"y" * 10, last=True)
    assert await upload.read == b"x" * 30 + b"y" * 10
    assert bodies.used == 40
    upload.body.end()
    upload.body.end()
    assert bodies.used == 0


async def test_bodies_that_fail_are_given_back(clock: Clock) -> None:
    bodies = Bodies(100, clock)
    with bodies.begin() as body:
        assert body.size == 0
    gone, large = Upload(bodies), Upload(bodies, max_bytes=50)
    await gone.send(b"x" * 30)
    await large.send(b"x" * 51)
    await gone.leave()
    with pytest.raises(RequestTooLarge):
        await large.read
    for upload in (gone, large):
        upload.body.end()
    assert bodies.used == 0


async def test_without_room_the_newcomer_is_refused_while_all_are_young(clock: Clock) -> None:
    bodies = Bodies(100, clock)
    first, second = Upload(bodies), Upload(bodies)
    await first.send(b"x" * 60)
    clock.now += body_module.PATIENCE
    await second.send(b"x" * 60)
    with pytest.raises(QueueFull, match="take 60 of 100 bytes"):
        await second.read
    await first.send(b"x" * 40, last=True)
    assert len(await first.read) == 100


async def test_the_body_that_arrives_longest_makes_room(clock: Clock) -> None:
    bodies = Bodies(100, clock)
    oldest, old = Upload(bodies), Upload(bodies)
    await oldest.send(b"x" * 40)
    await old.send(b"x" * 40)
    clock.now += body_module.PATIENCE + 0.1
    young = Upload(bodies)
    await young.send(b"x" * 50, last=True)
    assert len(await young.read) == 50
    with pytest.raises(QueueFull, match="took more than 5 s"):
        await oldest.read
    assert bodies.used == 90
    await old.send(b"x" * 10, last=True)
    assert len(await old.read) == 50
    await oldest.send(b"more")
    assert bodies.used == 100


async def test_a_body_that_gives_way_when_it_is_complete_is_not_read_half(clock: Clock) -> None:
    bodies = Bodies(100, clock)
    old, young = Upload(bodies), Upload(bodies)
    await old.send(b"x" * 60)
    clock.now += 6
    for upload in (young, old):  # both are there before either is read on
        upload._chunks.put_nowait({"type": "http.request", "body": b"y" * 50, "more_body": False})
    assert len(await young.read) == 50
    with pytest.raises(QueueFull):
        await old.read


async def test_complete_bodies_are_never_taken(clock: Clock) -> None:
    bodies = Bodies(100, clock)
    complete = Upload(bodies)
    await complete.send(b"x" * 60, last=True)
    clock.now += 100
    late = Upload(bodies)
    await late.send(b"x" * 60)
    with pytest.raises(QueueFull):
        await late.read
    assert len(await complete.read) == 60


async def test_a_request_gives_its_body_back_when_it_is_admitted_or_refused(make_server: MakeServer) -> None:
    async with make_server(auto=False) as server:
        running_one = asyncio.create_task(server.complete(prompt="x" * 100))
        while not server.engine.running:
            await asyncio.sleep(0)
        assert server.service.bodies.used == 0
        assert (await server.complete(prompt=5)).status_code == 400
        assert (await server.http.post("/tokenize", json={"prompt": "x"})).status_code == 200
        assert (await server.http.post("/detokenize", json={"tokens": [10**9]})).status_code == 400
        assert server.service.bodies.used == 0
        for _ in range(8):
            server.engine.step()
        assert (await running_one).status_code == 200


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_slow_bodies_make_room_for_one_that_comes_at_once(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setattr(body_module, "PATIENCE", 600.0)
    async with make_server(settings={"max_body_bytes": 1000, "max_total_body_bytes": 1000}) as server:

        async def slowly() -> AsyncIterator[bytes]:
            yield b"{" + b" " * 900
            await asyncio.sleep(60)

        slow = asyncio.create_task(server.http.post(route, content=slowly()))
        while server.service.bodies.used < 900:
            await asyncio.sleep(0)
        assert "punica_request_body_bytes 901.0" in (await server.http.get("/metrics")).text
        refused = await server.complete(prompt="x" * 100)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "retry-after" in refused.headers
        monkeypatch.setattr(body_module, "PATIENCE", 0.0)
        assert (await server.complete(prompt="x" * 100)).status_code == 200
        response = await slow
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert server.service.bodies.used == 0


def connected(server: Process) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def head(route: str, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (route.encode(), size, body)


def status_of(connection: socket.socket) -> int:
    """Read one response."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    start, _, body = received.partition(b"\r\n\r\n")
    length = int(start.partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(1 << 16)
    return int(start.split(b" ")[1])


@contextlib.contextmanager
def crowd(server: Process, count: int, said: bytes = b"") -> Iterator[Sequence[socket.socket]]:
    """So many connections that say no more than this."""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = stack.enter_context(connected(server))
            connection.sendall(said)
            connections.append(connection)
        yield connections


LIMIT = 128
"""Connections of a server that may open 256 files."""


@pytest.fixture
def small(model_dir: Path) -> Iterator[Process]:
    with running(model_dir, open_files=256) as server:
        yield server


def test_a_server_full_of_slow_clients_answers_others_after_a_while(small: Process) -> None:
    begun = head("/v1/completions", b"{", length=100)
    with crowd(small, LIMIT, begun) as slow:
        probes = [httpx.get(f"{small.url}/{path}").status_code for path in ("health", "ready")]
        assert probes == [200, 200]
        early = httpx.get(f"{small.url}/version")
        assert (early.status_code, early.json()["error"]["code"]) == (503, "too_many_connections")
        assert early.headers["retry-after"] == "1"
        time.sleep(http_protocol.PATIENCE + 0.2)
        assert httpx.get(f"{small.url}/version").status_code == 200
        assert slow[0].makefile("rb").read().startswith(b"HTTP/1.1 503 ")  # the oldest made room
        slow[-1].sendall(b" " * 98 + b"}")
        assert slow[-1].recv(1 << 16).startswith(b"HTTP/1.1 400 ")  # the others did not


def test_idle_connections_make_room_at_once(small: Process) -> None:
    with crowd(small, LIMIT, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") as idle:
        for connection in idle:
            assert status_of(connection) == 200
        assert httpx.get(f"{small.url}/health").status_code == 200
        assert idle[0].recv(1) == b""  # closed
        idle[-1].sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
        assert status_of(idle[-1]) == 200


def test_a_crowd_beyond_all_files_is_survived(small: Process) -> None:
    with crowd(small, 3 * LIMIT), contextlib.suppress(httpx.TransportError):
        httpx.get(f"{small.url}/health")
    body = {"model": BASE, "prompt": "a", "max_tokens": 3}
    assert httpx.post(f"{small.url}/v1/completions", json=body).status_code == 200


MANY = {"messages": [{"role": "user", "content": "A" * 3000}], "n": 16, "model": BASE, "stream": True}
MANY |= {"logprobs": True, "top_logprobs": 20, "max_tokens": 3000}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_reads_nothing_is_cut_off_and_costs_others_nothing(model_dir: Path, stream: bool) -> None:
    """Four of them ask for 48,000 tokens with 20 alternatives each: 32 MB as they are kept, 180 MB as text."""
    body = json.dumps(MANY | {"stream": stream}).encode()
    quick = {"model": BASE, "prompt": "a", "max_tokens": 1}
    with running(model_dir, "--send-timeout", "1.5") as server:
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=30))
            assert (await http.post("/v1/completions", json=quick)).status_code == 200
            before, most = resident_bytes(server.process.pid), 0
            for _ in range(4):
                dead = stack.enter_context(socket.socket())
                dead.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                host, port = server.url.removeprefix("http://").split(":")
                dead.connect((host, int(port)))
                dead.sendall(head("/v1/chat/completions", body))
            begun, waits = time.monotonic(), []
            while await server.metric("punica_in_flight") or await open_connections(server) > 1:
                started = time.monotonic()
                assert (await http.post("/v1/completions", json=quick)).status_code == 200
                waits.append(time.monotonic() - started)
                most = max(most, resident_bytes(server.process.pid) - before)
                assert time.monotonic() - begun < 60
                await asyncio.sleep(0.05)
    assert waits
    assert most < 90e6
    assert sorted(waits)[len(waits) // 2] < 5


async def open_connections(server: Process) -> int:
    """Established ones on the server's side."""
    port = f"{int(server.url.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(line[1].endswith(f":{port}") and line[3] == "01" for line in lines)


async def test_a_client_that_reads_slowly_gets_all(model_dir: Path) -> None:
    """Some 60 kB in each span of send_timeout: little, but something."""
    with running(model_dir, "--send-timeout", "0.4") as server:
        body = MANY | {"n": 1, "max_tokens": 600}
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = server.url.removeprefix("http://").split(":")
            slow.connect((host, int(port)))
            slow.sendall(head("/v1/chat/completions", json.dumps(body).encode()))
            slow.settimeout(30)
            received = b""
            while b"[DONE]" not in received[-40:]:
                part = await asyncio.to_thread(slow.recv, 8192)
                assert part, f"closed after {len(received)} bytes"
                received += part
                await asyncio.sleep(0.05)
    assert received.count(b'"top_logprobs":[') == 600


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0_gets_no_chunks(model_dir: Path, stream: bool) -> None:
    body = json.dumps({"model": BASE, "prompt": "abc", "max_tokens": 4, "stream": stream}).encode()
    request = head("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0")
    with running(model_dir) as server:
        answers = []
        for version in (b"HTTP/1.0", b"HTTP/1.1"):
            with connected(server) as connection:
                wanted = request.replace(b"HTTP/1.0", version).replace(b"host: x", b"host: x\r\nconnection: close")
                connection.sendall(wanted)
                answers.append(connection.makefile("rb").read())
        large = json.dumps(MANY | {"stream": False, "n": 2}).encode()
        with connected(server) as connection:
            connection.sendall(head("/v1/chat/completions", large).replace(b"HTTP/1.1", b"HTTP/1.0"))
            long_head, _, long_body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    old, new = answers
    assert b"transfer-encoding" not in old
    assert (b"transfer-encoding: chunked" in new) is stream
    text = old.partition(b"\r\n\r\n")[2]
    if stream:
        assert text.startswith(b"data: {")
        assert text.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(text)["choices"][0]["text"] == "abca"
    assert b"transfer-encoding" not in long_head
    assert len(json.loads(long_body)["choices"]) == 2


async def visit(address: list[str], chance: random.Random) -> None:
    """A client that asks for something or nothing, reads some or none of it, and leaves one way or the other."""
    asked = {"model": BASE, "prompt": "abc", "n": chance.choice([1, 4]), "max_tokens": chance.choice([1, 30, 300])}
    body = json.dumps(asked | {"stream": chance.random() < 0.5, "logprobs": chance.choice([None, 5])}).encode()
    request = head("/v1/completions", body)
    sent = chance.choice(
        [b"", request[: chance.randrange(60)], request[:-5], b"\x00\r\n\r\n", request * 3, request, request, request]
    )
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(3 * chance.random()):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(sent)
                await reader.read(chance.choice([1, 100, 100_000]))
                await asyncio.sleep(chance.random())
            finally:
                writer.transport.abort() if chance.random() < 0.5 else writer.close()


async def test_hundreds_of_clients_of_all_kinds_leave_nothing_behind(model_dir: Path) -> None:
    with running(
        model_dir, "--request-timeout", "2", "--send-timeout", "2", step_seconds=0.002, open_files=256
    ) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            assert (await http.get("/health")).status_code == 200
            files = Path(f"/proc/{server.process.pid}/fd")
            before, chance = len(list(files.iterdir())), random.Random(3)
            address = server.url.removeprefix("http://").split(":")
            for _ in range(3):
                await asyncio.gather(*(visit(address, chance) for _ in range(200)))
                assert (await http.get("/health")).status_code == 200
            async with asyncio.timeout(30):
                while len(list(files.iterdir())) > before + 1:
                    await asyncio.sleep(0.1)
                for name in ("punica_in_flight", "punica_queued_prompt_tokens", "punica_request_body_bytes"):
                    while await server.metric(name):
                        await asyncio.sleep(0.1)
            answer = await http.post("/v1/completions", json={"model": BASE, "prompt": "a", "max_tokens": 3})
            assert answer.json()["choices"][0]["text"] == "aaa"
            assert await server.metric("punica_worker_restarts_total") == 0
