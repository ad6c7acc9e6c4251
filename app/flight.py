"""The sequences of a client's request on their way back: what the batcher fills and a reader empties.

Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from app.metrics import ModelMetrics
from punica_core.errors import AdapterError, PunicaError, from_wire
from punica_core.protocol import AdapterRef, FinishReason, LogprobTable, SamplingParams, SequenceOutput

_NO_LOGPROBS = LogprobTable()
"""Nobody changes it."""


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence that a client wants."""

    prompt_ids: list[int]
    sampling: SamplingParams


class ClientGone(Exception):
    """The client of a flight disconnected; its sequences were cancelled."""


class SequenceStream:
    """What the engine has produced for one sequence and its reader has not taken yet.

    finish_reason and error are set by the terminal output; cached_tokens and adapter_key come with the first token,
    or with the end of a sequence that generates none.
    queued: whether the engine has not answered yet; the batcher's own.
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
        "queued",
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
        self.logprobs = LogprobTable()
        self.prompt_logprobs: LogprobTable | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.error: PunicaError | None = None
        self.cached_tokens = 0
        self.adapter_key = ""
        self.last_output_at = 0.0
        self.on_arrival: Callable[[], bool] | None = None
        self.queued = True
        self._announced = False

    def take_tokens(self) -> list[int]:
        """The tokens that arrived since the last call."""
        token_ids, self.token_ids = self.token_ids, []
        return token_ids

    def take_logprobs(self) -> LogprobTable:
        """The logprobs that arrived since the last call, one for each token if they were asked for."""
        if not self.logprobs.token_ids:
            return _NO_LOGPROBS
        logprobs, self.logprobs = self.logprobs, LogprobTable()
        return logprobs

    def cancel(self) -> None:
        """Nobody reads this sequence any more: end it if it has not ended."""
        self.flight.cancel(self, FinishReason.CANCELLED)

    def accept(self, output: SequenceOutput, now: float) -> None:
        """Take what a step produced for the sequence."""
        count = len(output.token_ids)
        if count:
            self._observe(output, count, now)
            self.token_ids += output.token_ids
        self.cached_tokens = self.cached_tokens or output.cached_tokens
        self.adapter_key = self.adapter_key or output.adapter_key
        has_room = True
        if output.logprobs:
            self.logprobs.extend(output.logprobs)
            has_room = self.flight.keep_logprobs(output.logprobs.num_values)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
            has_room = self.flight.keep_logprobs(output.prompt_logprobs.num_values) and has_room
        if output.finish_reason is not None:
            self.stop_token_id = output.stop_token_id
            error = None
            if output.finish_reason is FinishReason.ERROR:
                error = from_wire(output.error_code, output.error_message)
                if isinstance(error, AdapterError):
                    error.param = "model"  # the worker knows no fields of requests
            self.end(output.finish_reason, error)
        elif not has_room:
            self.flight.cancel(self, FinishReason.LENGTH)
            self._announce()
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
        self.last_output_at = now

    def end(self, reason: FinishReason, error: PunicaError | None = None) -> None:
        """Nothing more will come. The first reason stays."""
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error
            self._announce()

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self.flight._wake(self)


class Flight:
    """The sequences of one client request, from admission to their ends. One reader awaits `changed` in a loop.

    cancel: ends one of them. on_end: told when the last has given its seat back, with the tokens generated
    for all. keep_logprobs: asked whether so many more may be kept; a sequence for which they may not is over.
    eager: wake the reader for every output (streams), not only when a sequence has ended.
    """

    __slots__ = (
        "_changed",
        "_gone",
        "_on_end",
        "_waiter",
        "adapter",
        "arrived_at",
        "cancel",
        "eager",
        "generated_tokens",
        "keep_logprobs",
        "metrics",
        "seats",
        "sequences",
        "tenant",
    )

    def __init__(
        self,
        cancel: Callable[[SequenceStream, FinishReason], None],
        metrics: ModelMetrics,
        adapter: AdapterRef | None,
        on_end: Callable[[int], None],
        *,
        tenant: str = "",
        eager: bool,
        arrived_at: float,
        keep_logprobs: Callable[[int], bool] = lambda count: True,
    ) -> None:
        self.cancel = cancel
        self.keep_logprobs = keep_logprobs
        self._on_end = on_end
        self.seats = 0
        self.metrics = metrics
        self.adapter = adapter
        self.tenant = tenant
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

    @property
    def is_abandoned(self) -> bool:
        """The client left."""
        return self._gone

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
            self.cancel(sequence, FinishReason.CANCELLED)

    def leave(self) -> None:
        """One sequence gave its seat back."""
        self.seats -= 1
        if self.seats == 0:
            self._on_end(self.generated_tokens)

    def _wake(self, sequence: SequenceStream) -> None:
        self._changed.append(sequence)
        self._release_reader()

    def _release_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
