"""`python -m app.bench.front_worker --fd N …`: a worker that computes nothing, to measure the front end alone.

Each sequence gets its prompt again, over and over, a token a step, until max_tokens. Steps come as fast as
--tokens-per-second allows; 0 answers at once. If the front end does not keep up, the full socket holds this process up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator

from punica_core import protocol
from punica_core.config import EngineLayout


class FrontWorker:
    """The worker's end of the protocol. pace: seconds between two tokens of all sequences together."""

    def __init__(self, connection: socket.socket, layout: EngineLayout, pace: float) -> None:
        self._connection = connection
        self._layout = layout
        self._pace = pace
        self._buffer = bytearray()
        self._running: dict[int, tuple[protocol.NewSequence, int]] = {}

    def run(self) -> None:
        """Until Shutdown or EOF."""
        due = time.perf_counter()
        while True:
            for command in self._commands(wait=not self._running):
                match command:
                    case protocol.Configure():
                        self._send(protocol.Ready(self._layout))
                    case protocol.Submit(sequences=sequences):
                        self._running.update({sequence.request_id: (sequence, 0) for sequence in sequences})
                    case protocol.Cancel(request_ids=request_ids):
                        self._cancel(request_ids)
                    case protocol.Ping():
                        self._send(protocol.Outputs())
                    case protocol.Shutdown():
                        return
            if self._running:
                # A step that is late is not made up for.
                due = max(due + self._pace * len(self._running), time.perf_counter())
                time.sleep(max(0.0, due - time.perf_counter()))
                self._step()

    def _step(self) -> None:
        self._send(protocol.StepStarted(busy=True))
        outputs = [self._next(sequence, done) for sequence, done in list(self._running.values())]
        stats = protocol.StepStats(running=len(self._running))
        self._send(protocol.Outputs(outputs, stats))
        if not self._running:
            self._send(protocol.StepStarted(busy=False))

    def _next(self, sequence: protocol.NewSequence, done: int) -> protocol.SequenceOutput:
        token = sequence.prompt_ids[done % len(sequence.prompt_ids)]
        if done + 1 < sequence.sampling.max_tokens:
            self._running[sequence.request_id] = (sequence, done + 1)
            return protocol.SequenceOutput(sequence.request_id, [token])
        del self._running[sequence.request_id]
        return protocol.SequenceOutput(sequence.request_id, [token], protocol.FinishReason.LENGTH)

    def _cancel(self, request_ids: list[int]) -> None:
        ended = [request_id for request_id in request_ids if self._running.pop(request_id, None)]
        reason = protocol.FinishReason.CANCELLED
        self._send(protocol.Outputs([protocol.SequenceOutput(i, finish_reason=reason) for i in ended]))

    def _commands(self, *, wait: bool) -> Iterator[protocol.Command]:
        with contextlib.suppress(BlockingIOError):
            data = self._connection.recv(1 << 20, 0 if wait else socket.MSG_DONTWAIT)
            if not data:
                os._exit(0)  # the front end is gone
            self._buffer += data
        while len(self._buffer) >= 4:
            end = 4 + int.from_bytes(self._buffer[:4], "little")
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[4:end])
            del self._buffer[:end]
            yield protocol.decode_command(body)

    def _send(self, event: protocol.Event) -> None:
        self._connection.sendall(protocol.encode(event))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--model-dir", required=True, help="folder of the tokenizer")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--tokens-per-second", type=float, default=0.0)
    options = parser.parse_args()
    layout = EngineLayout(
        model_dir=options.model_dir,
        architecture="none",
        device="cpu",
        dtype="float32",
        vocab_size=options.vocab_size,
        eos_token_ids=(),
        max_model_len=1 << 20,
        num_blocks=1,
    )
    pace = 1 / options.tokens_per_second if options.tokens_per_second else 0.0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        FrontWorker(socket.socket(fileno=options.fd), layout, pace).run()


if __name__ == "__main__":
    main()
