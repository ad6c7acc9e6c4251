"""One streamed completion over the OpenAI API, timed; the body is scanned, not parsed, so that the client is cheap."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import httpx
import msgspec

from punica_core.bench.workload import PlannedRequest

_EVENT = b"data: "
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'
_TAIL = 4096


@dataclass(slots=True)
class Outcome:
    """What became of a request; times are seconds of the run's clock.

    planned: when it should have been sent, from which latencies count; sent: when it was. arrivals: when each piece of
    the body with at least one new event was read. error: "" for a complete stream, else its kind: http_STATUS, connect,
    timeout, disconnect (the connection broke), truncated (no end of stream), error_event, cut (the run was over).
    """

    model: str
    planned: float
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    events: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from the planned arrival to the first event."""
        return self.arrivals[0] - self.planned

    @property
    def latency(self) -> float:
        """Seconds from the planned arrival to the end of the stream."""
        return self.ended - self.planned

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive pieces of the body."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _UsageChunk(msgspec.Struct):
    usage: _Usage | None = None


def body_of(request: PlannedRequest) -> bytes:
    """The request's JSON: a greedy completion. `ignore_eos` is only sent if it is wanted: not every server knows it."""
    return msgspec.json.encode(
        {
            "model": request.model,
            "prompt": request.text or request.prompt_ids,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        | ({"ignore_eos": True} if request.ignore_eos else {})
    )


async def complete(client: httpx.AsyncClient, request: PlannedRequest, planned: float, started: float) -> Outcome:
    """Send one request now and read its stream to the end. Never raises for what the server does.

    started: time.perf_counter() at the start of the run, the zero of all times.
    """
    outcome = Outcome(request.model, planned, sent=time.perf_counter() - started)
    try:
        headers = {"content-type": "application/json"}
        async with client.stream("POST", "/v1/completions", content=body_of(request), headers=headers) as response:
            if response.status_code == 200:
                await _read(response, outcome, started)
            else:
                await response.aread()
                outcome.error = f"http_{response.status_code}"
    except httpx.ConnectError:
        outcome.error = "connect"
    except httpx.TimeoutException:
        outcome.error = "timeout"
    except httpx.TransportError:
        outcome.error = "disconnect"
    except asyncio.CancelledError:
        outcome.error = "cut"
    outcome.ended = time.perf_counter() - started
    return outcome


async def _read(response: httpx.Response, outcome: Outcome, started: float) -> None:
    tail = b""
    async for data in response.aiter_raw():
        events = (tail[-len(_EVENT) + 1 :] + data).count(_EVENT)
        if events:
            outcome.arrivals.append(time.perf_counter() - started)
            outcome.events += events
        tail = (tail + data)[-_TAIL:]
    outcome.error = scan_end(tail, outcome)


def scan_end(tail: bytes, outcome: Outcome) -> str:
    """Read the usage out of a stream's last bytes into `outcome`; the kind of error they show, "" for none."""
    if _ERROR in tail:
        return "error_event"
    if not tail.rstrip().endswith(_DONE):
        return "truncated"
    # A raw tail has chunk sizes of the transfer encoding between events, but not inside of one.
    at = tail.rfind(b'"usage":{')
    if at >= 0:
        event = tail[tail.rfind(_EVENT, 0, at) + len(_EVENT) : tail.find(b"\n\n", at)]
        usage = msgspec.json.decode(event, type=_UsageChunk).usage or _Usage()
        outcome.prompt_tokens, outcome.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    return ""
