"""Adapters loaded and unloaded over HTTP, on a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from punica_core.errors import AdapterMismatch, PunicaError
from punica_core.protocol import NewSequence
from tests.app.conftest import BASE, MakeServer, Server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def make_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def more(tmp_path: Path) -> Path:
    """Another root, with two adapters in it."""
    for name in ("tuned", "deep/other"):
        make_adapter(tmp_path / "more" / name)
    make_adapter(tmp_path / "outside")
    return tmp_path / "more"


@pytest.fixture
def admin(adapters_dir: Path, more: Path) -> dict[str, Any]:
    """Settings."""
    return {"enable_admin": True, "adapter_roots": f"{adapters_dir}:{more}"}


@pytest.fixture
async def server(make_server: MakeServer, admin: dict[str, Any]) -> AsyncIterator[Server]:
    async with make_server(admin) as started:
        yield started


async def load(server: Server, name: Any, path: Any, **more: Any) -> httpx.Response:
    return await server.http.post(LOAD, json={"lora_name": name, "lora_path": str(path)} | more)


async def unload(server: Server, name: str, **more: Any) -> httpx.Response:
    return await server.http.post(UNLOAD, json={"lora_name": name} | more)


async def names(server: Server) -> list[str]:
    return [card["id"] for card in (await server.http.get("/v1/models")).json()["data"]]


def adapters_seen(server: Server) -> list[tuple[str, str] | None]:
    """(name, folder) of what the engine was asked to use, in order."""
    sequences = [sequence for batch in server.engine.submissions for sequence in batch]
    return [(found.adapter.name, found.adapter.path) if found.adapter else None for found in sequences]


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_a_loaded_adapter_is_listed_and_served_until_it_is_unloaded(server: Server, more: Path) -> None:
    assert (await server.complete(model="new")).status_code == 404
    answer = await load(server, "new", more / "tuned")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert answer.headers["content-type"].startswith("text/plain")
    assert await names(server) == [BASE, "new", "pirate", "sql"]
    card = (await server.http.get("/v1/models/new")).json()
    assert (card["parent"], card["root"]) == (BASE, str(more / "tuned"))
    assert (await server.complete(model="new")).json()["model"] == "new"
    assert adapters_seen(server) == [("new", str(more / "tuned"))] * 2  # the trial, and the request
    answer = await unload(server, "new", lora_int_id=7)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert await names(server) == [BASE, "pirate", "sql"]
    assert (await server.complete(model="new")).status_code == 404
    await until(lambda: server.engine.forgotten == [str(more / "tuned")])


async def test_only_who_may_load_adapters_is_told_their_folders(make_server: MakeServer, more: Path) -> None:
    settings = {"adapter_roots": str(more), "enable_admin": True, "api_key": "boss-secret-3"}
    async with make_server(settings) as server:
        server.http.headers["authorization"] = "Bearer boss-secret-3"
        assert (await load(server, "new", "tuned")).status_code == 200
        assert (await server.http.get("/v1/models/new")).json()["root"] == str(more / "tuned")
    async with make_server() as plain:
        assert (await plain.http.get("/v1/models/sql")).json()["root"] == BASE


@pytest.mark.parametrize(
    ("body", "status", "complaint"),
    [
        ({"lora_name": "new"}, 400, "lora_path"),
        ({"lora_path": "tuned"}, 400, "lora_name"),
        ({"lora_name": "", "lora_path": "tuned"}, 400, "lora_name"),
        ({"lora_name": 7, "lora_path": "tuned"}, 400, "lora_name"),
        ({"lora_name": "new", "lora_path": None}, 400, "lora_path"),
        ({"lora_name": BASE, "lora_path": "tuned"}, 400, "base model's name"),
        ({"lora_name": BASE, "lora_path": "tuned", "load_inplace": True}, 400, "base model's name"),
        ({"lora_name": "sql", "lora_path": "tuned"}, 400, "'sql' is taken"),
        ({"lora_name": "../x", "lora_path": "tuned"}, 400, "lora_name is '../x'"),
        ({"lora_name": "new", "lora_path": "nothing"}, 404, "no folder"),
        ({"lora_name": "new", "lora_path": "deep"}, 404, "no adapter_config.json"),
        ({"lora_name": "new", "lora_path": "bare"}, 400, "no weights"),
        ({"lora_name": "new", "lora_path": "../outside"}, 400, "does not lie below"),
        ({"lora_name": "new", "lora_path": "/etc"}, 400, "does not lie below"),
        ({"lora_name": "new", "lora_path": "tuned\0"}, 400, "lora_path must have"),
        ({"lora_name": "new", "lora_path": "tuned", "is_3d_lora_weight": True}, 400, "is_3d_lora_weight"),
    ],
)
async def test_what_cannot_be_loaded_is_refused_and_changes_nothing(
    server: Server, tmp_path: Path, more: Path, body: dict[str, Any], status: int, complaint: str
) -> None:
    (more / "bare").mkdir()
    (more / "bare" / "adapter_config.json").write_text("{}")
    answer = await server.http.post(LOAD, json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert complaint in error["message"]
    assert str(tmp_path) not in error["message"]
    assert error["param"] in ("lora_name", "lora_path", "is_3d_lora_weight")
    assert await names(server) == [BASE, "pirate", "sql"]
    assert server.engine.submissions == []


async def test_bodies_that_are_no_bodies_are_refused(server: Server) -> None:
    for route in (LOAD, UNLOAD):
        for content in (b"", b"[]", b"null", b"{", b'{"lora_name": "\xff"}'):
            answer = await server.http.post(route, content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
        answer = await server.http.post(route, content=b" " * (9 * 2**20))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_an_adapter_that_the_engine_refuses_gets_no_name(make_server: MakeServer, admin: dict[str, Any]) -> None:
    def reply(sequence: NewSequence) -> list[int] | PunicaError:
        return AdapterMismatch("Adapter 'new': shapes differ: [8, 64] and [8, 128].") if sequence.adapter else [1]

    async with make_server(admin, reply=reply) as server:
        answer = await load(server, "new", "tuned")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "adapter_mismatch", "lora_path")
        assert "[8, 128]" in error["message"]
        assert await names(server) == [BASE, "pirate", "sql"]
        assert (await server.complete(model="new")).status_code == 404
        assert server.service.batcher.in_flight == 0


@pytest.mark.parametrize("is_used", [True, False])
async def test_an_adapter_whose_own_chat_template_is_broken_gets_no_name(
    make_server: MakeServer, admin: dict[str, Any], more: Path, is_used: bool
) -> None:
    (more / "tuned" / "chat_template.jinja").write_text("{% for")
    async with make_server(admin | {"adapter_chat_templates": is_used}) as server:
        answer = await load(server, "new", "tuned")
        assert answer.status_code == (400 if is_used else 200)
        assert ("new" in await names(server)) is not is_used
        if is_used:
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("adapter_invalid", "lora_path")
            assert "broken at line 1" in error["message"]
            assert server.engine.submissions == []


async def test_a_name_is_not_there_before_its_adapter_was_tried(make_server: MakeServer, admin: dict[str, Any]) -> None:
    async with make_server(admin, auto=False) as server:
        first = asyncio.create_task(load(server, "new", "tuned"))
        await until(lambda: server.engine.submissions)
        assert (await server.complete(model="new")).status_code == 404
        second = await load(server, "new", "deep/other")
        assert (second.status_code, "being loaded" in second.json()["error"]["message"]) == (400, True)
        server.engine.step()
        assert (await first).status_code == 200
        assert "new" in await names(server)


async def test_a_trial_is_of_no_keys_tenant(server: Server) -> None:
    await load(server, "new", "tuned")
    (trial,) = server.engine.submissions[0]
    assert (trial.tenant, trial.sampling.max_tokens) == (":loading", 1)


async def test_a_load_that_takes_too_long_is_given_up(make_server: MakeServer, admin: dict[str, Any]) -> None:
    async with make_server(admin | {"adapter_load_timeout": 0.05}, auto=False) as server:
        answer = await load(server, "new", "tuned")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_load_timeout")
        assert "retry-after" in answer.headers
        await until(lambda: server.service.batcher.in_flight == 0)
        assert "new" not in await names(server)
        server.service.loader._timeout = 60.0
        again = asyncio.create_task(load(server, "new", "tuned"))
        await until(lambda: len(server.engine.submissions) == 2)
        server.engine.step()
        assert (await again).status_code == 200


async def test_loading_in_place_replaces_what_has_the_name_once_it_was_tried(
    make_server: MakeServer, admin: dict[str, Any], adapters_dir: Path, more: Path
) -> None:
    async with make_server(admin, auto=False) as server:
        replacing = asyncio.create_task(load(server, "sql", "tuned", load_inplace=True))
        await until(lambda: server.engine.submissions)
        old = asyncio.create_task(server.complete(model="sql", max_tokens=2))
        await until(lambda: len(server.engine.submissions) == 2)
        server.engine.step()
        assert (await replacing).status_code == 200
        new = asyncio.create_task(server.complete(model="sql", max_tokens=1))
        await until(lambda: len(server.engine.submissions) == 3)
        assert server.engine.forgotten == []  # the old one still serves a request
        server.engine.step()
        assert [(await request).status_code for request in (old, new)] == [200, 200]
        await until(lambda: server.engine.forgotten == [str(adapters_dir / "sql")])
    paths = [str(more / "tuned"), str(adapters_dir / "sql"), str(more / "tuned")]
    assert adapters_seen(server) == [("sql", path) for path in paths]


@pytest.mark.parametrize("name", ["new", "sql"])
async def test_unloading_lets_what_runs_finish_and_refuses_what_comes(
    make_server: MakeServer, admin: dict[str, Any], name: str
) -> None:
    """new: loaded over HTTP; sql: a folder of the adapters' directory."""
    async with make_server(admin, auto=False) as server:
        if name == "new":
            loading = asyncio.create_task(load(server, "new", "tuned"))
            await until(lambda: server.engine.submissions)
            server.engine.step()
            await loading
        running = asyncio.create_task(server.complete(model=name, max_tokens=5, n=3))
        await until(lambda: len(server.engine.running) == 3)
        assert (await unload(server, name)).status_code == 200  # at once
        refused = await server.complete(model=name)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        for _ in range(4):
            server.engine.step()
            await asyncio.sleep(0)
        assert server.engine.forgotten == []
        server.engine.step()
        answer = await running
        assert [choice["text"] for choice in answer.json()["choices"]] == ["hello"] * 3
        await until(lambda: len(server.engine.forgotten) == 1)


async def test_a_name_that_is_not_there_cannot_be_unloaded(server: Server) -> None:
    for name in ("nope", "../sql", "sql/"):
        answer = await unload(server, name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert answer.json()["error"]["param"] == "lora_name"
    answer = await unload(server, BASE)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")
    assert "is the base model's name" in answer.json()["error"]["message"]
    assert (await server.complete(model="nope")).json()["error"]["param"] == "model"
    await load(server, "new", "tuned")
    assert (await unload(server, "new")).status_code == 200
    assert (await unload(server, "new")).status_code == 404


async def test_an_unloaded_folder_can_be_loaded_again(server: Server, adapters_dir: Path) -> None:
    assert (await unload(server, "sql")).status_code == 200
    assert await names(server) == [BASE, "pirate"]
    assert (await load(server, "sql", "sql")).status_code == 200
    assert await names(server) == [BASE, "pirate", "sql"]
    assert (await server.complete(model="sql")).status_code == 200


async def test_a_folder_that_still_has_a_name_is_not_forgotten(server: Server, adapters_dir: Path) -> None:
    for name, path in (("a", "tuned"), ("b", "tuned"), ("c", "sql")):
        assert (await load(server, name, path)).status_code == 200
    for name in ("a", "c"):
        assert (await unload(server, name)).status_code == 200
    await until(lambda: not server.service.loader._drains)
    assert server.engine.forgotten == []
    await unload(server, "b")
    await until(lambda: len(server.engine.forgotten) == 1)


async def test_loaded_adapters_survive_the_worker(server: Server) -> None:
    await load(server, "new", "tuned")
    await unload(server, "pirate")
    server.engine.lose()
    async with asyncio.timeout(10):
        while not server.service.is_healthy:
            await asyncio.sleep(0.01)
    assert len(server.engines) == 2
    assert await names(server) == [BASE, "new", "sql"]
    assert (await server.complete(model="new")).status_code == 200
    assert adapters_seen(server)[0][0] == "new"


async def test_an_adapter_whose_worker_dies_while_it_is_tried_gets_no_name(
    make_server: MakeServer, admin: dict[str, Any]
) -> None:
    async with make_server(admin, auto=False) as server:
        loading = asyncio.create_task(load(server, "new", "tuned"))
        await until(lambda: server.engine.submissions)
        server.engine.lose()
        answer = await loading
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
        assert "new" not in await names(server)


async def test_many_rounds_leave_nothing_behind(server: Server) -> None:
    for _ in range(100):
        assert (await load(server, "new", "tuned")).status_code == 200
        assert (await unload(server, "new")).status_code == 200
    await until(lambda: not server.service.loader._drains)
    registry, batcher = server.service.registry, server.service.batcher
    assert (registry._added, registry._hidden) == ({}, frozenset())
    assert (batcher.in_flight, len(batcher._users), len(batcher._unused)) == (0, 0, 0)
    assert set(server.service.metrics._models) <= {BASE}


KEYS = """
keys:
  - {name: acme, key: acme-secret-1}
  - {name: boss, key: boss-secret-3, admin: true}
"""


async def test_routes_of_administration_are_closed_unless_opened(
    make_server: MakeServer, tmp_path: Path, more: Path
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    roots = {"adapter_roots": str(more)}
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({}, "", 404),
        ({"enable_admin": True}, "", 200),
        ({"api_key": "the-one-key"}, "the-one-key", 403),
        ({"api_key": "the-one-key", "enable_admin": True}, "the-one-key", 200),
        ({"api_key": "the-one-key", "enable_admin": True}, "", 401),
        ({"api_keys_file": str(file)}, "acme-secret-1", 403),
        ({"api_keys_file": str(file)}, "boss-secret-3", 200),
        ({"api_keys_file": str(file)}, "", 401),
    ]
    for settings, token, status in cases:
        async with make_server(roots | settings) as server:
            if token:
                server.http.headers["authorization"] = f"Bearer {token}"
            answers = [await load(server, "new", "tuned"), await unload(server, "new")]
            assert [answer.status_code for answer in answers] == [status, status], (settings, token)
            if status != 200:
                assert server.engine.submissions == []


async def test_administration_has_no_part_in_a_keys_limits(make_server: MakeServer, tmp_path: Path, more: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{name: boss, key: boss-secret-3, admin: true, requests_per_minute: 1}]")
    async with make_server({"api_keys_file": str(file), "adapter_roots": str(more)}) as server:
        server.http.headers["authorization"] = "Bearer boss-secret-3"
        for name in ("a", "b", "c"):
            answer = await load(server, name, "tuned")
            assert (answer.status_code, "x-ratelimit-limit-requests" in answer.headers) == (200, False)
        assert (await server.complete()).status_code == 200
        assert (await server.complete()).status_code == 429


@pytest.mark.parametrize(("settings", "warns"), [({}, True), ({"api_key": "the-one-key"}, False)])
async def test_administration_that_is_open_to_all_is_warned_of(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], warns: bool
) -> None:
    async with make_server({"enable_admin": True} | settings):
        assert ("Whoever reaches this server" in caplog.text) is warns
