"""The server as a process: real sockets, the OpenAI SDK, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError

from tests.app.conftest import BASE, write_adapters
from tests.support.tokenizer_folders import byte_level_tokenizer, write_folder

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A running server and clients of it. ready: the first line of what it printed."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, ready: str = "") -> None:
        self.process = process
        self.url = url
        self.ready = ready

    def openai(self, **options: Any) -> AsyncOpenAI:
        defaults: dict[str, Any] = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 30}
        return AsyncOpenAI(**(defaults | options))

    async def metric(self, name: str) -> float:
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"{self.url}/metrics")).text
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))

    async def until_idle(self) -> None:
        async with asyncio.timeout(60):
            while await self.metric("punica_in_flight") > 0:
                await asyncio.sleep(0.05)

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, 30)


@contextlib.contextmanager
def running(
    model_dir: Path,
    *options: str,
    step_seconds: float = 0.0,
    open_files: int | None = None,
    log: IO[bytes] | int = subprocess.DEVNULL,
) -> Iterator[Process]:
    command: tuple[str, ...] = () if open_files is None else ("sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh")
    command += (sys.executable, "-m", "tests.support.scripted_server", str(model_dir), str(step_seconds))
    with subprocess.Popen((*command, "--port", "0", *options), cwd=ROOT, stdout=subprocess.PIPE, stderr=log) as process:
        assert process.stdout is not None
        try:
            first = process.stdout.readline().decode()
            yield Process(process, first.split("Ready on ")[1].split("/v1")[0], first)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One process for the tests that leave it as they found it."""
    root = tmp_path_factory.mktemp("live")
    model_dir = write_folder(root / BASE, byte_level_tokenizer())
    write_adapters(root / "adapters")
    with running(model_dir, "--adapters", str(root / "adapters"), step_seconds=0.001) as process:
        yield process


def test_it_says_that_it_is_ready_and_how_many_adapters_are_refused(server: Process) -> None:
    assert f"with {BASE} and 0 adapters; 2 others are refused" in server.ready


async def test_the_sdk_streams_and_does_not_stream_the_same_text(server: Process) -> None:
    async with server.openai() as client:
        assert [model.id async for model in client.models.list()] == [BASE, "pirate", "sql"]

        async def streamed(model: str) -> str:
            stream = await client.completions.create(model=model, prompt=f"{model} 😀 ", max_tokens=60, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        async def whole(model: str) -> str:
            answer = await client.completions.create(model=model, prompt=f"{model} 😀 ", max_tokens=60)
            return answer.choices[0].text

        names = [BASE, "pirate", "sql"] * 8
        alone = {name: await whole(name) for name in set(names)}
        mixed = await asyncio.gather(*(streamed(name) for name in names), *(whole(name) for name in names))
    assert mixed == [alone[name] for name in names] * 2
    assert len(set(alone.values())) == 3


async def test_the_sdk_raises_what_it_should(server: Process) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    async with server.openai() as client:
        with pytest.raises(NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="nope", messages=messages)
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model=BASE, messages=messages, max_tokens=10**6)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_seats(server: Process, stream: bool) -> None:
    async with httpx.AsyncClient(timeout=30) as http:
        body = {"model": BASE, "prompt": ["a", "b"], "n": 2, "max_tokens": 50_000, "stream": stream}
        request = asyncio.create_task(http.post(f"{server.url}/v1/completions", json=body))
        while await server.metric("punica_in_flight") < 4:
            await asyncio.sleep(0.02)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await server.until_idle()


async def test_random_departures_leave_nothing_behind(server: Process) -> None:
    async with server.openai() as client:

        async def visit(index: int) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02 * (index % 9)):
                    stream = await client.completions.create(model=BASE, prompt="a", max_tokens=50_000, stream=True)
                    async for _ in stream:
                        pass

        await asyncio.gather(*(visit(index) for index in range(60)))
    await server.until_idle()


async def test_a_slow_client_gets_all_its_text_in_larger_chunks(server: Process) -> None:
    address = server.url.removeprefix("http://").split(":")
    body = b'{"model": "base", "prompt": "a", "n": 16, "max_tokens": 2000, "stream": true}'
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((address[0], int(address[1])))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
        slow.sendall(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        slow.recv(64)
        await server.until_idle()  # the worker has finished; we have read next to nothing
        received = await asyncio.to_thread(slow.makefile("rb").read)
    texts = [part.split(b'"', 1)[0] for part in received.split(b'"text":"')[1:]]
    assert sum(map(len, texts)) == 16 * 2000
    assert max(map(len, texts)) > 100
    assert received.count(b"[DONE]") == 1


async def test_a_crash_of_the_worker_ends_requests_and_the_server_answers_again(model_dir: Path) -> None:
    with running(model_dir, step_seconds=0.005) as server:
        async with server.openai() as client:
            stream = await client.completions.create(model=BASE, prompt="a", max_tokens=50_000, stream=True)
            await anext(aiter(stream))
            crash = asyncio.create_task(client.completions.create(model=BASE, prompt="X", max_tokens=5))
            with pytest.raises(APIError, match="killed by signal 9"):
                async for _ in stream:
                    pass
            with pytest.raises(APIError, match="killed by signal 9"):
                await crash
        async with server.openai(max_retries=10) as retrying:
            answer = await retrying.completions.create(model=BASE, prompt="a", max_tokens=3)
        assert answer.choices[0].text == "aaa"
        assert await server.metric("punica_worker_restarts_total") == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signals_let_running_streams_finish_and_exit_with_0(
    model_dir: Path, signum: signal.Signals, request: pytest.FixtureRequest
) -> None:
    if signal.getsignal(signum) is signal.SIG_IGN:  # the tests run under nohup, and the server would respect that
        signal.signal(signum, signal.SIG_DFL)
        request.addfinalizer(lambda: signal.signal(signum, signal.SIG_IGN))
    with running(model_dir, step_seconds=0.01) as server:
        async with server.openai() as client:
            streams = [
                await client.completions.create(model=BASE, prompt="a", max_tokens=60, stream=True) for _ in range(5)
            ]
            server.process.send_signal(signum)
            texts = ["".join([chunk.choices[0].text async for chunk in stream]) for stream in streams]
        assert texts == ["a" * 60] * 5
        assert await server.exit_code() == 0


async def test_sigterm_ends_what_does_not_finish_in_time_with_an_error(model_dir: Path) -> None:
    with running(model_dir, "--drain-timeout", "0.3", step_seconds=0.01) as server:
        async with server.openai() as client:
            stream = await client.completions.create(model=BASE, prompt="a", max_tokens=50_000, stream=True)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(APIError, match="shut down"):
                async for _ in stream:
                    pass
        assert await server.exit_code() == 0


async def test_a_second_signal_does_not_wait_as_the_first_one_says(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log, running(model_dir, "--drain-timeout", "1000", step_seconds=0.01, log=log) as server:
        async with server.openai() as client:
            stream = await client.completions.create(model=BASE, prompt="a", max_tokens=50_000, stream=True)
            server.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                while "waiting for 1 sequence, at most 1000 s. A second Ctrl-C" not in path.read_text():
                    await asyncio.sleep(0.05)
            assert "Stopped." not in path.read_text()
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(APIError, match="shut down"):
                async for _ in stream:
                    pass
        assert await server.exit_code() == 0
    assert path.read_text().endswith("INFO app.cli: Stopped.\n")


async def test_an_idle_server_takes_no_grace_time(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log, running(model_dir, "--drain-timeout", "1000", log=log) as server:
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0
    assert "Shutting down: no new requests.\n" in path.read_text()
    assert "waiting for" not in path.read_text()


async def test_sigterm_does_not_wait_for_a_request_that_is_arriving(model_dir: Path) -> None:
    with running(model_dir, "--drain-timeout", "1000", step_seconds=0.01) as server:
        address = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n{")
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"  # the route reads
        async with server.openai() as client:
            stream = await client.completions.create(model=BASE, prompt="a", max_tokens=60, stream=True)
            server.process.send_signal(signal.SIGTERM)
            refusal = await reader.read()
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "a" * 60
        writer.close()
        assert b"HTTP/1.1 503 " in refusal
        assert b'"code":"draining"' in refusal
        assert await server.exit_code() == 0


def post(stream: bool) -> bytes:
    body = json.dumps({"model": BASE, "prompt": "a", "max_tokens": 100, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_a_server_that_drains_says_so_only_behind_a_request_that_runs(model_dir: Path) -> None:
    with running(model_dir, step_seconds=0.01) as server:
        address = server.url.removeprefix("http://").split(":")
        (idle, idle_writer), (one, one_writer), (two, two_writer) = [
            await asyncio.open_connection(*address) for _ in range(3)
        ]
        idle_writer.write(b"GET /ready HTTP/1.1\r\nhost: a\r\n\r\n")
        assert await idle.readline() == b"HTTP/1.1 200 OK\r\n"
        one_writer.write(post(stream=True))
        two_writer.write(post(stream=True) + post(stream=False) + b"GET /ready HTTP/1.1\r\nhost: a\r\n\r\n")
        for reader in (one, two):
            await reader.readuntil(b'"text":"a"')
        server.process.send_signal(signal.SIGTERM)
        await idle.read()  # until the server closes it
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
        one_writer.write(post(stream=True))
        running_alone, with_more_behind = await asyncio.gather(one.read(), two.read())
        for writer in (idle_writer, one_writer, two_writer):
            writer.close()
        assert await server.exit_code() == 0
    assert b"[DONE]" in running_alone
    assert b"HTTP/1.1" not in running_alone, "what came behind it after the signal is not answered"
    ended, refused, ready = with_more_behind.split(b"HTTP/1.1 ")
    assert b"[DONE]" in ended
    assert refused.startswith(b"503 ")
    assert b"retry-after: 1\r\n" in refused
    assert b'"code":"draining"' in refused
    assert ready.startswith(b"503 ")
    assert b'"draining"' in ready


async def test_a_port_in_use_is_known_before_the_model_is_loaded(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.scripted_server", str(model_dir), "0"),
            *("--port", str(taken.getsockname()[1])),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, log = await process.communicate()
    assert process.returncode == 1
    assert b"Cannot listen on 127.0.0.1" in log
    assert b"--port" in log
    assert b"Traceback" not in log
    assert b"loading" not in log
    assert output == b""


async def test_the_worker_ends_with_its_front_end(model_dir: Path) -> None:
    with running(model_dir) as server:
        pid = server.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert children
        server.process.kill()
        async with asyncio.timeout(30):
            while any(_is_alive(child) for child in children):
                await asyncio.sleep(0.05)


def _is_alive(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


CHAT = {"messages": [{"role": "user", "content": "A" * 3000}], "n": 16}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 20, "max_tokens": 3000}),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 20, "max_tokens": 3000, "stream": True}),
        ("completions", {"prompt": [65] * 3000, "n": 16, "prompt_logprobs": 20, "max_tokens": 1}),
    ],
    ids=["whole", "stream", "prompt"],
)
async def test_an_answer_of_a_million_logprobs_is_never_all_in_memory(
    model_dir: Path, route: str, body: dict[str, Any]
) -> None:
    """As they are kept they take 8 MB, as text some 50, as Python objects some 300."""
    with running(model_dir) as server:
        async with httpx.AsyncClient(timeout=60) as http:
            url, body = f"{server.url}/v1/{route}", {"model": BASE} | body
            small = await http.post(url, json=body | {"n": 1, "max_tokens": 1})
            assert small.status_code == 200
            before, size, most = resident_bytes(server.process.pid), 0, 0
            async with http.stream("POST", url, json=body) as response:
                assert response.headers.get("transfer-encoding") == "chunked"
                async for part in response.aiter_raw():
                    size += len(part)
                    most = max(most, resident_bytes(server.process.pid) - before)
    assert size > 35e6
    assert most < 30e6


@pytest.mark.parametrize("sink", ["full", "closed"])
async def test_a_server_whose_output_cannot_be_written_goes_on(model_dir: Path, sink: str) -> None:
    """A full disk, or `punica serve 2>&1 | head -1`."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = (sys.executable, "-m", "tests.support.scripted_server", str(model_dir), "0", "--port", str(port))
    if sink == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    with subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out) as process:
        os.close(out)
        server = Process(process, f"http://127.0.0.1:{port}")
        try:
            async with asyncio.timeout(30), server.openai(max_retries=100) as client:
                crash = client.with_options(max_retries=0).completions.create(model=BASE, prompt="X", max_tokens=5)
                while (await client.completions.create(model=BASE, prompt="a", max_tokens=3)).choices[0].text != "aaa":
                    pass
                with pytest.raises(APIError, match="killed by signal 9"):
                    await crash
                answer = await client.completions.create(model=BASE, prompt="a", max_tokens=3)
            assert answer.choices[0].text == "aaa"
            process.send_signal(signal.SIGTERM)
            assert await server.exit_code() == 0
        finally:
            process.kill()
