"""An EngineClient without an engine: replies from a script, one token a step, or by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from punica_core.config import EngineConfig, EngineLayout
from punica_core.errors import PunicaError, WorkerLost, to_wire
from punica_core.protocol import (
    Event,
    FinishReason,
    LogprobTable,
    NewSequence,
    Outputs,
    Progress,
    SequenceOutput,
    StepStarted,
    StepStats,
    TokenLogprobs,
)

Reply = Callable[[NewSequence], Sequence[int] | PunicaError]


def echo_reply(sequence: NewSequence) -> Sequence[int]:
    """The prompt again, over and over, up to max_tokens."""
    prompt = sequence.prompt_ids
    return [prompt[position % len(prompt)] for position in range(sequence.sampling.max_tokens)]


class FakeEngine:
    """reply: token ids (or an error) for each sequence; a reply shorter than max_tokens ends with `stop_token_id`.

    logprob: of every token of a sequence.
    auto: run steps by itself, `step_seconds` apart; otherwise the test calls `step` or `emit`.
    submissions, cancelled, forgotten and num_pings record what the front end asked for.
    deaf: pings are not answered.
    """

    def __init__(
        self,
        *,
        model_dir: str = "",
        vocab_size: int = 300,
        max_model_len: int = 512,
        reply: Reply = echo_reply,
        stop_token_id: int = 257,
        auto: bool = True,
        step_seconds: float = 0.0,
        start_error: PunicaError | None = None,
        logprob: Callable[[NewSequence], float] = lambda sequence: -0.5,
    ) -> None:
        self.submissions: list[list[NewSequence]] = []
        self.cancelled: list[int] = []
        self.forgotten: list[str] = []
        self.num_pings = 0
        self.deaf = False
        self.stopped = False
        self.killed = False
        self._layout = EngineLayout(
            model_dir=model_dir,
            architecture="FakeForCausalLM",
            device="cpu",
            dtype="float32",
            vocab_size=vocab_size,
            eos_token_ids=(stop_token_id,),
            max_model_len=max_model_len,
            num_blocks=64,
        )
        self._reply = reply
        self._stop_token_id = stop_token_id
        self._auto = auto
        self._step_seconds = step_seconds
        self._start_error = start_error
        self._logprob = logprob
        self._running: dict[int, _Running] = {}
        self._stepper: asyncio.Task[None] | None = None
        self._on_event: Callable[[Event], None] = lambda event: None
        self._on_lost: Callable[[PunicaError], None] = lambda error: None

    @property
    def running(self) -> list[int]:
        """Ids of the sequences that have not ended."""
        return list(self._running)

    def set_handlers(self, on_event: Callable[[Event], None], on_lost: Callable[[PunicaError], None]) -> None:
        self._on_event, self._on_lost = on_event, on_lost

    async def start(self, config: EngineConfig, on_progress: Callable[[Progress], None]) -> EngineLayout:
        on_progress(Progress("loading the fake model", 0.5))
        if self._start_error is not None:
            raise self._start_error
        return self._layout

    def submit(self, sequences: Sequence[NewSequence]) -> None:
        self.submissions.append(list(sequences))
        for sequence in sequences:
            self._running[sequence.request_id] = _Running(
                sequence, self._reply(sequence), self._stop_token_id, self._logprob(sequence)
            )
        if self._auto and (self._stepper is None or self._stepper.done()):
            self._stepper = asyncio.get_running_loop().create_task(self._run())

    def cancel(self, request_ids: Sequence[int]) -> None:
        self.cancelled += request_ids
        ended = [request_id for request_id in request_ids if self._running.pop(request_id, None) is not None]
        outputs = [SequenceOutput(request_id, finish_reason=FinishReason.CANCELLED) for request_id in ended]
        asyncio.get_running_loop().call_soon(self.emit, Outputs(outputs))

    def forget(self, paths: Sequence[str]) -> None:
        self.forgotten += paths

    def ping(self) -> None:
        self.num_pings += 1
        if not self.deaf:
            asyncio.get_running_loop().call_soon(self.emit, Outputs())

    def num_bytes(self) -> int | None:
        return None

    async def stop(self) -> None:
        self.stopped = True
        self._stop_stepping()

    def kill(self) -> None:
        self.killed = True
        asyncio.get_running_loop().call_soon(self.lose)

    def lose(self) -> None:
        """Die: everything that runs is lost."""
        self._stop_stepping()
        self._running.clear()
        self._on_lost(WorkerLost("The worker process ended (killed by signal 9)"))

    def emit(self, event: Event) -> None:
        """Send any event."""
        self._on_event(event)

    def step(self) -> None:
        """One token for every running sequence, in one message."""
        self._on_event(StepStarted(busy=True))
        outputs = [running.advance() for running in self._running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.request_id]
        self._on_event(Outputs(outputs, StepStats(running=len(self._running), steps=1)))
        if not self._running:
            self._on_event(StepStarted(busy=False))

    async def _run(self) -> None:
        while self._running:
            await asyncio.sleep(self._step_seconds)
            self.step()

    def _stop_stepping(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()


class _Running:
    def __init__(
        self, sequence: NewSequence, reply: Sequence[int] | PunicaError, stop_token_id: int, logprob: float
    ) -> None:
        self._sequence = sequence
        self._logprob = logprob
        self._error = reply if isinstance(reply, PunicaError) else None
        limit = sequence.sampling.max_tokens
        tokens = [] if isinstance(reply, PunicaError) else list(reply)
        self._stops = len(tokens) < limit
        self._tokens = [*tokens, stop_token_id] if self._stops else tokens[:limit]
        self._stop_token_id = stop_token_id
        self._done = 0

    def advance(self) -> SequenceOutput:
        request_id = self._sequence.request_id
        if self._error is not None:
            code, message = to_wire(self._error)
            return SequenceOutput(request_id, finish_reason=FinishReason.ERROR, error_code=code, error_message=message)
        first = self._done == 0
        token_ids = self._tokens[self._done : self._done + 1]
        self._done += 1
        ended = self._done >= len(self._tokens)
        reason = (FinishReason.STOP if self._stops else FinishReason.LENGTH) if ended else None
        return SequenceOutput(
            request_id,
            token_ids,
            reason,
            logprobs=self._logprobs(token_ids),
            prompt_logprobs=self._prompt_logprobs() if first else None,
            stop_token_id=self._stop_token_id if reason is FinishReason.STOP else None,
            cached_tokens=4 if first else 0,
            adapter_key=self._adapter_key() if first else "",
        )

    def _adapter_key(self) -> str:
        adapter = self._sequence.adapter
        return f"key-of-{adapter.name}" if adapter is not None else ""

    def _logprobs(self, token_ids: Sequence[int]) -> LogprobTable | None:
        count = self._sequence.sampling.logprobs
        if count is None:
            return None
        return LogprobTable.of([_logprobs_of(token, count, self._logprob) for token in token_ids])

    def _prompt_logprobs(self) -> LogprobTable | None:
        count = self._sequence.sampling.prompt_logprobs
        if count is None:
            return None
        entries = [_logprobs_of(token, count, self._logprob) for token in self._sequence.prompt_ids[1:]]
        return LogprobTable.of(entries)


def _logprobs_of(token_id: int, count: int, logprob: float) -> TokenLogprobs:
    """The token first, then others; the last of several has probability 0."""
    others = [(other, -2.0 if other < count - 1 else float("-inf")) for other in range(1, count)]
    return TokenLogprobs(token_id, logprob, [(token_id, logprob), *others][:count])
