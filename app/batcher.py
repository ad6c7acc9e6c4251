"""The asyncio batcher: bounded admission, one message for all that arrived together, and the way back to each client.

Sequences that arrive in one turn of the event loop leave in one `submit`, whatever adapters they want; the worker
plans them together. Outputs are appended to the sequence they belong to, and its reader is woken once; a reader that is
slower than the engine (a slow client) finds more tokens at its next turn instead of more items, so what is queued for a
client is at most one list of token ids.

A sequence holds a seat from admission until the engine's terminal output, also when its client left. There are
max_num_seqs (running) plus max_queue (waiting) of them. Prompts differ widely in work and memory, so the prompt tokens
of sequences that have no output yet are bounded as well (see `Seats`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence

from app.flight import Flight, SequenceRequest, SequenceStream
from app.metrics import ModelMetrics
from app.seats import Seats
from punica_core.errors import Draining, PunicaError
from punica_core.protocol import AdapterRef, FinishReason, NewSequence, SequenceOutput


class Batcher:
    """Owner of the client streams. Everything runs on the event loop's thread.

    submit, cancel: hand a message to the engine. check_ready: raises a CapacityError while no engine takes work.
    max_queue_tokens: bound on `queued_tokens`. has_tenants: whether there are several tenants, which then share seats.
    """

    def __init__(
        self,
        submit: Callable[[Sequence[NewSequence]], None],
        cancel: Callable[[Sequence[int]], None],
        check_ready: Callable[[], None],
        *,
        max_num_seqs: int,
        max_queue: int,
        max_queue_tokens: int,
        has_tenants: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._submit = submit
        self._cancel = cancel
        self._check_ready = check_ready
        self._seats = Seats(max_num_seqs + max_queue, max_queue_tokens, has_tenants)
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
    def queued_tokens(self) -> int:
        """Prompt tokens of live sequences without any output."""
        return self._seats.queued_tokens

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
        keep_logprobs: Callable[[int], bool] = lambda count: True,
    ) -> Flight:
        """Admit a request's sequences, all or none; they leave with all others of this turn of the loop.

        on_end: called once when the last of them has given its seat back, for whatever reason, with the number of
        tokens that were generated for them. keep_logprobs: see `Flight`.
        Raises QueueFull, Draining, whatever check_ready raises, or InvalidRequest for what would never be admitted.
        """
        if self._draining:
            raise Draining("The server is shutting down and takes no new requests.")
        self._check_ready()
        self._seats.check(tenant, len(requests), sum(len(request.prompt_ids) for request in requests))
        started = self._clock() if arrived_at is None else arrived_at
        flight = Flight(
            self.cancel,
            metrics,
            adapter,
            on_end,
            tenant=tenant,
            eager=eager,
            arrived_at=started,
            keep_logprobs=keep_logprobs,
        )
        flight.seats = len(requests)
        if adapter is not None:
            self._users[adapter.path] += len(requests)
        for index, request in enumerate(requests):
            sequence = SequenceStream(next(self._ids), index, request, flight)
            flight.sequences.append(sequence)
            self._seats.take(tenant, len(request.prompt_ids))
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

    def cancel(self, sequence: SequenceStream, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence: at once if it has not left yet, else by asking the engine, whose terminal output frees the
        seat. Does nothing for one that has ended. reason: for the reader."""
        if self._live.get(sequence.request_id) is not sequence:
            return
        if self._outbox.pop(sequence.request_id, None) is not None:
            self._remove(sequence.request_id)
            sequence.end(reason)
        elif sequence.finish_reason is None:
            sequence.finish_reason = reason  # the seat stays taken
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
            if sequence.queued:
                self._leave_queue(sequence)
            if sequence.finish_reason is None:
                sequence.accept(output, now)
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
            sequence.end(FinishReason.ERROR, error)

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

    def _leave_queue(self, sequence: SequenceStream) -> None:
        sequence.queued = False
        self._seats.leave_queue(sequence.flight.tenant, len(sequence.request.prompt_ids))

    def _remove(self, request_id: int) -> None:
        sequence = self._live.pop(request_id)
        if sequence.queued:
            self._leave_queue(sequence)
        flight = sequence.flight
        self._seats.give_back(flight.tenant)
        if flight.adapter is not None:
            self._give_back(flight.adapter.path)
        if not self._live:
            self._idle.set()
        flight.leave()

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
