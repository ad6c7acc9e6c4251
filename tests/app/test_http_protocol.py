"""What arrives too slowly, too large or as no HTTP at all, over real sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.conftest import BASE
from tests.app.test_live_server import Process, running
from tests.support.tokenizer_folders import byte_level_tokenizer, write_folder

TIMEOUT = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    model_dir = write_folder(tmp_path_factory.mktemp("protocol") / BASE, byte_level_tokenizer())
    with running(model_dir, "--request-timeout", str(TIMEOUT), step_seconds=0.01) as process:
        yield process


def exchange(server: Process, *parts: bytes) -> bytes:
    """Everything that the server says to these bytes until it closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            return connection.makefile("rb").read()
        except ConnectionError:  # it closed while we were still sending
            return b""


def error_in(response: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"x-request-id: " in head
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split(b" ")[1]), error


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=lambda value: repr(value[:24]),
)
def test_what_is_no_http_is_a_400_in_the_envelope(server: Process, request_bytes: bytes) -> None:
    status, error = error_in(exchange(server, request_bytes))
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "head",
    [
        b"a: b\r\n" * 20_000,
        b"a: " + b"b" * 70_000 + b"\r\n",
        b"a: " + b"b" * 1_000_000,
    ],
    ids=["many", "long", "endless"],
)
def test_too_large_a_head_is_a_431(server: Process, head: bytes) -> None:
    response = exchange(server, b"GET /health HTTP/1.1\r\n", head, b"\r\n")
    if response:  # else it was gone before we had sent everything
        status, error = error_in(response)
        assert (status, error["code"]) == (431, "headers_too_large")
    allowed = b"GET /health HTTP/1.1\r\nconnection: close\r\na: " + b"b" * 60_000 + b"\r\n\r\n"
    assert exchange(server, allowed).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "begun",
    [b"G", b"GET /health HTTP/1.1\r\na: b\r\n", b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"],
    ids=["line", "head", "body"],
)
def test_a_request_that_does_not_arrive_in_time_is_a_408(server: Process, begun: bytes) -> None:
    status, error = error_in(exchange(server, begun))
    assert (status, error["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_on_which_nothing_comes_is_closed(server: Process, sent: bytes) -> None:
    assert exchange(server, sent) == b""


def test_an_answer_may_take_longer_than_a_request(server: Process) -> None:
    body = {"model": BASE, "prompt": "a", "max_tokens": int(2 * TIMEOUT / 0.01), "stream": True}
    with httpx.Client(base_url=server.url, timeout=30) as http:
        first = http.post("/v1/completions", json=body)
        second = http.get("/health")  # on the same connection
    assert first.text.endswith("data: [DONE]\n\n")
    assert first.elapsed.total_seconds() > TIMEOUT
    assert second.status_code == 200


def test_nothing_is_written_into_an_answer_that_is_on_its_way(server: Process) -> None:
    body = json.dumps({"model": BASE, "prompt": "a", "max_tokens": 100, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request)
        received = connection.recv(1 << 16)
        connection.sendall(b"\x00 no request")
        received += connection.makefile("rb").read()
    assert received.startswith(b"HTTP/1.1 200")
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"no valid HTTP" not in received


UPGRADES = [
    b"",
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n",
    b"connection: upgrade\r\nupgrade: websocket\r\n",
]


@pytest.mark.parametrize("upgrade", UPGRADES, ids=["none", "h2c", "websocket"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [1, 150, 10_000])
def test_a_wish_for_another_protocol_is_ignored(server: Process, upgrade: bytes, chunked: bool, size: int) -> None:
    """As Java's client sends it; in parts of every size, with further requests behind it."""
    body = json.dumps({"model": BASE, "prompt": "upgraded", "max_tokens": 4}).encode()
    framing = b"transfer-encoding: chunked\r\n" if chunked else b"content-length: %d\r\n" % len(body)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + upgrade + framing + b"\r\n" + sent
    get = b"GET /ready HTTP/1.1\r\nhost: x\r\n" + upgrade
    requests = post + get + b"\r\n" + post + get + b"connection: close\r\n\r\n"
    answers = exchange(server, *(requests[at : at + size] for at in range(0, len(requests), size)))
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 200 ") == 4
    assert answers.count(b'"text":"upgr') == 2
    assert answers.count(b'{"status":"ready"}') == 2


def test_a_body_that_follows_a_wish_for_another_protocol_has_its_bound(server: Process) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + UPGRADES[1]
    status, error = error_in(exchange(server, head + b"content-length: 9\r\n\r\n{"))
    assert (status, error["code"]) == (408, "request_timeout")
    status, error = error_in(exchange(server, head + b"transfer-encoding: chunked\r\n\r\nzz\r\n"))
    assert status == 400


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/v1/models", 200), ("/nowhere", 404)])
def test_a_head_is_a_get_without_its_body(server: Process, path: str, status: int) -> None:
    def asked(method: str) -> tuple[list[bytes], bytes]:
        request = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: r\r\n\r\n"
        head, _, body = exchange(server, request.encode()).partition(b"\r\n\r\n")
        return [line for line in head.split(b"\r\n") if not line.startswith(b"date: ")], body

    (got, got_body), (headed, no_body) = asked("GET"), asked("HEAD")
    assert headed[0].startswith(b"HTTP/1.1 %d " % status)
    assert [b"content-length: %d" % len(got_body) in lines for lines in (got, headed)] == [True, True]
    assert (headed, no_body) == (got, b"")
    assert got_body
    assert exchange(server, b"HEAD /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")[9:12] == b"405"


def completion(prompt: str, *headers: str, stream: bool = False, max_tokens: int = 3) -> bytes:
    body = json.dumps({"model": BASE, "prompt": prompt, "max_tokens": max_tokens, "stream": stream}).encode()
    head = ["POST /v1/completions HTTP/1.1", "host: x", *headers, f"content-length: {len(body)}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def test_pipelined_requests_are_answered_one_behind_the_other(server: Process) -> None:
    prompts = [f"{index}." for index in range(20)]
    last = completion("end", "connection: close")
    answers = exchange(server, b"".join(map(completion, prompts)) + last).split(b"HTTP/1.1 200 OK\r\n")[1:]
    texts = [json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for answer in answers]
    assert texts == [f"{prompt}{prompt}"[:3] for prompt in prompts] + ["end"]


def test_what_is_pipelined_behind_a_stream_waits_for_its_end(server: Process) -> None:
    """The stream takes longer than a request may take to arrive."""
    stream = completion("a", stream=True, max_tokens=int(1.5 * TIMEOUT / 0.01))
    answers = exchange(server, stream + completion("end", "connection: close"))
    first, second = answers.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert first.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert json.loads(second.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "end"


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("behind", [0, 1, 5])
def test_a_client_that_closes_its_sending_side_has_left(server: Process, behind: int, at_once: bool) -> None:
    """Also the request that is being answered, when others are pipelined behind it, together with it or later."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(completion("a", max_tokens=50_000) + completion("b") * behind * at_once)
        wait_for_in_flight(server, 1)
        if not at_once:
            connection.sendall(completion("b") * behind)
            time.sleep(0.1)  # read before the end is
        connection.shutdown(socket.SHUT_WR)
        assert connection.makefile("rb").read() == b""
    wait_for_in_flight(server, 0)


def wait_for_in_flight(server: Process, count: int) -> None:
    deadline = time.monotonic() + 20
    while f"punica_in_flight {count}.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
