"""`python -m tests.support.scripted_worker --fd N`: a worker process that speaks the protocol and computes nothing.

It answers each sequence with its prompt, over and over, one token a step, but SCORED_A_STEP where logprobs are asked
for: tokens 0 to 19 are the alternatives of each. Prompts whose first token is one of the words below make it misbehave.
Options: --model-dir, --step-seconds, and --start-seconds, for which it hangs while it starts.
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

CRASH, HANG, GARBAGE, MUTE = 55, 56, 57, 54  # "X", "Y", "Z", "W" in the byte-level vocabulary

SCORED_A_STEP = 100


class Worker:
    def __init__(self, connection: socket.socket, model_dir: str, step_seconds: float, start_seconds: float) -> None:
        self._connection = connection
        self._model_dir = model_dir
        self._step_seconds = step_seconds
        self._start_seconds = start_seconds
        self._buffer = b""
        self._running: dict[int, tuple[protocol.NewSequence, int]] = {}

    def run(self) -> None:
        self._connection.setblocking(True)
        self._handle_first()
        while True:
            for command in self._commands(block=not self._running):
                if isinstance(command, protocol.Shutdown):
                    return
                self._handle(command)
            if self._running:
                self._step()

    def _handle_first(self) -> None:
        layout = EngineLayout(
            model_dir=self._model_dir, architecture="Scripted", device="cpu", dtype="float32", vocab_size=300,
            eos_token_ids=(257,), max_model_len=100_000, num_blocks=1,
        )  # fmt: skip
        while not any(isinstance(command, protocol.Configure) for command in self._commands(block=True)):
            pass
        self._send(protocol.Progress("loading", 0.5))
        time.sleep(self._start_seconds)
        self._send(protocol.Ready(layout))
        self._send(protocol.Outputs([], protocol.StepStats()))

    def _commands(self, block: bool) -> Iterator[protocol.Command]:
        try:
            data = self._connection.recv(1 << 20, 0 if block else socket.MSG_DONTWAIT)
            if not data:
                os._exit(0)  # the front end is gone
        except BlockingIOError:
            data = b""
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "little")
            if len(self._buffer) < 4 + size:
                break
            body, self._buffer = self._buffer[4 : 4 + size], self._buffer[4 + size :]
            yield protocol.decode_command(body)

    def _handle(self, command: protocol.Command) -> None:
        if isinstance(command, protocol.Submit):
            for sequence in command.sequences:
                self._running[sequence.request_id] = (sequence, 0)
        elif isinstance(command, protocol.Cancel):
            ended = [request_id for request_id in command.request_ids if self._running.pop(request_id, None)]
            self._send(
                protocol.Outputs(
                    [protocol.SequenceOutput(i, finish_reason=protocol.FinishReason.CANCELLED) for i in ended]
                )
            )
        elif isinstance(command, protocol.Ping):
            self._send(protocol.Outputs())

    def _step(self) -> None:
        self._send(protocol.StepStarted(busy=True))
        firsts = {sequence.prompt_ids[0] for sequence, _ in self._running.values()}
        if CRASH in firsts:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG in firsts:
            time.sleep(3600)
        if MUTE in firsts:
            self._connection.close()
            time.sleep(3600)
        if GARBAGE in firsts:
            self._connection.sendall(b"\x02\x00\x00\x00\xc1\xc1")
            time.sleep(3600)
        time.sleep(self._step_seconds)
        self._send(protocol.Outputs([self._advance(request_id) for request_id in list(self._running)]))
        if not self._running:
            self._send(protocol.StepStarted(busy=False))

    def _advance(self, request_id: int) -> protocol.SequenceOutput:
        sequence, done = self._running[request_id]
        prompt, sampling = sequence.prompt_ids, sequence.sampling
        count = min(1 if sampling.logprobs is None else SCORED_A_STEP, sampling.max_tokens - done)
        token_ids = [prompt[place % len(prompt)] for place in range(done, done + count)]
        is_last = done + count >= sampling.max_tokens
        if is_last:
            del self._running[request_id]
        else:
            self._running[request_id] = (sequence, done + count)
        return protocol.SequenceOutput(
            request_id,
            token_ids,
            protocol.FinishReason.LENGTH if is_last else None,
            logprobs=_logprobs(token_ids, sampling.logprobs),
            prompt_logprobs=_logprobs(prompt[1:], sampling.prompt_logprobs) if done == 0 else None,
        )

    def _send(self, event: protocol.Event) -> None:
        self._connection.sendall(protocol.encode(event))


def _logprobs(token_ids: list[int], alternatives: int | None) -> protocol.LogprobTable | None:
    if alternatives is None:
        return None
    top = [(token_id, -0.125 - token_id) for token_id in range(alternatives)]
    return protocol.LogprobTable.of([protocol.TokenLogprobs(token_id, -0.5, top) for token_id in token_ids])


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--start-seconds", type=float, default=0.0)
    options = parser.parse_args()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Worker(socket.socket(fileno=options.fd), options.model_dir, options.step_seconds, options.start_seconds).run()


if __name__ == "__main__":
    main()
