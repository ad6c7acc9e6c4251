"""Chat templates of adapters, rendered by processes that are killed when a template does not end."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from app.template_child import Answer, Job
from punica_core.errors import AdapterInvalid, ConfigError, PunicaError, QueueFull, from_wire

RENDER_SECONDS = 5.0
"""How long a template may take for a request, and how long a request waits for those before it."""
_NUM_PROCESSES = 2
_COMMAND = (sys.executable, "-m", "app.template_child")


class TemplateProcesses:
    """Two processes, started when they are needed. seconds: see RENDER_SECONDS."""

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        self.seconds = seconds
        self.places = asyncio.Semaphore(_NUM_PROCESSES)
        self._idle: list[asyncio.subprocess.Process] = []

    async def answer(self, job: Job) -> Answer | None:
        """None if the process did not answer in time, or died of the job; it is gone then. For holders of a place."""
        idle = self._idle.pop() if self._idle else None
        process = idle if idle is not None and idle.returncode is None else await self._start()
        try:
            async with asyncio.timeout(self.seconds):
                answer = await _exchange(process, job)
        except (TimeoutError, OSError, EOFError):
            await _end(process)
            return None
        except BaseException:
            await _end(process)
            raise
        self._idle.append(process)
        return answer

    async def stop(self) -> None:
        """End the processes; nothing is rendered any more."""
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        # in a session of its own: signals of the terminal are the server's
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*_COMMAND, stdin=pipe, stdout=pipe, start_new_session=True)


class AdapterTemplate:
    """A template that an adapter brings. One process at most works for it: others have the second one.

    special_tokens: as the template may use them.
    """

    def __init__(self, processes: TemplateProcesses, source: str, special_tokens: Mapping[str, str]) -> None:
        self._processes = processes
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._turn = asyncio.Lock()
        self._is_sound = False

    async def check(self) -> None:
        """Compile it, until that has been done once. Raises AdapterInvalid if it is broken, QueueFull."""
        if self._is_sound:
            return
        try:
            await self._answer(None, {})
        except ConfigError as error:
            raise AdapterInvalid(error.message) from None
        self._is_sound = True

    async def render(self, name: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """What `ChatTemplate.render` gives. name: of the adapter.

        Raises InvalidRequest when the template refuses the messages, AdapterInvalid when it takes too long,
        QueueFull when those before it do.
        """
        try:
            return await self._answer(list(messages), options)
        except (AdapterInvalid, QueueFull) as error:
            raise type(error)(f"Adapter {name!r}: {error.message}", param="model") from None

    async def _answer(self, messages: list[Any] | None, options: dict[str, Any]) -> str:
        seconds = self._processes.seconds
        job = Job(self._source, self._special_tokens, seconds, messages, options)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(seconds):
                    await stack.enter_async_context(self._turn)
                    await stack.enter_async_context(self._processes.places)
            except TimeoutError:
                raise QueueFull("Its chat template, or another's, is busy with other requests. Try later.") from None
            answer = await self._processes.answer(job)
        if answer is None:
            raise AdapterInvalid(f"Its chat template did not end within {seconds:g} seconds, or took too much memory.")
        if answer.code:
            error: PunicaError = from_wire(answer.code, answer.message)
            error.param = answer.param
            raise error
        return answer.text


async def _exchange(process: asyncio.subprocess.Process, job: Job) -> Answer:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(pickle.dumps(tuple(job)))
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(8), "big")
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Answer)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
