"""Runs a workload against a server: open loop (requests arrive when planned) or closed loop (a number of clients).

In an open loop a slow server does not slow the arrivals down, and latencies count from the planned arrival, so that
neither side's queueing is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from app.bench.stream import Outcome, complete
from punica_core.bench.workload import PlannedRequest

LAG_INTERVAL = 0.1
"""Seconds between two looks at how late the client itself is."""


@dataclass(frozen=True, slots=True)
class Run:
    """The outcomes of a run, in order of the plan; not_sent requests were still to come when its time was over.

    seconds: from the start to the last end. client_cpu: share of one core that the client's process used meanwhile.
    client_lags: seconds by which a timer of the client's event loop was late, ten times a second; its latencies may
    be too long by as much.
    """

    outcomes: list[Outcome]
    not_sent: int
    seconds: float
    client_cpu: float
    client_lags: list[float] = field(default_factory=list)


def check_loopback(base_url: str) -> None:
    """Raise ValueError unless the URL's host is this machine's loopback interface."""
    host = urlsplit(base_url).hostname or ""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ValueError(
            f"{base_url!r} is not on the loopback interface. A load test can take a server down: "
            "pass --allow-remote if it is yours."
        )


async def run_load(
    base_url: str,
    plan: Sequence[PlannedRequest],
    *,
    clients: int,
    max_seconds: float,
    request_timeout: float = 600.0,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Run:
    """Send every request of `plan`: when it is planned, or, if it has no time, by the next idle one of `clients`.

    After max_seconds what still runs is cut off and the rest is not sent. transport: for tests.
    """
    # Connections are given up before servers do so (often after 5 s): a request on a closing one would be lost.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
    timeout = httpx.Timeout(request_timeout, connect=30.0)
    async with httpx.AsyncClient(
        base_url=base_url, timeout=timeout, limits=limits, transport=transport, trust_env=False
    ) as client:
        cpu, sender, lags = time.process_time(), _Sender(client), list[float]()
        watch = asyncio.create_task(_watch_lag(lags))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max_seconds), asyncio.TaskGroup() as group:
                waiting = deque(index for index, request in enumerate(plan) if request.at is None)
                for _ in range(min(clients, len(waiting))):
                    group.create_task(sender.send_all(plan, waiting))
                for index, request in enumerate(plan):
                    if request.at is not None:
                        await asyncio.sleep(sender.started + request.at - time.perf_counter())
                        group.create_task(sender.send(index, request, request.at))
        seconds = time.perf_counter() - sender.started
        watch.cancel()
    outcomes = [outcome for _, outcome in sorted(sender.outcomes.items())]
    return Run(outcomes, len(plan) - len(outcomes), seconds, (time.process_time() - cpu) / seconds, lags)


async def _watch_lag(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + LAG_INTERVAL
        await asyncio.sleep(LAG_INTERVAL)
        lags.append(time.perf_counter() - due)


class _Sender:
    """Sends requests and keeps their outcomes by their index in the plan. `started` is the zero of all times."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.started = time.perf_counter()
        self.outcomes: dict[int, Outcome] = {}
        self._client = client

    async def send(self, index: int, request: PlannedRequest, planned: float) -> None:
        self.outcomes[index] = await complete(self._client, request, planned, self.started)

    async def send_all(self, plan: Sequence[PlannedRequest], waiting: deque[int]) -> None:
        """One client of a closed loop: takes the next waiting request as soon as its own has ended."""
        while waiting:
            index = waiting.popleft()
            await self.send(index, plan[index], time.perf_counter() - self.started)
            if self.outcomes[index].error == "cut":
                return
