"""A real `punica serve` process, as a user would start it."""

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

import httpx


def free_port() -> int:
    """A TCP port on the loopback interface that is free right now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class LiveServer:
    """A running server: where it answers, its process, and the file its output goes to."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def worker_pids(self) -> list[int]:
        """Process ids of the server's children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def metric(self, name: str, label: str = "") -> float:
        """Sum over the labels of one Prometheus sample name; over those with `label`, such as 'reason="no_seats"'."""
        text = httpx.get(f"{self.url}/metrics").raise_for_status().text
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        assert lines or label, f"no metric {name} in:\n{text}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)


@contextlib.contextmanager
def serve(
    log: Path, *flags: str, ready_within: float = 180.0, module: Sequence[str] = ("app.cli",)
) -> Iterator[LiveServer]:
    """Start `punica serve` on a free port, wait until it is ready, and terminate it at the end.

    module: what stands for the `punica` command, and its first arguments.
    """
    port = free_port()
    command = [sys.executable, "-m", *module, "serve", "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "NO_COLOR": "1"})
    server = LiveServer(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_ready(server, ready_within)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(server: LiveServer, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"the server exited with {server.process.returncode}:\n{server.log.read_text()}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/ready", timeout=2.0).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"not ready after {seconds} s:\n{server.log.read_text()}")
