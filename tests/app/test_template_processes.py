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

from app.chat_template import ChatTemplate
from app.template_child import Job
from app.template_processes import AdapterTemplate, TemplateProcesses
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
    assert slowest < SECONDS
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
    assert time.monotonic() - began < SECONDS / 2
    while not all(task.done() for task in waiting):
        await asyncio.sleep(0.05)
        most = max(most, len(set(children()) - others))
        assert threading.active_count() <= threads + 2  # what asyncio has to wait for processes
    statuses = [task.result().status_code for task in waiting]
    assert set(statuses) == {400, 429}
    assert statuses.count(429) >= 9, "they were told after they had waited as long as a template may take"
    assert most <= 2


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


async def test_templates_that_hang_in_both_processes_are_told_from_the_one_that_waits(
    processes: TemplateProcesses,
) -> None:
    good = AdapterTemplate(processes, GOOD, {})
    assert await good.render("good", MESSAGES) == "!hello"
    processes.seconds = SECONDS
    tasks = []
    for wait in (0.0, 0.4 * SECONDS, 0.0, 0.1):
        tasks.append(asyncio.create_task(AdapterTemplate(processes, LOOP, {}).render("bad", MESSAGES)))
        await asyncio.sleep(wait)
    with pytest.raises(QueueFull, match=r"'good'.*busy"):
        await good.render("good", MESSAGES)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [AdapterInvalid] * 4
    assert await good.render("good", MESSAGES) == "!hello"


@pytest.mark.parametrize(("template", "code"), [(LOOP, -signal.SIGALRM), (POWER, -signal.SIGALRM), (GOOD, 0)])
def test_a_process_without_a_server_ends_by_itself(template: str, code: int) -> None:
    job = Job(template, {}, SECONDS, MESSAGES)
    child = subprocess.run(
        [sys.executable, "-m", "app.template_child"], input=pickle.dumps(tuple(job)), capture_output=True, timeout=20
    )
    assert child.returncode == code
    assert (b"!hello" in child.stdout) is (code == 0)
