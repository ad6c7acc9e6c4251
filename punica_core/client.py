"""How a front end reaches an engine: `EngineClient` is the seam, `WorkerClient` the worker process behind a socket.

The seam is small so that it can be a worker process, an in-process fake in tests, or a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from punica_core import protocol
from punica_core.config import EngineConfig, EngineLayout
from punica_core.errors import ConfigError, PunicaError, WorkerLost, from_wire

log = logging.getLogger(__name__)


WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""Defaults for a worker's environment. OpenMP threads that spin at a barrier while another process (the front end,
say) has their core make a step three to five times as long; threads that sleep cost a tenth on an idle machine."""


EXIT_SECONDS = 2.0
"""How long a worker that closed its socket may take to exit before it is killed, and to be gone after that."""

STOP_SECONDS = 5.0
"""How long a worker that is stopped may take to read what it was sent and to exit before it is killed."""

SUBMIT_BYTES = protocol.MAX_FRAME_BYTES // 4
"""Bound on one Submit: a client may ask for many choices of a long prompt, and a frame has a limit."""

_ID_BYTES = 5
_SEQUENCE_BYTES = 32 * 1024
"""Most that a token id, and all but the token ids of a sequence, take in a frame."""


_BYTE_COUNTERS = (b"rchar", b"wchar", b"read_bytes")
"""Of /proc/PID/io: calls to read and write, and what was fetched from disks for files that are mapped."""


class EngineClient(Protocol):
    """One life of an engine: `start`, then submit and cancel, until `stop` or until it is lost.

    Handlers are called on the event loop, never re-entrantly from submit or cancel.
    """

    def set_handlers(self, on_event: Callable[[protocol.Event], None], on_lost: Callable[[PunicaError], None]) -> None:
        """on_event gets every event after Ready; on_lost is called once if the engine dies other than by `stop`."""

    async def start(self, config: EngineConfig, on_progress: Callable[[protocol.Progress], None]) -> EngineLayout:
        """Start the engine and wait until it takes commands. Raises ConfigError or WorkerLost."""

    def submit(self, sequences: Sequence[protocol.NewSequence]) -> None:
        """Hand over sequences in one message, in several only if they exceed what a message may hold."""

    def cancel(self, request_ids: Sequence[int]) -> None:
        """End these sequences; each still gets its terminal output."""

    def forget(self, paths: Sequence[str]) -> None:
        """No new sequence will use the adapters in these folders."""

    def ping(self) -> None:
        """Have the engine say something: an event follows."""

    def num_bytes(self) -> int | None:
        """Bytes that the engine has read and written so far, which tells whether it starts; None if nobody counts."""

    def kill(self) -> None:
        """End a stalled engine by force; `on_lost` follows."""

    async def stop(self) -> None:
        """Stop the engine and wait for its end. Idempotent; also after a loss."""


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The body of the next frame. Raises IncompleteReadError at EOF, ValueError for an oversized frame."""
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > protocol.MAX_FRAME_BYTES:
        raise ValueError(f"frame of {size} bytes; at most {protocol.MAX_FRAME_BYTES} are allowed")
    return await reader.readexactly(size)


class WorkerClient:
    """Runs `python -m punica_core.worker` on the other end of a socket pair.

    The pair has no name in the file system, and each side sees EOF the moment the other dies: a dead worker is
    noticed at once, and a worker whose front end is gone ends itself.
    """

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "punica_core.worker")) -> None:
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pump: asyncio.Task[None] | None = None
        self._stopping = False
        self._on_event: Callable[[protocol.Event], None] = lambda event: None
        self._on_lost: Callable[[PunicaError], None] = lambda error: None

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None before start."""
        return self._process.pid if self._process else None

    def set_handlers(self, on_event: Callable[[protocol.Event], None], on_lost: Callable[[PunicaError], None]) -> None:
        self._on_event, self._on_lost = on_event, on_lost

    async def start(self, config: EngineConfig, on_progress: Callable[[protocol.Progress], None]) -> EngineLayout:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env={**WORKER_ENVIRONMENT, **os.environ},
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._send(protocol.Configure(config))
        layout = await self._handshake(reader, on_progress)
        self._pump = asyncio.create_task(self._pump_events(reader), name="worker-events")
        return layout

    async def _handshake(
        self, reader: asyncio.StreamReader, on_progress: Callable[[protocol.Progress], None]
    ) -> EngineLayout:
        while True:
            try:
                event = protocol.decode_event(await read_frame(reader))
            except (asyncio.IncompleteReadError, ConnectionError):
                raise WorkerLost(f"The worker ended during start ({await self._exit_text()}); see its log.") from None
            except (msgspec.DecodeError, ValueError) as broken:
                raise WorkerLost(f"The worker's first messages could not be read: {broken}") from None
            match event:
                case protocol.Progress():
                    on_progress(event)
                case protocol.Ready(layout=layout, version=version):
                    if version != protocol.PROTOCOL_VERSION:
                        raise ConfigError(
                            f"The worker speaks protocol {version}, this front end {protocol.PROTOCOL_VERSION}: "
                            "they come from different installations."
                        )
                    return layout
                case protocol.Fatal(code=code, message=message):
                    raise from_wire(code, message)
                case _:
                    raise WorkerLost(f"The worker sent {type(event).__name__} before it was ready.")

    async def _pump_events(self, reader: asyncio.StreamReader) -> None:
        error: PunicaError | None = None
        try:
            while True:
                event = protocol.decode_event(await read_frame(reader))
                if isinstance(event, protocol.Fatal):
                    error = from_wire(event.code, event.message)
                self._on_event(event)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as broken:
            # A frame that cannot be read, or a handler's bug: nobody would get an answer, so this life is over.
            log.exception("Reading the worker's events failed.")
            error = WorkerLost(f"its events could not be read: {broken}")
            self.kill()
        if not self._stopping:
            detail = f": {error.message}" if error else ""
            ended = f"The worker process ended ({await self._exit_text()}){detail}"
            self._on_lost(WorkerLost(f"{ended.rstrip('.')}. Try again in a few seconds."))

    async def _exit_text(self) -> str:
        """How the process ended. One that does not end is killed; nobody waits for one that cannot die."""
        code = await self._exit_code()
        if code is None:
            self.kill()
            code = await self._exit_code()
        if code is None:
            return "it closed its socket and cannot be killed"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    async def _exit_code(self) -> int | None:
        """The exit code; None if the process goes on for EXIT_SECONDS, or was never started."""
        if self._process is None:
            return None
        try:
            return await asyncio.wait_for(self._process.wait(), EXIT_SECONDS)
        except TimeoutError:
            return None

    def _send(self, command: protocol.Command) -> None:
        if self._writer is None or self._writer.is_closing():
            return  # the worker is gone: on_lost has ended, or will end, every sequence
        self._writer.write(protocol.encode(command))

    def submit(self, sequences: Sequence[protocol.NewSequence]) -> None:
        for part in _parts(sequences):
            self._send(protocol.Submit(part))

    def cancel(self, request_ids: Sequence[int]) -> None:
        self._send(protocol.Cancel(list(request_ids)))

    def forget(self, paths: Sequence[str]) -> None:
        self._send(protocol.Forget(list(paths)))

    def ping(self) -> None:
        self._send(protocol.Ping())

    def num_bytes(self) -> int | None:
        if self._process is None:
            return None
        try:  # the kernel's own table: no look at a disk
            lines = Path(f"/proc/{self._process.pid}/io").read_bytes().splitlines()
        except OSError:
            return None  # not Linux, or it has ended
        counters = dict(line.split(b": ") for line in lines)
        return sum(int(counters.get(name, 0)) for name in _BYTE_COUNTERS)

    async def stop(self) -> None:
        self._stopping = True
        self._send(protocol.Shutdown())
        if self._writer is not None:
            self._writer.close()  # once all is sent, which a worker that hangs may never let happen
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
            except TimeoutError:
                self.kill()
                await self._exit_code()
        if self._pump is not None:
            await asyncio.gather(self._pump, return_exceptions=True)

    def kill(self) -> None:
        """Kill the worker process now (a stalled worker cannot be asked); `on_lost` follows.

        It follows also if a hung driver keeps the process alive, since our end of the socket is closed.
        """
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, 9)
        if self._writer is not None:
            self._writer.transport.abort()


def _parts(sequences: Sequence[protocol.NewSequence]) -> Iterator[list[protocol.NewSequence]]:
    """The sequences in order, cut where a message would exceed SUBMIT_BYTES."""
    part: list[protocol.NewSequence] = []
    size = 0
    for sequence in sequences:
        nbytes = len(sequence.prompt_ids) * _ID_BYTES + _SEQUENCE_BYTES
        if part and size + nbytes > SUBMIT_BYTES:
            yield part
            part, size = [], 0
        part.append(sequence)
        size += nbytes
    if part:
        yield part
