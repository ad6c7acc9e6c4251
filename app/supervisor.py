"""Keeps an engine alive: starts it, notices that it died or stalled, starts a new one with back-off.

    STARTING ──ready──▶ READY ──lost / stalled──▶ RESTARTING ──ready──▶ READY          any ──stop──▶ STOPPED

While RESTARTING new work is refused at once (503 with Retry-After) rather than queued: a model takes seconds to minutes
to load, and clients' SDKs retry by themselves. A restart that takes longer than `stall_timeout` and than ten times the
slowest start is given up for another. The first start is different: nobody knows how long it takes, so it may go on
while it makes progress (`app.start_watch`), and its failure is the caller's.

A stall is a step that takes longer than `stall_timeout` and than ten times the slowest step seen; it counts from the
step's start, so a long queue or an idle engine is never one. An idle worker that does not say anything to new work for
as long has stalled too, and so has one that is pinged, now and then, and says nothing for `stall_timeout`: it has no
step to finish. A stalled worker is killed, which is a loss like any other.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from app.start_watch import StartWatch
from punica_core.client import EngineClient
from punica_core.config import EngineConfig, EngineLayout
from punica_core.errors import EngineRestarting, PunicaError, WorkerLost
from punica_core.protocol import Event, NewSequence, Outputs, Progress, StepStarted

log = logging.getLogger(__name__)

FIRST_BACKOFF = 0.1
LONGEST_BACKOFF = 30.0
STALL_FACTOR = 10.0
SECOND_LOOK = 0.2
"""Seconds between finding that a worker has stalled and believing it."""
PING_SECONDS = 10.0
"""How long an idle worker may say nothing before it is pinged."""
_FIRST_STEP = "starting the worker process"


class State(enum.StrEnum):
    """Where the engine's life stands."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class StallClock:
    """Decides when a step has taken too long. Times in seconds; a life begins at `now`."""

    def __init__(self, shortest_bound: float, now: float = 0.0) -> None:
        self._shortest_bound = shortest_bound
        self._step_started_at: float | None = None
        self._asked_at: float | None = None  # when an idle engine was given work, or pinged, that it has not answered
        self._only_pinged = False
        self._heard_at = now
        self._slowest = 0.0

    @property
    def bound(self) -> float:
        """How long a step, or an answer, may take now."""
        if self._only_pinged:
            return self._shortest_bound
        return max(self._shortest_bound, STALL_FACTOR * self._slowest)

    def on_submit(self, now: float) -> None:
        """Work was handed over."""
        self._only_pinged = False
        if self._step_started_at is None and self._asked_at is None:
            self._asked_at = now

    def should_ping(self, now: float) -> bool:
        """Whether an idle engine has said nothing for so long that it is to be pinged now. That counts as asked."""
        if self._step_started_at is not None or self._asked_at is not None or now - self._heard_at < PING_SECONDS:
            return False
        self._asked_at, self._only_pinged = now, True
        return True

    def on_event(self, event: Event, now: float) -> None:
        """A step started, ended (outputs), or the engine is idle."""
        self._asked_at, self._only_pinged, self._heard_at = None, False, now
        if isinstance(event, StepStarted):
            self._step_started_at = now if event.busy else None
        elif isinstance(event, Outputs) and self._step_started_at is not None:
            self._step_started_at = now
        if isinstance(event, Outputs) and event.stats is not None:
            # The worker's own figure: what passes until we read an event is no step's time.
            self._slowest = max(self._slowest, event.stats.slowest_step_seconds)

    def seconds_left(self, now: float) -> float:
        """Until the current step counts as stalled (<= 0: it does); the whole bound while idle."""
        since = self._asked_at if self._step_started_at is None else self._step_started_at
        return self.bound if since is None else since + self.bound - now


class Supervisor:
    """Owner of the EngineClient.

    connect: makes a client for one life. on_event: gets every event of a ready engine. on_lost: called once for each
    loss, before any restart. stall_timeout: seconds. start_timeout: seconds that the first start may make no progress.
    clock: monotonic seconds, an argument for tests.
    """

    def __init__(
        self,
        connect: Callable[[], EngineClient],
        config: EngineConfig,
        *,
        on_event: Callable[[Event], None],
        on_lost: Callable[[PunicaError], None],
        on_ready: Callable[[EngineLayout], None],
        on_progress: Callable[[Progress], None],
        stall_timeout: float,
        start_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._config = config
        self._on_event = on_event
        self._on_lost = on_lost
        self._on_ready = on_ready
        self._on_progress = on_progress
        self._stall_timeout = stall_timeout
        self._clock = clock
        self._client: EngineClient | None = None
        self._state = State.STARTING
        self._stall = StallClock(stall_timeout)
        self._stalled = False
        self._ready_at = 0.0
        self._start_bound = stall_timeout
        self._watch = StartWatch(start_timeout, _FIRST_STEP, self._num_bytes)
        self._backoff = FIRST_BACKOFF
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> State:
        """Where the engine's life stands; READY is false news from the moment a stall or a loss was noticed."""
        return self._state

    @property
    def retry_after(self) -> int:
        """Seconds after which a refused client may ask again."""
        return max(1, round(self._backoff))

    async def start(self) -> EngineLayout:
        """The first life. Raises ConfigError, or WorkerLost, also when it makes no progress; nothing is retried."""
        layout = await self._watch.wait_for(self._start_life())
        self._spawn(self._watch_stalls(), "stall-watch")
        return layout

    def check_ready(self) -> None:
        """Raise EngineRestarting unless the engine takes work."""
        if self._state is not State.READY:
            raise EngineRestarting("The engine is restarting after a failure. Try again in a few seconds.")

    def submit(self, sequences: Sequence[NewSequence]) -> None:
        """Hand over to the current life. Without one they were ended already by on_lost."""
        if self._client is not None and self._state is State.READY:
            self._stall.on_submit(self._clock())
            self._client.submit(sequences)

    def cancel(self, request_ids: Sequence[int]) -> None:
        """End sequences of the current life."""
        if self._client is not None and self._state is State.READY:
            self._client.cancel(request_ids)

    def forget(self, paths: Sequence[str]) -> None:
        """No new sequence will use the adapters in these folders. A next life has never heard of them."""
        if self._client is not None and self._state is State.READY:
            self._client.forget(paths)

    async def stop(self) -> None:
        """End the engine and all of ours. Idempotent."""
        self._state = State.STOPPED
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_life()

    async def _start_life(self) -> EngineLayout:
        began = self._clock()
        self._watch.on_progress(Progress(_FIRST_STEP))
        client = self._client = self._connect()
        client.set_handlers(self._handle_event, self._handle_loss)
        try:
            layout = await client.start(self._config, self._note_progress)
        except BaseException:
            await self._end_life()
            raise
        self._ready_at = self._clock()
        self._start_bound = max(self._start_bound, STALL_FACTOR * (self._ready_at - began))
        self._stall, self._stalled = StallClock(self._stall_timeout, self._ready_at), False
        self._state = State.READY
        self._on_ready(layout)
        return layout

    async def _start_in_time(self) -> None:
        """Another life. Raises WorkerLost also if it is not ready in time; the next one gets twice as long."""
        bound = self._start_bound
        try:
            async with asyncio.timeout(bound):
                await self._start_life()
        except TimeoutError:
            self._start_bound = 2 * bound
            raise WorkerLost(f"It was not ready within {bound:.1f} s ({self._watch.what}).") from None

    async def _end_life(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.stop()

    def _note_progress(self, progress: Progress) -> None:
        self._watch.on_progress(progress)
        self._on_progress(progress)

    def _num_bytes(self) -> int | None:
        return None if self._client is None else self._client.num_bytes()

    def _handle_event(self, event: Event) -> None:
        self._stall.on_event(event, self._clock())
        self._on_event(event)

    def _handle_loss(self, error: PunicaError) -> None:
        if self._state is State.STOPPED:
            return
        if self._stalled:
            error = WorkerLost("The worker did not finish a step in time and was killed.")
        log.error("Engine lost: %s", error.message)
        self._state = State.RESTARTING
        self._on_lost(error)
        self._spawn(self._restart(), "engine-restart")

    async def _restart(self) -> None:
        await self._end_life()
        if self._clock() - self._ready_at > LONGEST_BACKOFF:
            self._backoff = FIRST_BACKOFF  # it had been healthy
        while True:
            await asyncio.sleep(self._backoff)
            self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)
            try:
                await self._start_in_time()
            except (PunicaError, OSError) as error:
                log.error("The engine did not start: %s Next attempt in %.1f s.", error, self._backoff)
            else:
                log.warning("A new engine is ready.")
                return

    async def _watch_stalls(self) -> None:
        while True:
            self._ping_if_silent()
            left = self._stall_left()
            if left <= 0:
                await asyncio.sleep(SECOND_LOOK)  # it may be us who did not run: then the news are there by now
                left = self._stall_left()
            if left <= 0 and self._client is not None:
                log.error("The worker has said nothing for more than %.1f s: killing it.", self._stall.bound)
                self._state, self._stalled = State.RESTARTING, True
                self._client.kill()
                left = self._stall_timeout
            await asyncio.sleep(min(max(left, 0.01), 1.0))

    def _ping_if_silent(self) -> None:
        if self._client is not None and self._state is State.READY and self._stall.should_ping(self._clock()):
            self._client.ping()

    def _stall_left(self) -> float:
        if self._state is not State.READY:
            return self._stall_timeout
        return self._stall.seconds_left(self._clock())

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
