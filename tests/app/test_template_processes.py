"""Templates of adapters that do not end, and those that do, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app import template_processes
from app.chat_template import ChatTemplate
from app.template_child import Job
from app.template_processes import AdapterTemplate, TemplateProcesses, _Lane, _Run
from punica_core.errors import AdapterInvalid, InvalidRequest, QueueFull
from tests.app.conftest import BASE, MakeServer, Server
from tests.app.test_extensions import prompt_of

SECONDS = 0.7
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
POWER = "{{ (messages | length + 8) ** (9 ** 9) }}"  # one operation, which does not release the GIL
CONSTANT = "{{ 9 ** (9 ** 9) }}"  # computed when the template is compiled
GOOD = "{% for m in messages %}!{{ m['content'] }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def server(make_server: MakeServer) -> AsyncIterator[Server]:
    async with make_server(settings={"adapter_chat_templates": True}) as server:
        yield server


@pytest.fixture
async def processes() -> AsyncIterator[TemplateProcesses]:
    processes = TemplateProcesses()
    yield processes
    await processes.stop()


def limit(server: Server) -> None:
    assert server.service._templates is not None
    server.service._templates._processes.seconds = SECONDS


def write(adapters: Path, name: str, template: str) -> None:
    (adapters / name / "chat_template.jinja").write_text(template)


def children() -> list[int]:
    process = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.parametrize("template", [LOOP, POWER, CONSTANT, GOOD], ids=["loop", "power", "constant", "good"])
async def test_a_template_that_does_not_end_is_its_requests_fault_alone(
    server: Server, adapters_dir: Path, template: str
) -> None:
    write(adapters_dir, "sql", template)
    write(adapters_dir, "pirate", GOOD)
    assert (await server.chat(model="pirate")).status_code == 200
    limit(server)
    waiting = asyncio.create_task(server.chat(model="sql"))
    slowest = 0.0
    for model in (BASE, "pirate", BASE, "pirate"):
        await asyncio.sleep(0.05)
        began = time.monotonic()
        assert (await server.chat(model=model)).status_code == 200
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 2 * SECONDS
    answer = await waiting
    if template is GOOD:
        assert answer.status_code == 200
        return
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_invalid")
    assert "Adapter 'sql': Its chat template did not end within 0.7 seconds" in answer.json()["error"]["message"]
    write(adapters_dir, "sql", GOOD)
    assert (await server.chat(model="sql")).status_code == 200
    assert prompt_of(server) == "!hello"


@pytest.mark.parametrize("template", [LOOP, CONSTANT], ids=["loop", "constant"])
async def test_requests_for_such_a_template_do_not_pile_up(server: Server, adapters_dir: Path, template: str) -> None:
    write(adapters_dir, "pirate", GOOD)
    await server.chat(model="pirate")
    write(adapters_dir, "sql", template)
    limit(server)
    others, threads = set(children()), threading.active_count()
    waiting = [asyncio.create_task(server.chat(model="sql")) for _ in range(12)]
    most = 0
    await asyncio.sleep(0.1)
    began = time.monotonic()
    assert (await server.chat(model="pirate")).status_code == 200, "one process is left for others"
    assert time.monotonic() - began < 2 * SECONDS  # a process has to start
    while not all(task.done() for task in waiting):
        await asyncio.sleep(0.05)
        most = max(most, len(set(children()) - others))
        assert threading.active_count() <= threads + 2  # what asyncio has to wait for processes
    statuses = [task.result().status_code for task in waiting]
    assert set(statuses) == {400, 429}
    assert statuses.count(429) >= 9, "they were told after they had waited as long as a template may take"
    assert most <= 4  # one that runs, one that begins, a spare one, one that is being ended


async def test_requests_for_a_template_that_ends_all_have_their_turn(server: Server, adapters_dir: Path) -> None:
    write(adapters_dir, "sql", GOOD)
    answers = await asyncio.gather(*(server.chat(model="sql") for _ in range(30)))
    assert {answer.status_code for answer in answers} == {200}


async def test_processes_are_used_again_and_end_with_the_server(make_server: MakeServer, adapters_dir: Path) -> None:
    write(adapters_dir, "sql", GOOD)
    before = set(children())
    async with make_server(settings={"adapter_chat_templates": True}) as server:
        assert set(children()) == before
        await server.chat(model="sql")
        (process,) = set(children()) - before
        for _ in range(3):
            await server.chat(model="sql")
        assert set(children()) - before == {process}
        os.kill(process, signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert (await server.chat(model="sql")).status_code == 200
        assert len(set(children()) - before - {process}) == 1
    assert set(children()) == before


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (GOOD, MESSAGES, {}),
        ("{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}", MESSAGES, {}),
        ("{{ messages[0].content }}>", MESSAGES, {"continue_final_message": True}),
        ("{{ x.y | tojson }}", MESSAGES, {"variables": {"x": {"y": [1, None, 2.5, 10**40, "é"]}}}),
        ("{{ messages[0].content }}", [{"role": "user", "content": "\U0001f600 ü", "name": None}], {}),
        ("{{ raise_exception('no ' ~ messages[0].role) }}", MESSAGES, {}),
        ("{{ messages[0].content + 1 }}", MESSAGES, {}),
        ("{{ messages[0].content * 20000000 }}", MESSAGES, {}),
    ],
)
async def test_what_comes_of_a_template_is_what_it_gives_here(
    processes: TemplateProcesses, template: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    special = {"bos_token": "<s>"}
    want: str | tuple[str, str | None]
    got: str | tuple[str, str | None]
    try:
        want = ChatTemplate(template, special).render(messages, **options)
    except InvalidRequest as error:
        want = error.message, error.param
    try:
        got = await AdapterTemplate(processes, template, special).render("sql", messages, **options)
    except InvalidRequest as error:
        got = error.message, error.param
    assert got == want


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% set x = 'a' * (messages | length * 10 ** 11) %}", "MemoryError"),
        ('{{ "\\ud800" }}', "UnicodeEncodeError"),
    ],
)
async def test_what_only_a_hostile_template_does_is_told(
    processes: TemplateProcesses, template: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        await AdapterTemplate(processes, template, {}).render("sql", MESSAGES)
    assert await AdapterTemplate(processes, GOOD, {}).render("sql", MESSAGES) == "!hello"


@pytest.mark.parametrize("num_hanging", [2, 5])
@pytest.mark.parametrize("quick_seconds", [0.2, 60.0], ids=["slow ones leave", "slow ones stay"])
async def test_templates_that_hang_hold_up_no_other(
    processes: TemplateProcesses, num_hanging: int, quick_seconds: float
) -> None:
    """With clients that try again and again. In the negative control a hanging template keeps its place."""
    good = AdapterTemplate(processes, GOOD, {})
    assert await good.render("good", MESSAGES) == "!hello"
    processes.quick_seconds, processes.seconds = quick_seconds, 60.0
    made_room, before = 0, len(children())

    async def insist(template: AdapterTemplate) -> None:
        nonlocal made_room
        while True:
            with pytest.raises(QueueFull):
                await template.render("bad", MESSAGES)
            made_room += 1

    hanging = [AdapterTemplate(processes, LOOP, {}) for _ in range(num_hanging)]
    tasks = [asyncio.create_task(insist(template)) for template in hanging for _ in range(2)]
    await asyncio.sleep(0.1)
    if quick_seconds == 60.0:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(good.render("good", MESSAGES), 3.0)
    else:
        for _ in range(10):
            assert await asyncio.wait_for(good.render("good", MESSAGES), 20.0) == "!hello"
            assert len(children()) - before <= 2 + 2 + 1
        async with asyncio.timeout(20.0):
            while made_room < num_hanging - 2:
                await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_template_that_is_slow_is_served_and_may_become_quick_again(processes: TemplateProcesses) -> None:
    rounds = "{{ messages[0].content }}{% for a in range(messages[1].content) %}{% for b in range(99999) %}"
    slow = AdapterTemplate(processes, rounds + "{% endfor %}{% endfor %}", {})

    async def render(count: int) -> str:
        return await slow.render("slow", [*MESSAGES, {"role": "user", "content": count}])

    await slow.check()
    processes.quick_seconds = 0.05
    for _ in range(2):
        assert await render(50) == "hello"
        assert slow._is_slow
    processes.quick_seconds = 1.0
    assert await render(0) == "hello"
    assert not slow._is_slow


async def test_the_slow_template_that_has_run_longest_makes_room(processes: TemplateProcesses) -> None:
    processes.quick_seconds, processes.seconds = 0.1, 5.0
    tasks = []
    for _ in range(3):
        tasks.append(asyncio.create_task(AdapterTemplate(processes, LOOP, {}).render("bad", MESSAGES)))
        await asyncio.sleep(1.0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [QueueFull, AdapterInvalid, AdapterInvalid]
    assert "'bad': Its chat template takes long, and others wait" in str(results[0])


async def test_a_client_that_leaves_does_not_make_a_template_slow(processes: TemplateProcesses) -> None:
    processes.quick_seconds = 0.5
    template = AdapterTemplate(processes, LOOP, {})
    assert await AdapterTemplate(processes, GOOD, {}).render("good", MESSAGES) == "!hello"
    for patience, is_slow in ((0.1, False), (1.5, True), (0.1, True)):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(patience):
                await template.render("bad", MESSAGES)
        assert template._is_slow is is_slow
    assert await AdapterTemplate(processes, GOOD, {}).render("good", MESSAGES) == "!hello"


async def test_a_spare_process_that_does_not_start_fails_no_later_request(
    processes: TemplateProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await AdapterTemplate(processes, GOOD, {}).render("good", MESSAGES) == "!hello"
    processes.quick_seconds, processes.seconds = 0.1, 1.0
    failed = 0

    async def fails() -> asyncio.subprocess.Process:
        nonlocal failed
        failed += 1
        raise QueueFull("the machine is busy")

    with monkeypatch.context() as patch:
        patch.setattr(processes, "_start", fails)
        with pytest.raises(AdapterInvalid):
            await AdapterTemplate(processes, LOOP, {}).render("bad", MESSAGES)
    assert failed == 1
    assert await AdapterTemplate(processes, GOOD, {}).render("good", MESSAGES) == "!hello"


@pytest.mark.parametrize("nbytes", [1, 5 << 20])
async def test_processes_end_even_if_nobody_has_read_what_they_wrote(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a client leaves while a long answer comes: asyncio reads no more than it has room for."""
    program = f"import sys; sys.stdout.buffer.write(b'!' + bytes({nbytes})); sys.stdout.flush(); sys.stdin.read()"
    monkeypatch.setattr(template_processes, "_COMMAND", (sys.executable, "-c", program))
    processes, before = TemplateProcesses(), children()
    process = await processes._start()
    assert process.stdout is not None
    async with asyncio.timeout(10.0):
        while nbytes > 1 and not process.stdout._paused:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
    processes._end(process)
    await asyncio.wait_for(processes.stop(), 5.0)
    assert children() == before


async def test_places_are_given_in_turn_and_come_back() -> None:
    lane, runs, order = _Lane(2), [_Run() for _ in range(5)], list[int]()

    async def enter(number: int) -> None:
        await lane.enter(runs[number])
        order.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(5)]
    await asyncio.sleep(0.01)
    assert order == [0, 1]
    tasks[2].cancel()
    lane.leave(runs[0])
    lane.leave(runs[0])
    await asyncio.sleep(0.01)
    assert order == [0, 1, 3]
    pushed = _Run()
    assert lane.push_in(pushed) is runs[1]
    lane.leave(runs[1])  # which has no place any more
    await asyncio.sleep(0.01)
    assert order == [0, 1, 3]
    lane.leave(runs[3])
    tasks[4].cancel()  # when it has just been given a place
    await asyncio.sleep(0.01)
    assert runs[4] not in lane
    await asyncio.wait_for(lane.enter(_Run()), 1.0)


@pytest.mark.parametrize(("template", "code"), [(LOOP, -signal.SIGALRM), (POWER, -signal.SIGALRM), (GOOD, 0)])
def test_a_process_without_a_server_ends_by_itself(template: str, code: int) -> None:
    job = Job(template, {}, SECONDS, MESSAGES)
    child = subprocess.run(
        [sys.executable, "-m", "app.template_child"], input=pickle.dumps(tuple(job)), capture_output=True, timeout=20
    )
    assert child.returncode == code
    assert (b"!hello" in child.stdout) is (code == 0)
