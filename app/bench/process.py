"""Processes that a benchmark starts and measures: what they cost in CPU time and memory (Linux)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

_TICKS = os.sysconf("SC_CLK_TCK")
CLOCK_TICK = 1 / _TICKS
"""Seconds: the least CPU time that a process is known to have taken."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A process and its children."""

    pid: int

    def pids(self) -> list[int]:
        """The process first, then its children, without those of the children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [self.pid, *(int(pid) for pid in children.split())]

    def cpu_seconds(self) -> float:
        """User and system time of all of them so far."""
        return sum(cpu_seconds(pid) for pid in self.pids())

    def resident_bytes(self) -> list[int]:
        """Resident set of each."""
        return [resident_bytes(pid) for pid in self.pids()]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_bytes(pid: int) -> int:
    """Resident set of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def free_port() -> int:
    """A TCP port on the loopback interface that is free right now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def python_server(
    arguments: Sequence[str], *, environment: dict[str, str], log: IO[bytes], ready_within: float
) -> Iterator[tuple[str, Tree]]:
    """`python ARGUMENTS --port PORT` until the block ends: its URL, once /ready answers 200, and its processes.

    Raises RuntimeError with the end of its output, which goes to `log`, if it ends or is not ready in time.
    """
    port = free_port()
    command = [sys.executable, *arguments, "--port", str(port)]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment)
    url = f"http://127.0.0.1:{port}"
    try:
        if not _is_ready(url, process, time.monotonic() + ready_within):
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-5:]
            raise RuntimeError("The server did not start: " + "\n".join(last))
        yield url, Tree(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str, process: subprocess.Popen[bytes], deadline: float) -> bool:
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5.0, trust_env=False).status_code == 200:
                return True
        time.sleep(0.1)
    return False
