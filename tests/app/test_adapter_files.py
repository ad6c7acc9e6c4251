"""File systems that do not answer: what a request waits for, and what goes on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.adapter_files import HOT_SECONDS
from app.adapter_templates import AdapterTemplates
from app.file_threads import FileThreads, on_daemon_thread
from app.mounts import MOUNTS_SECONDS, LocalFolders
from tests.app.conftest import BASE, MakeServer, Server

SECONDS = 0.3


class Mount:
    """What os.lstat, os.stat and os.scandir see below a folder; while it is dead, nothing returns."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = str(folder)
        self._answers = threading.Event()
        self._answers.set()
        self.held: list[int] = []
        for name in ("lstat", "stat", "scandir"):
            monkeypatch.setattr(os, name, self._held(getattr(os, name)))

    def _held(self, call: Any) -> Any:
        def held(path: Any, *arguments: Any, **options: Any) -> Any:
            if str(path).startswith(self._folder) and not self._answers.is_set():
                self.held.append(threading.get_ident())
                self._answers.wait(30)
            return call(path, *arguments, **options)

        return held

    def die(self) -> None:
        self._answers.clear()

    def revive(self) -> None:
        self._answers.set()


@pytest.fixture
def mount(adapters_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    monkeypatch.setattr(LocalFolders, "are_local", lambda self: False)
    mount = Mount(adapters_dir, monkeypatch)
    yield mount
    mount.revive()


@pytest.fixture
async def remote(make_server: MakeServer, mount: Mount) -> AsyncIterator[Server]:
    """A server whose adapters lie on that mount."""
    settings = {"enable_admin": True, "adapter_chat_templates": True}
    async with make_server(settings=settings) as server:
        server.service.adapter_files._threads._seconds = SECONDS
        yield server
        mount.revive()


async def revived(server: Server, mount: Mount) -> None:
    mount.revive()
    async with asyncio.timeout(10):
        while server.service.adapter_files._threads._keys:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("dies", [True, False])
async def test_a_dead_mount_holds_up_nobody_but_those_who_need_it(remote: Server, mount: Mount, dies: bool) -> None:
    patience = remote.service.adapter_files._threads._seconds = 1.5
    assert (await remote.chat(model="sql")).status_code == 200
    if dies:
        mount.die()
    before = threading.active_count()
    waiting = asyncio.create_task(remote.chat(model="pirate"))
    while dies and not mount.held:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    assert (await remote.chat(model=BASE)).status_code == 200
    assert (await remote.http.get("/health")).status_code == 200
    assert time.monotonic() - began < patience
    answers = [await waiting, *(await asyncio.gather(*(remote.chat(model="pirate") for _ in range(20))))]
    assert {answer.status_code for answer in answers} == ({503} if dies else {200})
    if dies:
        error = answers[0].json()["error"]
        assert "'pirate'" in error["message"]
        assert "adapters' directory does not answer" in error["message"]
        assert error["code"] == "adapter_load_timeout"
        assert answers[0].headers["retry-after"]
    assert threading.active_count() <= before + 1  # one more if the first had not come to rest yet
    assert len(set(mount.held)) == dies
    assert threading.get_ident() not in mount.held
    assert (await remote.chat(model="sql")).status_code == 200


async def test_when_a_mount_comes_back_files_are_looked_at_again(
    remote: Server, mount: Mount, adapters_dir: Path
) -> None:
    await remote.chat(model="sql")
    mount.die()
    (adapters_dir / "sql" / "adapter_model.safetensors").write_bytes(b"other weights")
    assert (await remote.chat(model="sql")).status_code == 200
    assert (await remote.chat(model="pirate")).status_code == 503
    await revived(remote, mount)
    assert (await remote.chat(model="pirate")).status_code == 200
    assert (await remote.chat(model="sql")).status_code == 200
    signatures = [message[0].adapter.weights_signature for message in remote.engine.submissions if message[0].adapter]
    old, still_old, _, new = signatures
    assert old == still_old != new


async def test_what_was_listed_is_told_while_a_mount_is_dead(remote: Server, mount: Mount) -> None:
    remote.service.registry._listing._listing = None
    listed = (await remote.http.get("/metrics")).status_code
    mount.die()
    remote.service.registry._listing._clock = lambda: time.monotonic() + 3600.0
    assert await remote.service.all_names() == [BASE, "pirate", "sql"]
    assert (listed, (await remote.http.get("/metrics")).status_code) == (200, 200)
    assert mount.held


async def test_a_directory_that_was_never_listed_is_told_as_such(make_server: MakeServer, mount: Mount) -> None:
    async with make_server() as server:
        server.service.adapter_files._threads._seconds = SECONDS
        await asyncio.sleep(0.1)
        server.service.registry._listing._listing = None
        mount.die()
        models = await server.http.get("/v1/models")
        assert (models.status_code, models.json()["error"]["code"]) == (503, "adapter_load_timeout")
        assert (await server.http.get("/metrics")).status_code == 200
        await revived(server, mount)
        assert len((await server.http.get("/v1/models")).json()["data"]) == 3


@pytest.mark.parametrize("route", ["load", "unload"])
async def test_an_administrator_is_told_and_nothing_happens_later(remote: Server, mount: Mount, route: str) -> None:
    body = {"lora_name": "sql" if route == "unload" else "new", "lora_path": "sql"}
    body = body if route == "load" else {"lora_name": "sql"}
    mount.die()
    answer = await remote.http.post(f"/v1/{route}_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_load_timeout")
    await revived(remote, mount)
    remote.service.registry._listing._listing = None
    assert await remote.service.all_names() == [BASE, "pirate", "sql"]
    assert (await remote.http.post(f"/v1/{route}_lora_adapter", json=body)).status_code == 200
    assert ("new" in await remote.service.all_names(), "sql" in await remote.service.all_names()) == (
        route == "load",
        route == "load",
    )


async def test_an_unloaded_adapter_is_not_remembered(remote: Server, mount: Mount) -> None:
    assert (await remote.chat(model="sql")).status_code == 200
    assert (await remote.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 200
    mount.die()
    assert (await remote.chat(model="pirate")).status_code == 503
    assert (await remote.chat(model="sql")).status_code == 503


async def test_an_adapters_template_is_kept_while_a_mount_is_dead(
    remote: Server, mount: Mount, adapters_dir: Path
) -> None:
    (adapters_dir / "sql" / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokens = {"model": "sql", "messages": [{"role": "user", "content": "a"}]}
    assert isinstance(remote.service._templates, AdapterTemplates)
    first = await remote.http.post("/tokenize", json=tokens)
    mount.die()
    second = await remote.http.post("/tokenize", json=tokens)
    assert first.json() == second.json()
    assert (first.json()["count"], second.status_code) == (2, 200)
    assert mount.held


async def test_what_was_looked_at_a_moment_ago_on_a_local_disk_is_looked_at_in_place(
    make_server: MakeServer, adapters_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFolders, "are_local", lambda self: True)
    async with make_server(settings={"adapter_chat_templates": True}) as server:
        files, now, lstat, threads = server.service.adapter_files, [0.0], os.lstat, list[int]()
        files._clock = lambda: now[0]

        def noted(path: Any, **options: Any) -> os.stat_result:
            if str(path).startswith(str(adapters_dir)):
                threads.append(threading.get_ident())
            return lstat(path, **options)

        async def in_place() -> bool:
            threads.clear()
            assert (await server.chat(model="sql")).status_code == 200
            places = {thread == threading.get_ident() for thread in threads}
            assert len(places) == 1
            return places.pop()

        monkeypatch.setattr(os, "lstat", noted)
        assert not await in_place()
        assert await in_place()
        now[0] += HOT_SECONDS
        assert not await in_place()
        assert await in_place()
        monkeypatch.setattr(LocalFolders, "are_local", lambda self: False)
        assert not await in_place()
        monkeypatch.setattr(LocalFolders, "are_local", lambda self: True)
        for name in ("nothing", "nothing"):
            threads.clear()
            assert (await server.chat(model=name)).status_code == 404
            assert threading.get_ident() not in threads
            assert threads


@pytest.mark.parametrize("is_local", [True, False])
async def test_one_adapter_that_hangs_costs_one_thread_and_its_own_requests(
    make_server: MakeServer, adapters_dir: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    """Even while its server starts; listings leave it out."""
    mount = Mount(adapters_dir / "pirate", monkeypatch)
    monkeypatch.setattr(LocalFolders, "are_local", lambda self: is_local)
    mount.die()
    async with make_server(settings={"enable_admin": True}) as server:
        files = server.service.adapter_files
        files._threads._seconds = 1.2
        listed = await server.http.get("/v1/models")
        assert [card["id"] for card in listed.json()["data"]] == [BASE, "sql"]
        for _ in range(3):
            answers = asyncio.gather(*(server.chat(model="pirate") for _ in range(10)))
            began = time.monotonic()
            for model in ("sql", BASE):
                assert (await server.chat(model=model)).status_code == 200
            missing = await server.chat(model="sqll")
            assert (missing.status_code, "'sql'" in missing.text) == (404, True)
            assert time.monotonic() - began < 1.0
            assert {answer.status_code for answer in await answers} == {503}
        assert (await server.http.get("/v1/models")).json() == listed.json()
        assert (await server.http.get("/metrics")).status_code == 200
        assert len(set(mount.held)) == files._threads.num_held == 1
        assert threading.get_ident() not in mount.held
        await revived(server, mount)
        assert (await server.chat(model="pirate")).status_code == 200
        server.service.registry._listing._listing = None
        assert await server.service.all_names() == [BASE, "pirate", "sql"]


async def test_an_adapter_that_was_listed_stays_so_when_it_hangs(
    remote: Server, mount: Mount, adapters_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.service.adapter_files._threads._seconds = 1.2
    assert await remote.service.all_names() == [BASE, "pirate", "sql"]
    pirate = Mount(adapters_dir / "pirate", monkeypatch)
    pirate.die()
    assert (await remote.chat(model="pirate")).status_code == 503
    (adapters_dir / "sql").rename(adapters_dir / "sql2")
    remote.service.registry._listing._clock = lambda: time.monotonic() + 3600.0
    assert await remote.service.all_names() == [BASE, "pirate", "sql2"]
    assert len(set(pirate.held)) == 1
    await revived(remote, pirate)


async def test_calls_of_one_key_are_made_one_after_another_and_those_given_up_not_at_all() -> None:
    threads, goes_on, made = FileThreads(SECONDS), threading.Event(), list[int]()
    first = asyncio.create_task(threads.run(lambda: goes_on.wait(10), "a"))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(threads.run(lambda: made.append(2), "a"))
    await threads.run(lambda: made.append(1), "b")
    for call in (first, second):
        with pytest.raises(TimeoutError):
            await call
    assert threads.num_held == 1
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await threads.run(lambda: made.append(3), "a")
    assert time.monotonic() - began < SECONDS / 2, "at once"
    await threads.run(lambda: made.append(4), "b")
    goes_on.set()
    while threads._keys:
        await asyncio.sleep(0.01)
    await threads.run(lambda: made.append(5), "a")
    assert made == [1, 4, 5]
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, "a")
    threads.stop()


async def test_threads_that_hang_are_bounded() -> None:
    others = set(threading.enumerate())

    def alive() -> int:
        return sum(one.name == "files" for one in threading.enumerate() if one not in others)

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0.01)

    threads, goes_on = FileThreads(SECONDS, max_threads=3), threading.Event()
    for _ in range(3):
        calls = (threads.run(lambda: goes_on.wait(30), key) for key in range(20))
        assert {type(result) for result in await asyncio.gather(*calls, return_exceptions=True)} == {TimeoutError}
        await until(lambda: threads.num_held == 3)
    assert alive() == 3
    assert sum(len(key.calls) for key in threads._keys.values()) == 17, "nobody queues where nothing moves"
    goes_on.set()
    await until(lambda: not threads._keys)
    threads._seconds = 10.0
    assert len(set(await asyncio.gather(*(threads.run(threading.get_ident, key) for key in range(20))))) <= 3
    threads.stop()
    await until(lambda: alive() == 0)


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
async def test_whatever_a_call_raises_is_told_at_once(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("wrong")

    threads = FileThreads(seconds=10.0, max_threads=1)
    for call in (on_daemon_thread(fail), threads.run(fail, "a"), threads.run(fail, "a"), threads.run(fail, "b")):
        with pytest.raises(error, match="wrong"):
            async with asyncio.timeout(5.0):
                await call
    assert await on_daemon_thread(lambda: 7) == 7
    assert await threads.run(lambda: 8, "a") == 8
    threads.stop()


ROOT = "22 1 0:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"


@pytest.mark.parametrize(
    ("lines", "is_local"),
    [
        ([ROOT], True),
        ([ROOT, "23 22 0:2 / /data rw - nfs4 server:/data rw"], False),
        ([ROOT, "23 22 0:2 / /data/adapters rw shared:2 master:3 - fuse.sshfs host: rw"], False),
        ([ROOT, "23 22 0:2 / /data/adapters/team rw - nfs server:/team rw"], False),
        ([ROOT, "23 22 0:2 / /data/adapters2 rw - nfs server:/team rw"], True),
        ([ROOT, "23 22 0:2 / /dat rw - nfs server:/team rw"], True),
        ([ROOT, "23 22 0:2 / /data rw - nfs a:/ rw", "24 23 0:3 / /data/adapters rw - xfs /dev/sdb rw"], True),
        ([ROOT, "23 22 0:2 / /data rw - xfs /dev/b rw", "24 22 0:3 / /data rw - nfs a:/ rw"], False),
        ([ROOT, "23 22 0:2 / /my\\040data rw - nfs a:/ rw"], False),
        (["22 1 0:1 / / rw - newfs none rw"], False),
        (["what is this"], False),
        ([], False),
    ],
)
def test_local_is_what_the_table_of_mounts_says(tmp_path: Path, lines: list[str], is_local: bool) -> None:
    table = tmp_path / "mountinfo"
    table.write_text("\n".join(lines) + "\n")
    folders = ["/my data/adapters"] if any("040" in line for line in lines) else ["/home", "/data/adapters"]
    assert LocalFolders(folders, table).are_local() is is_local


def test_mounts_are_looked_at_again(tmp_path: Path) -> None:
    table, now = tmp_path / "mountinfo", [0.0]
    local = LocalFolders(["/data"], table, clock=lambda: now[0])
    assert not local.are_local()
    table.write_text(ROOT)
    assert not local.are_local()
    now[0] += MOUNTS_SECONDS
    assert local.are_local()


async def test_what_is_refused_before_a_worker_sees_it_is_logged_once_for_each_fault(
    server: Server, adapters_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, away = adapters_dir / "sql" / "adapter_model.safetensors", adapters_dir / "away"
    assert (await server.complete(model="sql")).status_code == 200

    async def refused() -> str:
        answer = await server.complete(model="sql")
        assert answer.status_code == 400
        return str(answer.json()["error"]["message"])

    def logged() -> list[str]:
        return [message for message in caplog.messages if "is refused" in message]

    assert logged() == []
    weights.rename(away)
    fault = "it has no weights: adapter_model.safetensors is missing."
    assert (await refused()).startswith(f"Adapter 'sql': {fault}")
    assert await refused() == await refused()
    (line,) = logged()
    assert line.startswith(f"Adapter 'sql' is refused: adapter_invalid: {fault}")
    away.rename(weights)
    assert (await server.complete(model="sql")).status_code == 200
    weights.rename(away)
    await refused()
    assert len(logged()) == 2, "it was sound in between"
