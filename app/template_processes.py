"""Chat templates of adapters, rendered by processes that are killed when a template does not end.

A template that takes long holds up its own adapter's requests and no others: after QUICK_SECONDS it leaves the places
that all share for one of those for slow templates. There the one that has been there longest makes room, by being
killed; and a template that was slow last time begins there.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from app.template_child import Answer, Job
from punica_core.errors import AdapterInvalid, ConfigError, PunicaError, QueueFull, from_wire

RENDER_SECONDS = 5.0
"""How long a template may take for a request, and how long a request waits for those before it."""
QUICK_SECONDS = 0.25
"""How long a template may take in a place that others wait for."""
_START_SECONDS = 30.0
_NUM_QUICK = 2
_NUM_SLOW = 2
_MADE_ROOM = "Its chat template takes long, and others wait. Try later."
_COMMAND = (sys.executable, "-m", "app.template_child")


class _Run:
    """A job on its way through the lanes. process: that works for it. is_slow: None until that is known."""

    process: asyncio.subprocess.Process | None = None
    is_slow: bool | None = None
    had_to_leave = False


class _Lane:
    """Places for `size` runs, which get one in the order in which they asked."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._runs: list[_Run] = []
        self._waiting: deque[tuple[_Run, asyncio.Future[None]]] = deque()

    def __contains__(self, run: _Run) -> bool:
        return run in self._runs

    async def enter(self, run: _Run) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((run, turn))
        self._admit()
        try:
            await turn
        except BaseException:
            self.leave(run)
            raise

    def push_in(self, run: _Run) -> _Run | None:
        """Let it in at once; who has been here longest makes room and is returned."""
        leaving = self._runs.pop(0) if len(self._runs) >= self._size else None
        self._runs.append(run)
        return leaving

    def leave(self, run: _Run) -> None:
        """Idempotent."""
        if run in self._runs:
            self._runs.remove(run)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._runs) < self._size:
            run, turn = self._waiting.popleft()
            if not turn.done():  # who does not wait any more has cancelled it
                self._runs.append(run)
                turn.set_result(None)


class TemplateProcesses:
    """Two processes and two for slow templates, started when they are needed.

    seconds: see RENDER_SECONDS. quick_seconds: see QUICK_SECONDS.
    """

    def __init__(self, seconds: float = RENDER_SECONDS, quick_seconds: float = QUICK_SECONDS) -> None:
        self.seconds = seconds
        self.quick_seconds = quick_seconds
        self._quick = _Lane(_NUM_QUICK)
        self._slow = _Lane(_NUM_SLOW)
        self._idle: list[asyncio.subprocess.Process] = []
        self._spare: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._ending: set[asyncio.Task[tuple[bytes, bytes]]] = set()

    @contextlib.asynccontextmanager
    async def place(self, is_slow: bool) -> AsyncIterator[_Run]:
        """A place in one of the lanes, once there is one."""
        run = _Run()
        await (self._slow if is_slow else self._quick).enter(run)
        try:
            yield run
        finally:
            self._quick.leave(run)
            self._slow.leave(run)

    async def answer(self, job: Job, run: _Run) -> Answer | None:
        """None if the process did not answer in time, or died of the job; it is gone then. For holders of a place.

        Raises QueueFull if it was slow and had to make room.
        """
        process = run.process = await (self._start() if run in self._slow else self._take())
        if run.had_to_leave:
            self._end(process)
            raise QueueFull(_MADE_ROOM)
        began = asyncio.get_running_loop().time()
        exchange = asyncio.create_task(_exchange(process, job), name="template")
        try:
            await asyncio.wait({exchange}, timeout=self.quick_seconds)
            run.is_slow = True if not exchange.done() else None
            if run.is_slow:
                self._slow_down(run)
            async with asyncio.timeout_at(began + self.seconds):
                answer = await exchange
        except (TimeoutError, OSError, EOFError):
            run.is_slow = True
            self._end(process)
            if run.had_to_leave:
                raise QueueFull(_MADE_ROOM) from None
            return None
        except BaseException:
            exchange.cancel()
            self._end(process)
            raise
        run.is_slow = bool(run.is_slow)
        if run.had_to_leave or len(self._idle) >= _NUM_QUICK:
            self._end(process)
        else:
            self._idle.append(process)
        return answer

    async def stop(self) -> None:
        """End the processes; nothing is rendered any more."""
        while self._idle:
            self._end(self._idle.pop())
        if self._spare is not None:
            self._spare.cancel()
            (spare,) = await asyncio.gather(self._spare, return_exceptions=True)
            if isinstance(spare, asyncio.subprocess.Process):
                self._end(spare)
        await asyncio.gather(*self._ending)

    def _end(self, process: asyncio.subprocess.Process) -> None:
        """Nobody waits for that but `stop`."""
        _kill(process)
        # asyncio sees the end only when all that the process has written has been read
        task = asyncio.get_running_loop().create_task(process.communicate(), name="template-end")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _slow_down(self, run: _Run) -> None:
        """Its place in the quick lane, if it has one, is for others now, and so is a process that is ready."""
        if run in self._quick:
            leaving = self._slow.push_in(run)
            self._quick.leave(run)
            if leaving is not None:
                leaving.had_to_leave = True
                if leaving.process is not None:
                    _kill(leaving.process)
        if not self._idle and self._spare is None:
            self._spare = asyncio.create_task(self._start(), name="template-spare")
            self._spare.add_done_callback(self._forget_failed)

    def _forget_failed(self, spare: asyncio.Task[asyncio.subprocess.Process]) -> None:
        """A spare process that did not start is no later request's fault."""
        if (spare.cancelled() or spare.exception() is not None) and spare is self._spare:
            self._spare = None

    async def _take(self) -> asyncio.subprocess.Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        spare, self._spare = self._spare, None
        process = await (spare if spare is not None else self._start())
        return process if process.returncode is None else await self._start()

    async def _start(self) -> asyncio.subprocess.Process:
        """A process that waits for jobs. Raises QueueFull if that takes too long: the machine is busy."""
        # in a session of its own: signals of the terminal are the server's
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*_COMMAND, stdin=pipe, stdout=pipe, start_new_session=True)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_SECONDS):
                await process.stdout.readexactly(1)
        except (TimeoutError, EOFError):
            self._end(process)
            raise QueueFull("The process that renders chat templates did not start in time. Try later.") from None
        except BaseException:
            self._end(process)
            raise
        return process


class AdapterTemplate:
    """A template that an adapter brings. One process at most works for it.

    special_tokens: as the template may use them.
    """

    def __init__(self, processes: TemplateProcesses, source: str, special_tokens: Mapping[str, str]) -> None:
        self._processes = processes
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._turn = asyncio.Lock()
        self._is_sound = False
        self._is_slow = False

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
                    run = await stack.enter_async_context(self._processes.place(self._is_slow))
            except TimeoutError:
                raise QueueFull("Its chat template is busy with other requests. Try later.") from None
            try:
                answer = await self._processes.answer(job, run)
            finally:
                if run.is_slow is not None:  # it is where its client left
                    self._is_slow = run.is_slow
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


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
