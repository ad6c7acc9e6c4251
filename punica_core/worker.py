"""The worker process: `python -m punica_core.worker --fd N`, started by a front end over a socket pair.

Three threads: the main one runs the engine, one reads commands, one writes events, so that a step never waits for
the socket. EOF on the socket means that the front end is gone: the process ends at once. SIGINT, SIGTERM and SIGHUP are
ignored, since they reach the whole process group and it is the front end that drains.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from punica_core import protocol
from punica_core.config import EngineConfig, EngineLayout
from punica_core.errors import ConfigError, PunicaError, to_wire

if TYPE_CHECKING:
    from punica_core.engine.engine import Engine

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.5
"""Seconds between two reports of the gauges at most."""

IDLE_WAIT = 0.05
"""Seconds to sleep when nothing can run, unless a command or an adapter load ends the wait."""


class Channel:
    """The worker's end of the socket: commands in, events out, each on its own thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.wake = threading.Event()
        self._sock = sock
        self._stream: BinaryIO = sock.makefile("rb")
        self._commands: queue.SimpleQueue[protocol.Command] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="events", daemon=True)
        self._writer.start()

    def receive_configuration(self) -> EngineConfig:
        """Block for the first command, then read the rest in the background."""
        command = self._read()
        if not isinstance(command, protocol.Configure):
            raise ConfigError(f"The first command was {type(command).__name__}; Configure was expected.")
        if command.version != protocol.PROTOCOL_VERSION:
            raise ConfigError(
                f"The front end speaks protocol {command.version}, this worker {protocol.PROTOCOL_VERSION}: "
                "they come from different installations."
            )
        threading.Thread(target=self._read_forever, name="commands", daemon=True).start()
        return command.config

    def _read(self) -> protocol.Command:
        head = self._stream.read(4)
        size = int.from_bytes(head, "little")
        if size > protocol.MAX_FRAME_BYTES:
            logger.critical("a frame of %d bytes; at most %d are allowed", size, protocol.MAX_FRAME_BYTES)
            os._exit(1)
        body = self._stream.read(size) if len(head) == 4 else b""
        if len(head) < 4 or len(body) < size:
            os._exit(0)  # the front end is gone; there is nobody to answer and nothing to save
        return protocol.decode_command(body)

    def _read_forever(self) -> None:
        while True:
            try:
                self._commands.put(self._read())
            except (msgspec.DecodeError, OSError) as error:
                logger.critical("unreadable command: %s", error)
                os._exit(1)
            self.wake.set()

    def take(self) -> list[protocol.Command]:
        """All commands that have arrived, without waiting."""
        taken: list[protocol.Command] = []
        while True:
            try:
                taken.append(self._commands.get_nowait())
            except queue.Empty:
                return taken

    def send(self, event: protocol.Event) -> None:
        """Queue an event; never blocks."""
        for frame in protocol.event_frames(event):
            self._outbox.put(frame)

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                self._sock.sendall(frame)
            except OSError:
                os._exit(0)

    def close(self) -> None:
        """Send what is queued, then stop."""
        self._outbox.put(None)
        self._writer.join(timeout=5.0)


class Loop:
    """Commands → engine → events, until Shutdown."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        self._channel = channel
        self._engine = engine
        self._busy = False
        self._clock_set = False  # the front end's stall clock counts from the end of the last step
        self._next_stats = 0.0

    def run(self) -> None:
        self._channel.send(protocol.Outputs([], self._engine.stats()))  # the gauges of a worker that has done nothing
        while True:
            self._channel.wake.clear()
            outputs: list[protocol.SequenceOutput] = []
            for command in self._channel.take():
                match command:
                    case protocol.Submit(sequences=sequences):
                        outputs += self._engine.submit(sequences, time.monotonic())
                    case protocol.Cancel(request_ids=ids):
                        outputs += self._engine.cancel(ids, time.monotonic())
                    case protocol.Forget(paths=paths):
                        self._engine.forget(paths)
                        self._busy = True  # or an idle worker would not tell what its gauges are now
                    case protocol.Ping():
                        self._channel.send(protocol.Outputs([], self._engine.stats()))
                    case protocol.Shutdown():
                        return
                    case protocol.Configure():
                        raise ConfigError("Configure is only the first command.")
            if outputs:
                self._channel.send(protocol.Outputs(outputs))
            executed = self._step() if self._engine.has_unfinished() else False
            if not executed:
                self._rest()

    def _step(self) -> bool:
        self._busy = True
        if not self._clock_set:
            self._channel.send(protocol.StepStarted(True))
        outputs, executed = self._engine.step(time.monotonic())
        stats = self._due_stats(executed)
        self._clock_set = bool(outputs or stats)
        if self._clock_set:
            self._channel.send(protocol.Outputs(outputs, stats))  # the next step's heartbeat, too
        return executed

    def _rest(self) -> None:
        """Nothing can run: say so once, then sleep until something may have changed."""
        waiting = self._engine.has_unfinished()
        if not waiting:
            self._engine.poll(time.monotonic())  # what failed for nobody must not be told to the next who asks
        if self._busy and not waiting:
            self._busy = self._clock_set = False
            self._channel.send(protocol.StepStarted(False))
            self._channel.send(protocol.Outputs([], self._engine.stats()))
        self._channel.wake.wait(IDLE_WAIT if waiting else None)

    def _due_stats(self, executed: bool) -> protocol.StepStats | None:
        now = time.monotonic()
        if now < self._next_stats and executed:
            return None
        self._next_stats = now + STATS_INTERVAL
        return self._engine.stats()


def _serve(channel: Channel) -> None:
    config = channel.receive_configuration()
    logging.getLogger().setLevel(config.log_level.upper())
    config.validate()
    engine, layout = _build(channel, config)
    channel.send(protocol.Ready(layout))
    Loop(channel, engine).run()


def _build(channel: Channel, config: EngineConfig) -> tuple[Engine, EngineLayout]:
    channel.send(protocol.Progress("importing torch", 0.0))
    gc.disable()  # what an import makes lives for ever: looking through it again and again takes a second or two
    from punica_core.engine.build import build_engine  # imports torch: after the first sign of life
    from punica_core.model.loader import LOADING

    gc.freeze()
    gc.enable()
    built = build_engine(
        config,
        lambda what, fraction: channel.send(protocol.Progress(what, fraction)),
        channel.wake.set,
        on_shapes=lambda shapes: channel.send(protocol.Progress(LOADING, 0.0, shapes)),
    )
    gc.collect()
    gc.freeze()  # the model lives as long: no collection between two steps need look through it
    return built


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker on an inherited socket; returns the exit code."""
    parser = argparse.ArgumentParser(description="Punica's worker process; `punica serve` starts it.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket of the front end")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s worker %(levelname)s %(name)s: %(message)s")
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=args.fd))
    try:
        _serve(channel)
    except PunicaError as error:
        channel.send(protocol.Fatal(*to_wire(error)))
        return 1
    except Exception as error:
        logger.exception("the worker failed")
        channel.send(protocol.Fatal("internal_error", f"{type(error).__name__}: {error}"))
        return 1
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
