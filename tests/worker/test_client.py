"""The client's side of the socket: what it sends, and what it makes of a worker that speaks nonsense."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from punica_core import client, protocol
from punica_core.client import WorkerClient
from punica_core.config import EngineConfig, EngineLayout
from punica_core.errors import PunicaError, WorkerLost


class Frames:
    """Stands in for the socket's writer and keeps what is written."""

    def __init__(self) -> None:
        self.submits: list[list[int]] = []

    def is_closing(self) -> bool:
        return False

    def write(self, frame: bytes) -> None:
        command = protocol.decode_command(frame[4:])
        assert isinstance(command, protocol.Submit)
        self.submits.append([sequence.request_id for sequence in command.sequences])


def sequences(count: int, length: int) -> list[protocol.NewSequence]:
    sampling = protocol.SamplingParams(max_tokens=1)
    return [protocol.NewSequence(request_id=i, prompt_ids=[1] * length, sampling=sampling) for i in range(count)]


@pytest.fixture
def frames() -> Frames:
    return Frames()


@pytest.fixture
def sender(frames: Frames) -> WorkerClient:
    made = WorkerClient()
    made._writer = frames  # type: ignore[assignment]
    return made


def test_sequences_leave_in_one_message(sender: WorkerClient, frames: Frames) -> None:
    sender.submit(sequences(64, 1000))
    assert frames.submits == [list(range(64))]


def test_sequences_beyond_the_bound_of_a_message_leave_in_several(
    sender: WorkerClient, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SUBMIT_BYTES", 200_000)
    sender.submit(sequences(5, 10_000))
    assert frames.submits == [[0, 1], [2, 3], [4]]


def test_the_largest_message_fits_a_frame() -> None:
    sampling = protocol.SamplingParams(
        max_tokens=1, logit_bias={2**31 - i: -0.1 for i in range(1024)}, stop_token_ids=tuple([2**31 - 1] * 128)
    )
    largest = protocol.NewSequence(request_id=2**40, prompt_ids=[2**31 - 1] * 1000, sampling=sampling, tenant="t" * 512)
    bound = 1000 * client._ID_BYTES + client._SEQUENCE_BYTES
    assert len(protocol.encode(protocol.Submit([largest]))) < bound
    assert client.SUBMIT_BYTES + bound < protocol.MAX_FRAME_BYTES


@pytest.mark.parametrize("said", ["02000000c1c1", "ffffffff"], ids=["no message", "an oversized frame"])
async def test_nonsense_during_the_start_is_a_lost_worker(said: str) -> None:
    program = (
        "import socket, sys; connection = socket.socket(fileno=int(sys.argv[2])); "
        f"connection.sendall(bytes.fromhex({said!r})); connection.recv(1 << 16); connection.recv(1)"
    )
    starting = WorkerClient((sys.executable, "-c", program))
    with pytest.raises(WorkerLost, match="could not be read"):
        await starting.start(EngineConfig(model="m"), lambda progress: None)
    await starting.stop()


LAYOUT = EngineLayout(
    model_dir="m",
    architecture="a",
    device="cpu",
    dtype="float32",
    vocab_size=1,
    eos_token_ids=(),
    max_model_len=1,
    num_blocks=1,
)


async def test_a_killed_worker_that_does_not_die_is_lost_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = protocol.encode(protocol.Ready(LAYOUT))
    program = (
        "import socket, sys, time; connection = socket.socket(fileno=int(sys.argv[2])); "
        f"connection.sendall(bytes.fromhex({ready.hex()!r})); time.sleep(60)"
    )
    losses: list[PunicaError] = []
    immortal = WorkerClient((sys.executable, "-c", program))
    immortal.set_handlers(lambda event: None, losses.append)
    await immortal.start(EngineConfig(model="m"), lambda progress: None)
    really_kill = os.kill
    monkeypatch.setattr(client, "EXIT_SECONDS", 0.05)
    monkeypatch.setattr(client.os, "kill", lambda pid, number: None)
    immortal.kill()
    async with asyncio.timeout(5):
        while not losses:
            await asyncio.sleep(0.01)
    assert isinstance(losses[0], WorkerLost)
    assert "cannot be killed" in losses[0].message
    monkeypatch.undo()
    assert immortal.pid is not None
    really_kill(immortal.pid, 9)
    await immortal.stop()


async def test_a_worker_that_reads_nothing_any_more_holds_up_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = protocol.encode(protocol.Ready(LAYOUT))
    program = (
        "import socket, sys, time; connection = socket.socket(fileno=int(sys.argv[2])); "
        f"connection.sendall(bytes.fromhex({ready.hex()!r})); time.sleep(60)"
    )
    monkeypatch.setattr(client, "STOP_SECONDS", 0.2)
    deaf = WorkerClient((sys.executable, "-c", program))
    await deaf.start(EngineConfig(model="m"), lambda progress: None)
    deaf.submit(sequences(500, 2000))  # more than a socket holds
    async with asyncio.timeout(5):
        await deaf.stop()
        await deaf.stop()  # idempotent
    assert deaf.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(deaf.pid, 0)
