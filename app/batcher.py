"""The asyncio batcher: bounded admission, one message for all that arrived together, and the way back to each client.

Sequences that arrive in one turn of the event loop leave in one `submit`, whatever adapters they want; the worker
plans them together. Outputs are appended to the sequence they belong to, and its reader is woken once; a reader that is
slower than the engine (a slow client) finds more tokens at its next turn instead of more items, so what is queued for a
client is at most one list of token ids.

Seats: a sequence holds one from admission until the engine's terminal output, also when its client left. There are
max_num_seqs (running) plus max_queue (waiting) of them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.metrics import ModelMetrics
from punica_core.errors import Draining, InvalidRequest, PunicaError, QueueFull, from_wire
from punica_core.protocol import (
    AdapterRef,
    FinishReason,
    NewSequence,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence that a client wants."""

    prompt_ids: list[int]
    sampling: SamplingParams


class ClientGone(Exception):
    """The client of a flight disconnected; its sequences were cancelled."""


class SequenceStream:
    """What the engine has produced for one sequence and its reader has not taken yet.

    finish_reason and error are set by the terminal output; cached_tokens and adapter_key come with the first token.
    on_arrival: called for every output, whether anybody reads or not; returns whether the sequence is over.
    """

    __slots__ = (
        "_announced",
        "adapter_key",
        "cached_tokens",
        "error",
        "finish_reason",
        "flight",
        "index",
        "last_output_at",
        "logprobs",
        "on_arrival",
        "prompt_logprobs",
        "request",
        "request_id",
        "stop_token_id",
        "token_ids",
    )

    def __init__(self, request_id: int, index: int, request: SequenceRequest, flight: Flight) -> None:
        self.request_id = request_id
        self.index = index
        self.request = request
        self.flight = flight
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.error: PunicaError | None = None
        self.cached_tokens = 0
        self.adapter_key = ""
        self.last_output_at = 0.0
        self.on_arrival: Callable[[], bool] | None = None
        self._announced = False

    def take_tokens(self) -> list[int]:
        """The tokens that arrived since the last call."""
        token_ids, self.token_ids = self.token_ids, []
        return token_ids

    def take_logprobs(self) -> list[TokenLogprobs]:
        """The logprobs that arrived since the last call, one for each token if they were asked for."""
        logprobs, self.logprobs = self.logprobs, []
        return logprobs

    def cancel(self) -> None:
        """Nobody reads this sequence any more: end it if it has not ended."""
        self.flight._batcher.cancel(self)

    def _accept(self, output: SequenceOutput, now: float) -> None:
        count = len(output.token_ids)
        if count:
            self._observe(output, count, now)
            self.token_ids += output.token_ids
        if output.logprobs:
            self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            self.stop_token_id = output.stop_token_id
            error = None
            if output.finish_reason is FinishReason.ERROR:
                error = from_wire(output.error_code, output.error_message)
            self._end(output.finish_reason, error)
        elif self.flight.eager:
            self._announce()
        if self.on_arrival is not None and self.on_arrival():
            self.cancel()
            self._announce()

    def _observe(self, output: SequenceOutput, count: int, now: float) -> None:
        metrics = self.flight.metrics
        metrics.generated_tokens += count
        self.flight.generated_tokens += count
        if self.last_output_at:
            metrics.inter_token.observe((now - self.last_output_at) / count, count)
        else:
            metrics.first_token.observe(now - self.flight.arrived_at)
            self.cached_tokens, self.adapter_key = output.cached_tokens, output.adapter_key
        self.last_output_at = now

    def _end(self, reason: FinishReason, error: PunicaError | None = None) -> None:
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error
            self._announce()

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self.flight._wake(self)


class Flight:
    """The sequences of one client request, from admission to their ends. One reader awaits `changed` in a loop.

    eager: wake the reader for every output (streams), not only when a sequence has ended.
    """

    __slots__ = (
        "_batcher",
        "_changed",
        "_gone",
        "_on_end",
        "_seats",
        "_waiter",
        "adapter",
        "arrived_at",
        "eager",
        "generated_tokens",
        "metrics",
        "sequences",
    )

    def __init__(
        self,
        batcher: Batcher,
        metrics: ModelMetrics,
        adapter: AdapterRef | None,
        on_end: Callable[[int], None],
        *,
        eager: bool,
        arrived_at: float,
    ) -> None:
        self._batcher = batcher
        self._on_end = on_end
        self._seats = 0
        self.metrics = metrics
        self.adapter = adapter
        self.eager = eager
        self.arrived_at = arrived_at
        self.generated_tokens = 0
        self.sequences: list[SequenceStream] = []
        self._changed: list[SequenceStream] = []
        self._waiter: asyncio.Future[None] | None = None
        self._gone = False

    async def changed(self) -> list[SequenceStream]:
        """Sequences with news since the last call; waits for some or a nudge. Raises ClientGone after `abandon`."""
        if not self._changed and not self._gone:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._gone:
            raise ClientGone
        changed, self._changed = self._changed, []
        for sequence in changed:
            sequence._announced = False
        return changed

    def nudge(self) -> None:
        """Let a waiting reader go on without news."""
        self._release_reader()

    def abandon(self) -> None:
        """The client left: cancel everything and release the reader."""
        self._gone = True
        self.close()
        self._release_reader()

    def close(self) -> None:
        """Cancel whatever has not ended. Idempotent; called when the reader is done, for whatever reason."""
        for sequence in self.sequences:
            self._batcher.cancel(sequence)

    def _leave(self) -> None:
        """One sequence gave its seat back."""
        self._seats -= 1
        if self._seats == 0:
            self._on_end(self.generated_tokens)

    def _wake(self, sequence: SequenceStream) -> None:
        self._changed.append(sequence)
        self._release_reader()

    def _release_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Batcher:
    """Owner of the client streams. Everything runs on the event loop's thread.

    submit, cancel: hand a message to the engine. check_ready: raises a CapacityError while no engine takes work.
    """

    def __init__(
        self,
        submit: Callable[[Sequence[NewSequence]], None],
        cancel: Callable[[Sequence[int]], None],
        check_ready: Callable[[], None],
        *,
        max_num_seqs: int,
        max_queue: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._submit = submit
        self._cancel = cancel
        self._check_ready = check_ready
        self._seats = max_num_seqs + max_queue
        self._clock = clock
        self._ids = itertools.count(1)
        self._live: dict[int, SequenceStream] = {}
        self._users: Counter[str] = Counter()  # live sequences by adapter folder
        self._unused: dict[str, asyncio.Future[None]] = {}
        self._outbox: dict[int, NewSequence] = {}
        self._cancelled: list[int] = []
        self._flush_planned = False
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Sequences that hold a seat."""
        return len(self._live)

    @property
    def draining(self) -> bool:
        """Whether new work is refused for good."""
        return self._draining

    def open(
        self,
        requests: Sequence[SequenceRequest],
        metrics: ModelMetrics,
        *,
        adapter: AdapterRef | None = None,
        tenant: str = "",
        eager: bool = True,
        arrived_at: float | None = None,
        on_end: Callable[[int], None] = lambda generated_tokens: None,
    ) -> Flight:
        """Admit a request's sequences, all or none; they leave with all others of this turn of the loop.

        on_end: called once when the last of them has given its seat back, for whatever reason, with the number of
        tokens that were generated for them.
        Raises QueueFull, Draining, whatever check_ready raises, or InvalidRequest for more sequences than seats exist.
        """
        self._check_admission(len(requests))
        started = self._clock() if arrived_at is None else arrived_at
        flight = Flight(self, metrics, adapter, on_end, eager=eager, arrived_at=started)
        flight._seats = len(requests)
        if adapter is not None:
            self._users[adapter.path] += len(requests)
        for index, request in enumerate(requests):
            sequence = SequenceStream(next(self._ids), index, request, flight)
            flight.sequences.append(sequence)
            self._live[sequence.request_id] = sequence
            self._outbox[sequence.request_id] = NewSequence(
                request_id=sequence.request_id,
                prompt_ids=request.prompt_ids,
                sampling=request.sampling,
                adapter=adapter,
                tenant=tenant,
            )
        self._idle.clear()
        self._plan_flush()
        return flight

    def _check_admission(self, count: int) -> None:
        if self._draining:
            raise Draining("The server is shutting down and takes no new requests.")
        self._check_ready()
        if count > self._seats:
            raise InvalidRequest(
                f"The request asks for {count} sequences (prompts x n); at most {self._seats} fit. Split the request."
            )
        if len(self._live) + count > self._seats:
            raise QueueFull(
                f"{len(self._live)} sequences are running or waiting and {count} more would exceed the limit of "
                f"{self._seats}. Try again later."
            )

    def cancel(self, sequence: SequenceStream) -> None:
        """End a sequence: at once if it has not left yet, else by asking the engine, whose terminal output frees the
        seat. Does nothing for one that has ended."""
        if self._live.get(sequence.request_id) is not sequence:
            return
        if self._outbox.pop(sequence.request_id, None) is not None:
            self._remove(sequence.request_id)
            sequence._end(FinishReason.CANCELLED)
        elif sequence.finish_reason is None:
            sequence.finish_reason = FinishReason.CANCELLED  # for the reader; the seat stays taken
            self._cancelled.append(sequence.request_id)
            self._plan_flush()

    def on_outputs(self, outputs: Sequence[SequenceOutput]) -> None:
        """Route one step's outputs. Outputs of sequences that nobody reads any more only free their seats."""
        now = self._clock()
        live = self._live
        for output in outputs:
            sequence = live.get(output.request_id)
            if sequence is None:
                continue
            if sequence.finish_reason is None:
                sequence._accept(output, now)
            if output.finish_reason is not None:
                self._remove(output.request_id)

    def fail_all(self, error: PunicaError) -> None:
        """End every live sequence with `error`. If an engine still runs them, it is told to stop."""
        sent = [request_id for request_id in self._live if request_id not in self._outbox]
        ended = list(self._live.values())
        self._outbox.clear()
        self._cancelled.clear()
        if sent:
            self._cancel(sent)
        for sequence in ended:
            self._remove(sequence.request_id)
            sequence._end(FinishReason.ERROR, error)

    def begin_drain(self) -> None:
        """Refuse new work from now on; what was admitted goes on."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Wait until no sequence is live."""
        await self._idle.wait()

    async def wait_unused(self, path: str) -> None:
        """Wait until no live sequence uses the adapter in this folder."""
        while self._users[path]:
            unused = self._unused.get(path)
            if unused is None:
                unused = self._unused[path] = asyncio.get_running_loop().create_future()
            await asyncio.shield(unused)

    def _remove(self, request_id: int) -> None:
        flight = self._live.pop(request_id).flight
        if flight.adapter is not None:
            self._give_back(flight.adapter.path)
        if not self._live:
            self._idle.set()
        flight._leave()

    def _give_back(self, path: str) -> None:
        self._users[path] -= 1
        if self._users[path] == 0:
            del self._users[path]
            unused = self._unused.pop(path, None)
            if unused is not None:
                unused.set_result(None)

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if self._outbox:
            sequences = list(self._outbox.values())
            self._outbox.clear()
            self._submit(sequences)
        if self._cancelled:
            cancelled, self._cancelled = self._cancelled, []
            self._cancel(cancelled)
