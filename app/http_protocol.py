"""uvicorn's HTTP/1.1 with what it lacks: an end to requests that arrive too slowly or with too large a head, to clients
that do not read, and to more connections than there are files for; answers that clients of HTTP/1.0 understand; our
envelope for what is no HTTP."""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
from typing import Any
from uuid import uuid4

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.api_errors import plain_error_response

MAX_HEAD_BYTES = 1 << 16
"""Request line and headers together."""


PATIENCE = 5.0
"""Seconds in which a request may arrive undisturbed by others that want its connection."""
REFUSAL_SECONDS = 1.0
MOST_REFUSED = 64
"""A connection too many may stay that long for its request to come, to be refused, while there are no more of them."""
_PROBES = tuple(b"%b /%b " % (method, path) for method in (b"GET", b"HEAD") for path in (b"health", b"ready"))
"""Requests that are answered nevertheless: who asks for our health would restart us, or send nobody here any more."""
MOST_PIPELINED = 16
"""Requests that may wait behind the one that is being answered, beyond which a connection is not read."""
LEAST_PROGRESS = 1 << 14
"""Bytes that a client must take in `send_timeout`, unless it takes all there is."""


def http_protocol(*, request_timeout: float, send_timeout: float, max_connections: int) -> Any:
    """What uvicorn makes of each connection.

    request_timeout: seconds from the first byte of a request to its last. send_timeout: seconds in which a client must
    take something. max_connections: one more costs the one that has been idle longest, else a request that has been
    arriving longer than PATIENCE, else it is refused.
    """
    return functools.partial(
        HttpProtocol, request_timeout=request_timeout, send_timeout=send_timeout, crowd=Crowd(max_connections)
    )


class Crowd:
    """The connections of a server, by what they wait for: those that wait longest come first.

    idle: between two requests. arriving: for (the rest of) a request, and since when by the loop's clock.
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.count = 0
        self.idle: dict[HttpProtocol, None] = {}
        self.arriving: dict[HttpProtocol, float] = {}

    def make_room(self, now: float) -> bool:
        """Whether there is room for the connection that was counted last."""
        if self.count <= self.max_connections:
            return True
        slow = (one for one, since in self.arriving.items() if now - since > PATIENCE and not one.is_answering)
        oldest = next(itertools.chain(self.idle, slow), None)
        if oldest is None:
            return False
        oldest.give_way()
        return True


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    A timer runs while a request is awaited on a new connection or is arriving; one that does not arrive in time is
    answered 408, and its connection closed. Between requests uvicorn's keep-alive timer runs instead. A third one runs
    while a client does not take what is sent: what one that reads nothing costs is bounded in time, and by the
    transport's buffer, since an answer is made as it is taken.

    uvicorn tells only the last of several pipelined requests that the client has left; here all are told. Nor does it
    read while one waits, and who does not read does not see that the client leaves; here it reads on while those that
    wait are few and small.

    A client's wish for another protocol is ignored, as HTTP allows (RFC 9110, 7.8): those of Java ask for HTTP/2 first.
    """

    def __init__(
        self, *arguments: Any, request_timeout: float, send_timeout: float, crowd: Crowd, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._request_timeout = request_timeout
        self._send_timeout = send_timeout
        self._crowd = crowd
        self._sending: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes when that timer was set
        self._is_refused = False
        self._deadline: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0  # of what the parser has told us, and of what it still holds
        self._refusal: tuple[int, str, str | None] | None = None
        self._repeats_head = False
        self._unanswered: collections.deque[RequestResponseCycle] = collections.deque()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._crowd.count += 1
        if self._crowd.make_room(self.loop.time()):
            self._arm()
        elif self._crowd.count <= self._crowd.max_connections + MOST_REFUSED:
            self._is_refused = True  # told when its request comes: who closes before has said nothing, to many a client
            self._deadline = self.loop.call_later(REFUSAL_SECONDS, self.give_way)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.count -= 1
        self._crowd.idle.pop(self, None)
        self._disarm()
        self._stop_sending_timer()
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._unanswered.clear()
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Close the connection, since there are too many. Nothing is being answered on it."""
        self._crowd.idle.pop(self, None)
        self._disarm()
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_complete and not self._in_head:
            self.transport.close()  # idle: there is nobody to tell
        else:
            self._refusal = (503, "Too many connections are open. Try again later.", "too_many_connections")
            self.send_400_response("")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_sending_timer()

    def resume_writing(self) -> None:
        self._stop_sending_timer()
        super().resume_writing()

    def _start_sending_timer(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self._send_timeout, self._check_sending)

    def _stop_sending_timer(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _check_sending(self) -> None:
        """The client has not taken all of it for a while. Has it taken something?"""
        if self._unsent - self.transport.get_write_buffer_size() >= LEAST_PROGRESS:
            self._start_sending_timer()
        else:
            self._sending = None
            self.transport.abort()  # there is no use in flushing what is not read

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and not self.transport.is_closing() and self._deadline is None:
            self._crowd.idle[self] = None

    def data_received(self, data: bytes) -> None:
        self._crowd.idle.pop(self, None)
        if self._is_refused and not data.startswith(_PROBES):
            self.give_way()
            return
        self._is_refused = False
        if self.cycle is None or self.cycle.response_complete:
            self._arm()  # also for bytes that begin no request
        was_in_head = self._in_head
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if was_in_head and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > 2 * MAX_HEAD_BYTES:  # a line without end, of which the parser tells nothing
                self._refusal = _HEAD_TOO_LARGE
                self.send_400_response("")

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._ignore_upgrade()
            else:
                return

    def _ignore_upgrade(self) -> None:
        """The parser ends with a head that wishes for another protocol. A new one is told how long the body is."""
        framing = self._framing()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        if framing:
            self._repeats_head = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in framing) + b"\r\n")
            self._repeats_head = False

    def _framing(self) -> list[tuple[bytes, bytes]]:
        """The headers that say how long the body is; the parser has checked them."""
        return [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]

    def _should_upgrade(self) -> bool:
        return False

    def on_message_begin(self) -> None:
        if self._repeats_head:
            return
        self._in_head = True
        self._head_bytes = 0
        self._arm()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._repeats_head:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._repeats_head:
            return
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._repeats_head:
            return
        self._in_head = False
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _Http10Cycle
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        self._unanswered.append(self.cycle)
        waiting_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if len(self.pipeline) <= MOST_PIPELINED and waiting_bytes <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing():
            return  # only the head is complete
        self._disarm()
        super().on_message_complete()

    def shutdown(self) -> None:
        """The server stops. A request that is still arriving would be refused when it is there: nobody waits for it."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_complete and not self.is_answering:
            self._refusal = (503, "The server is shutting down and takes no new requests.", "draining")
            self.send_400_response("")
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Refuse what has arrived and close. In the middle of an earlier answer there is nothing to say."""
        if not self.is_answering:
            status, message, code = self._refusal or (400, f"The request is no valid HTTP/1.1: {msg}", None)
            body = bytes(plain_error_response(status, message, code).body)
            head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            head += b"retry-after: 1\r\n" if status == 503 else b""
            head += b"x-request-id: %b\r\nconnection: close\r\n\r\n" % uuid4().hex.encode()
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    @property
    def is_answering(self) -> bool:
        """An earlier request's response is on its way, or waits for its turn."""
        started = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        return started or bool(self.pipeline)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = _HEAD_TOO_LARGE
            raise ValueError("too large a head")  # the parser stops and calls it an error

    def _arm(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._request_timeout, self._too_slow)
            self._crowd.arriving[self] = self.loop.time()

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._crowd.arriving.pop(self, None)

    def _too_slow(self) -> None:
        self._disarm()
        if self.transport.is_closing():
            return
        if self.is_answering:  # we did not read meanwhile
            self._arm()
        elif self._in_head or (self.cycle is not None and not self.cycle.response_complete):
            message = f"The request did not arrive completely within {self._request_timeout:g} s."
            self._refusal = (408, message, "request_timeout")
            self.send_400_response("")
        else:
            self.transport.close()


class _Http10Cycle(RequestResponseCycle):
    """A request of HTTP/1.0, which knows no chunks: an answer of unknown length ends with the connection."""

    _ends_with_connection = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            self._ends_with_connection = not any(name.lower() == b"content-length" for name, _ in headers)
            if self._ends_with_connection:
                self.chunked_encoding = False
        elif self._ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))  # as announced, as far as uvicorn can tell
        await super().send(message)


_HEAD_TOO_LARGE = (431, f"The request line and headers exceed {MAX_HEAD_BYTES} bytes.", "headers_too_large")
