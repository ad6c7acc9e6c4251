"""A streaming client with next to no cost of its own: plain sockets, events counted, nothing parsed but the end.

It measures front ends that are faster than an HTTP library's client; `stream` is the one to use otherwise.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

from app.bench.stream import Outcome, body_of, scan_end
from punica_core.bench.workload import PlannedRequest

_EVENT = b"data: "
_END = b"data: [DONE]\n\n"
_TAIL = 2048


async def stream_all(url: str, requests: Sequence[PlannedRequest]) -> list[Outcome]:
    """Send all requests at once, each on a connection of its own. Times count from the call."""
    parts, started = urlsplit(url), time.perf_counter()
    loop = asyncio.get_running_loop()
    streams = [_Stream(request, loop.create_future(), started) for request in requests]
    for stream in streams:
        await loop.create_connection(functools.partial(_same, stream), parts.hostname or "", parts.port or 80)
    for stream in streams:
        stream.send()
    return list(await asyncio.gather(*(stream.done for stream in streams)))


def http_request(path: str, body: bytes) -> bytes:
    """A POST of JSON as bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _same(stream: _Stream) -> _Stream:
    return stream


class _Stream(asyncio.Protocol):
    """One connection; `done` gets its outcome."""

    def __init__(self, request: PlannedRequest, done: asyncio.Future[Outcome], started: float) -> None:
        self.done = done
        self._request = http_request("/v1/completions", body_of(request))
        self._started = started
        self._tail = b""
        self._outcome = Outcome(request.model, 0.0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self) -> None:
        self._outcome.planned = self._outcome.sent = time.perf_counter() - self._started
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._end("http_" + data[9:12].decode(errors="replace"))
            return
        events = (self._tail[1 - len(_EVENT) :] + data).count(_EVENT)
        if events:
            self._outcome.arrivals.append(time.perf_counter() - self._started)
            self._outcome.events += events
        self._tail = (self._tail + data)[-_TAIL:]
        if (end := self._tail.find(_END)) >= 0:
            self._end(scan_end(self._tail[: end + len(_END)], self._outcome))

    def connection_lost(self, error: Exception | None) -> None:
        self._end("disconnect")

    def _end(self, error: str) -> None:
        if not self.done.done():
            self._outcome.error = error
            self._outcome.ended = time.perf_counter() - self._started
            self.done.set_result(self._outcome)
            self._transport.close()


async def round_trips(url: str, path: str, body: bytes, count: int) -> list[float]:
    """Seconds of each of `count` requests, one after the other on one connection. Raises RuntimeError if one fails."""
    parts, found = urlsplit(url), []
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    request = http_request(path, body)
    for _ in range(count):
        began = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{path} answered {head.splitlines()[0].decode(errors='replace')!r}.")
        size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(size.partition(b":")[2]))
        found.append(time.perf_counter() - began)
    writer.close()
    await writer.wait_closed()
    return found
