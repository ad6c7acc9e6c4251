"""From a flight to HTTP: server-sent events, or one JSON body. Plain ASGI, one send for each turn of the reader.

Errors that are known before the first output are a status, not an event: the response starts with the first output, or
when a stream has waited for it so long that a proxy might give up: then with a comment, as whenever a stream is silent.
A client that leaves cancels its sequences at whatever stage they are, streamed or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api_errors import error_body, error_response
from app.flight import ClientGone, Flight, SequenceStream
from app.formats import DONE, Format, Head
from app.generation import Job
from app.output_text import READ_TOKENS, OutputText, Piece
from app.parsing import collector_paused
from app.tokenizer import LONG_TEXT
from punica_core.errors import PunicaError
from punica_core.protocol import LogprobTable

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_KEEP_ALIVE = b": keep-alive\n\n"
PART_BYTES = 1 << 20
"""About as much of an answer is in memory as text, whatever it has in all."""
_LOGPROB_COST = 32
"""Characters of text that take as long to write as one logprob."""


class GenerationResponse(Response):
    """The answer to one generation request.

    head: called with the adapter_key when the first output is there. retry_after: seconds, for 503.
    keep_alive: seconds of silence after which a stream sends a comment. on_end: called when nothing of the answer is
    kept any more.
    """

    def __init__(
        self,
        flight: Flight,
        job: Job,
        outputs: Sequence[OutputText],
        answer: Format,
        *,
        head: Callable[[str], Head],
        stream: bool,
        include_usage: bool,
        keep_alive: float,
        retry_after: Callable[[], int],
        on_end: Callable[[], None],
    ) -> None:
        self.background = None
        self.status_code = 200
        self._flight = flight
        self._job = job
        self._outputs = outputs
        self._answer = answer
        self._head = head
        self._stream = stream
        self._include_usage = include_usage
        self._keep_alive = keep_alive
        self._retry_after = retry_after
        self._on_end = on_end
        self._begun: set[int] = set()  # choices that a stream has told something of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.get_running_loop().create_task(_watch_disconnect(receive, self._flight))
        status = "cancelled"
        try:
            await (self._send_events(send) if self._stream else self._send_body(send))
            status = "ok"
        except ClientGone:
            pass
        except _Failed as failed:
            status = failed.error.code
            await self._send_failure(failed, scope, receive, send)
        finally:
            self._flight.close()
            self._on_end()
            watcher.cancel()
            self._flight.metrics.finish(status, time.perf_counter() - self._flight.arrived_at)

    async def _send_body(self, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._outputs]
        while not self._is_read:
            changed = await self._flight.changed()
            for index, piece in await self._read(changed, started=False):
                pieces[index].append(piece)
        self._begin()
        cost = sum(_cost(piece) for parts in pieces for piece in parts) + sum(map(_prompt_cost, self._outputs))
        parts = _Parts(self._answer.whole(self._job, self._outputs, pieces), cost)
        body = await parts.next()
        headers = [(b"content-type", b"application/json")]
        if parts.is_done:
            headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not parts.is_done:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._check_reader()
            body = await parts.next()
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, send: Send) -> None:
        started = begun = False
        silence = _Silence(self._flight, self._keep_alive)
        try:
            while not self._is_read:
                changed = await self._flight.changed()
                pieces = await self._read(changed, started=started)
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
                if changed and not begun:
                    begun = True
                    self._begin()
                chunks, cost = self._chunks(pieces)
                if cost <= LONG_TEXT:  # the usual case, in as few turns of this loop as can be
                    body = b"".join(chunks)
                    if body or not changed:
                        await send({"type": "http.response.body", "body": body or _KEEP_ALIVE, "more_body": True})
                        silence.broken()
                    continue
                parts = _Parts(chunks, cost)
                while not parts.is_done:
                    await send({"type": "http.response.body", "body": await parts.next(), "more_body": True})
                    silence.broken()
                    self._check_reader()
        finally:
            silence.end()
        last = self._answer.usage_chunk(self._job, self._outputs) + DONE if self._include_usage else DONE
        await send({"type": "http.response.body", "body": last})

    def _chunks(self, pieces: list[tuple[int, Piece]]) -> tuple[Iterator[bytes], int]:
        """The events of pieces, and what it costs to write them. A slow client's may have gathered, and a choice's
        first has its prompt's logprobs."""
        told = [(index, piece) for index, piece in pieces if not piece.is_empty]
        cost = sum([_cost(piece) for _, piece in told])
        for index, _ in told:
            if index not in self._begun:
                self._begun.add(index)
                cost += _prompt_cost(self._outputs[index])
        return itertools.chain.from_iterable([self._answer.chunks(index, piece) for index, piece in told]), cost

    def _check_reader(self) -> None:
        """Raise ClientGone if nobody takes what is sent: an answer of many parts need not be written to its end."""
        if self._flight.is_abandoned:
            raise ClientGone

    def _begin(self) -> None:
        keys = (output.stream.adapter_key for output in self._outputs)
        adapter_key = next(filter(None, keys), "")  # all have the same, but not all have a first token yet
        self._answer.begin(self._head(adapter_key), usage_follows=self._include_usage)

    async def _read(self, changed: Sequence[SequenceStream], *, started: bool) -> list[tuple[int, Piece]]:
        """What is new of these sequences. Others' turns come between if it is much."""
        pieces: list[tuple[int, Piece]] = []
        size = 0
        try:
            for sequence in changed:
                output = self._outputs[sequence.index]
                size -= output.completion_tokens
                pieces.append((sequence.index, output.read()))
                size += output.completion_tokens
                while output.has_more or size > READ_TOKENS:
                    size = 0
                    await asyncio.sleep(0)
                    self._check_reader()
                    if output.has_more:
                        pieces.append((sequence.index, output.read()))
        except PunicaError as error:
            raise _Failed(error, started) from None
        for sequence in changed:
            if self._outputs[sequence.index].finish_reason is not None:
                sequence.cancel()
        return pieces

    @property
    def _is_read(self) -> bool:
        return all(output.is_read for output in self._outputs)

    async def _send_failure(self, failed: _Failed, scope: Scope, receive: Receive, send: Send) -> None:
        if not failed.started:
            await error_response(failed.error, retry_after=self._retry_after())(scope, receive, send)
            return
        events = b"data: " + error_body(failed.error) + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": events})


class _Parts:
    """An answer in parts of about PART_BYTES: each is made when it is asked for, on a thread if that would hold the
    event loop, and without looking for garbage among the many objects that its logprobs are meanwhile.

    cost: of writing all of it, in characters of text. is_done: the last part was taken.
    """

    def __init__(self, pieces: Iterator[bytes], cost: int) -> None:
        self._pieces = pieces
        self._cost = cost
        self._ahead = b""
        self.is_done = False

    async def next(self) -> bytes:
        """The next part."""
        return self._take() if self._cost <= LONG_TEXT else await asyncio.to_thread(self._take)

    def _take(self) -> bytes:
        taken, size = [self._ahead], len(self._ahead)
        with collector_paused() if self._cost > LONG_TEXT else contextlib.nullcontext():
            for piece in self._pieces:
                if size >= PART_BYTES:
                    self._ahead = piece
                    break
                taken.append(piece)
                size += len(piece)
            else:
                self.is_done = True
        return b"".join(taken)


def _cost(piece: Piece) -> int:
    """Of writing it as JSON, in characters of text."""
    return len(piece.text) + (_table_cost(piece.logprobs) if piece.logprobs.token_ids else 0)


def _prompt_cost(output: OutputText) -> int:
    """The same of the prompt's logprobs."""
    table = output.stream.prompt_logprobs
    return 0 if table is None else _table_cost(table)


def _table_cost(table: LogprobTable) -> int:
    return _LOGPROB_COST * len(table) * table.width


class _Failed(Exception):
    """A sequence ended with an error. started: the response's status is already on its way."""

    def __init__(self, error: PunicaError, started: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.started = started


class _Silence:
    """Wakes a flight's reader, with no news, when nothing was sent for `seconds`. One timer, moved on when it fires:
    what is sent costs no more than a look at the clock."""

    def __init__(self, flight: Flight, seconds: float) -> None:
        self._flight = flight
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._fire)

    def broken(self) -> None:
        """Something was sent."""
        self._since = self._loop.time()

    def end(self) -> None:
        """No more waking."""
        self._timer.cancel()

    def _fire(self) -> None:
        left = self._since + self._seconds - self._loop.time()
        if left <= 0:
            self._flight.nudge()
            left = self._seconds
        self._timer = self._loop.call_later(left, self._fire)


async def _watch_disconnect(receive: Receive, flight: Flight) -> None:
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
    flight.abandon()
