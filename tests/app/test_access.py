"""What a key opens, what it closes, and what it must not tell: over HTTP, on a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.keys import hash_of
from punica_core.errors import WorkerLost
from tests.app.conftest import BASE, MakeServer, Server

ACME, NOBODY, BOSS, SCRAPER = "acme-secret-1", "nobody-secret-2", "boss-secret-3", "scraper-secret-4"
TOKENS = (ACME, NOBODY, BOSS, SCRAPER)

KEYS = f"""
keys:
  - {{name: acme, key: {ACME}, adapters: [sql]}}
  - {{name: nobody, key: "{hash_of(NOBODY)}", adapters: [], base: false}}
  - {{name: boss, key: {BOSS}, admin: true}}
  - {{name: scraper, key: {SCRAPER}, adapters: [], base: false, metrics: true}}
"""


def with_key(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def keys_file(folder: Path, text: str) -> dict[str, Any]:
    file = folder / "keys.yaml"
    file.write_text(text)
    return {"api_keys_file": str(file)}


@pytest.fixture
async def server(make_server: MakeServer, tmp_path: Path) -> AsyncIterator[Server]:
    async with make_server(keys_file(tmp_path, KEYS)) as started:
        yield started


async def complete(server: Server, token: str, **body: Any) -> httpx.Response:
    default = {"model": BASE, "prompt": "hello", "max_tokens": 4}
    return await server.http.post("/v1/completions", json=default | body, headers=with_key(token))


async def routes_of(server: Server) -> list[tuple[str, str]]:
    """(method, path) of every route there is."""
    paths = (await server.http.get("/openapi.json", headers=with_key(BOSS))).json()["paths"]
    named = [(method, path.replace("{name}", BASE)) for path, methods in paths.items() for method in methods]
    return [
        *named,
        ("get", "/openapi.json"),
        ("get", "/nothing"),
        ("get", "/health/"),
        ("get", "//health"),
        ("get", "/HEALTH"),
    ]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        with_key("wrong-secret"),
        with_key(ACME.upper()),
        {"authorization": ACME},
        {"authorization": f"Basic {ACME}"},
        {"x-api-key": ACME},
        {"api-key": ACME},
        {"cookie": f"key={ACME}"},
    ],
)
async def test_every_route_but_health_and_ready_needs_a_key(server: Server, headers: dict[str, str]) -> None:
    routes = await routes_of(server)
    assert len(routes) > 12
    for method, path in routes:
        response = await server.http.request(method, path, headers=headers, params={"api_key": ACME})
        if (method, path) in (("get", "/health"), ("get", "/ready")):
            assert response.status_code == 200
            continue
        assert response.status_code == 401, (method, path)
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
    assert server.engine.submissions == []


async def test_the_same_routes_answer_a_key(server: Server) -> None:
    """The control of the test above."""
    for method, path in await routes_of(server):
        response = await server.http.request(method, path, headers=with_key(BOSS))
        assert response.status_code != 401, (method, path)


async def test_only_what_a_key_may_use_is_listed(server: Server) -> None:
    async def listed(token: str) -> list[str]:
        return [card["id"] for card in (await server.http.get("/v1/models", headers=with_key(token))).json()["data"]]

    assert await listed(ACME) == [BASE, "sql"]
    assert await listed(NOBODY) == []
    assert await listed(BOSS) == [BASE, "pirate", "sql"]


@pytest.mark.parametrize("exists", ["pirate", "nothing"])
async def test_an_adapter_that_a_key_may_not_use_does_not_exist(
    server: Server, adapters_dir: Path, exists: str
) -> None:
    """With the adapter there and with nothing there, every answer is the same to the byte but for the name."""
    if exists == "nothing":
        (adapters_dir / "pirate").rename(adapters_dir.parent / "elsewhere")
    bodies: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ]
    answers = [
        await server.http.post(path, json={"model": "pirate"} | body, headers=with_key(ACME)) for path, body in bodies
    ]
    answers.append(await server.http.get("/v1/models/pirate", headers=with_key(ACME)))
    for answer in answers:
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": "The model 'pirate' does not exist. The base model is 'base'; GET /v1/models lists everything.",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    assert server.engine.submissions == []


async def test_a_key_is_told_of_no_name_that_it_may_not_use(server: Server) -> None:
    async def told(token: str, name: str) -> str:
        response = await complete(server, token, model=name)
        assert response.status_code == 404
        return str(response.json()["error"]["message"])

    assert "'sql'" in await told(ACME, "sqll")
    assert "'pirate'" not in await told(ACME, "pirat")
    assert "'pirate'" in await told(BOSS, "pirat")
    assert BASE not in await told(NOBODY, "bas")
    assert (await told(NOBODY, BASE)).startswith("The model 'base' does not exist. GET")


async def test_what_a_key_may_use_works_and_its_name_is_the_engines_tenant(server: Server) -> None:
    assert (await complete(server, ACME, model="sql")).status_code == 200
    assert (await complete(server, ACME)).status_code == 200
    assert (await complete(server, BOSS, model="pirate")).status_code == 200
    tenants = [sequence.tenant for batch in server.engine.submissions for sequence in batch]
    assert tenants == ["acme", "acme", "boss"]


async def test_without_keys_there_is_one_tenant(make_server: MakeServer) -> None:
    async with make_server() as server:
        await complete(server, "whatever")
        assert server.engine.submissions[0][0].tenant == ""


async def test_metrics_need_a_key_that_may_read_them(server: Server) -> None:
    for token, status in ((ACME, 403), (NOBODY, 403), (BOSS, 200), (SCRAPER, 200)):
        response = await server.http.get("/metrics", headers=with_key(token))
        assert response.status_code == status, token
    assert (await server.http.get("/metrics", headers=with_key(ACME))).json()["error"]["code"] == "permission_denied"


async def test_metrics_can_be_opened(make_server: MakeServer, tmp_path: Path) -> None:
    async with make_server(keys_file(tmp_path, KEYS) | {"open_metrics": True}) as server:
        assert (await server.http.get("/metrics")).status_code == 200
        assert (await server.http.get("/v1/models")).status_code == 401


async def test_one_key_for_all(make_server: MakeServer) -> None:
    async with make_server({"api_key": ACME}) as server:
        assert (await complete(server, "wrong-secret")).status_code == 401
        assert (await complete(server, ACME, model="pirate")).status_code == 200
        assert (await server.http.get("/metrics", headers=with_key(ACME))).status_code == 200


async def test_keys_are_in_no_log_error_or_metric(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    texts = []
    for token in (*TOKENS, "wrong-secret"):
        texts += [(await complete(server, token, model=name)).text for name in (BASE, "sql", "nope")]
        texts.append((await server.http.get("/metrics", headers=with_key(token))).text)
        texts.append((await server.http.post("/v1/load_lora_adapter", headers=with_key(token))).text)
    everything = "\n".join([*texts, *(record.getMessage() for record in caplog.records)])
    assert 'punica_key_responses_total{key="acme",status="200"}' in everything
    for token in (*TOKENS, "wrong-secret"):
        assert token not in everything
        assert hash_of(token).removeprefix("sha256:") not in everything


async def test_an_open_server_has_no_series_of_keys(make_server: MakeServer) -> None:
    async with make_server() as server:
        await complete(server, "whatever")
        assert "punica_key" not in (await server.http.get("/metrics")).text


LIMITED = """
keys:
  - {{name: acme, key: acme-secret-1, requests_per_minute: {requests}, tokens_per_minute: {tokens},
      max_concurrent: {at_once}}}
  - {{name: boss, key: boss-secret-3, admin: true}}
"""


@pytest.fixture
def make_still_server(make_server: MakeServer) -> MakeServer:
    """A server for whose limits no time passes."""

    @contextlib.asynccontextmanager
    async def start(settings: dict[str, Any], **engine: Any) -> AsyncIterator[Server]:
        async with make_server(settings, **engine) as server:
            server.service.usages._clock = lambda: 0.0
            yield server

    return start


def limited(folder: Path, requests: int = 1000, tokens: int = 100_000, at_once: int = 1000) -> dict[str, Any]:
    return keys_file(folder, LIMITED.format(requests=requests, tokens=tokens, at_once=at_once))


async def test_requests_beyond_a_limit_are_429_with_the_time_to_wait(
    make_still_server: MakeServer, tmp_path: Path
) -> None:
    async with make_still_server(limited(tmp_path, requests=3)) as server:
        # of whatever kind, and whatever becomes of them
        assert (await complete(server, ACME)).headers["x-ratelimit-remaining-requests"] == "2"
        assert (await complete(server, ACME, model="nope")).headers["x-ratelimit-remaining-requests"] == "1"
        assert (await server.http.post("/tokenize", headers=with_key(ACME))).status_code == 400
        refused = await complete(server, ACME)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "20"
        assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        assert (await server.http.get("/v1/models", headers=with_key(ACME))).status_code == 200
        assert (await complete(server, BOSS)).status_code == 200  # another key's limit is another's
    assert len(server.engine.submissions) == 2


async def test_a_stream_has_the_headers_too_and_is_charged_what_it_used(
    make_still_server: MakeServer, tmp_path: Path
) -> None:
    async with make_still_server(limited(tmp_path, tokens=6000), auto=False) as server:
        request = asyncio.create_task(complete(server, ACME, stream=True, max_tokens=500))
        while not server.engine.submissions:
            await asyncio.sleep(0)
        usage = server.service.usages.of(server.service.keys.find([f"Bearer {ACME}".encode()]))
        assert dict(usage.headers())[b"x-ratelimit-remaining-tokens"] == b"5495"  # all it may come to
        for _ in range(3):
            server.engine.step()
            await asyncio.sleep(0)
        server.engine.lose()
        response = await request
        assert response.status_code == 200
        assert int(response.headers["x-ratelimit-limit-tokens"]) == 6000
        assert dict(usage.headers())[b"x-ratelimit-remaining-tokens"] == b"5992"
        assert (usage.prompt_tokens, usage.generated_tokens, usage.in_flight) == (5, 3, 0)


async def test_tokens_beyond_a_limit_are_429_and_beyond_all_measure_400(
    make_still_server: MakeServer, tmp_path: Path
) -> None:
    async with make_still_server(limited(tmp_path, tokens=120)) as server:
        assert (await complete(server, ACME, max_tokens=90)).status_code == 200
        refused = await complete(server, ACME, max_tokens=90)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "35"  # 95 of 120 are used: 70 are missing, and 2 come a second
        never = await complete(server, ACME, max_tokens=118)
        assert (never.status_code, never.json()["error"]["code"]) == (400, "invalid_value")
        assert (await complete(server, ACME, max_tokens=1)).status_code == 200


async def test_a_chat_that_names_no_limit_is_not_charged_for_all_it_might_say(
    make_still_server: MakeServer, tmp_path: Path
) -> None:
    body = {"model": BASE, "messages": [{"role": "user", "content": "x"}]}
    async with make_still_server(limited(tmp_path, tokens=120), reply=lambda sequence: [1, 2, 3]) as server:
        response = await server.http.post("/v1/chat/completions", json=body, headers=with_key(ACME))
        assert response.status_code == 200  # its room is 400 and more
        usage = server.service.usages.of(server.service.keys.find([f"Bearer {ACME}".encode()]))
        used = response.json()["usage"]
        assert (usage.prompt_tokens, usage.generated_tokens) == (used["prompt_tokens"], used["completion_tokens"])


ENDINGS = ("answer", "error", "loss", "disconnect", "shutdown", "refusal")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_place_is_given_back_however_a_request_ends(
    make_still_server: MakeServer, tmp_path: Path, ending: str, stream: bool
) -> None:
    reply = {"reply": lambda sequence: WorkerLost("gone")} if ending == "error" else {}
    async with make_still_server(limited(tmp_path, at_once=2), auto=False, **reply) as server:
        usage = server.service.usages.of(server.service.keys.find([f"Bearer {ACME}".encode()]))
        body = {"n": 2, "max_tokens": 3, "stream": stream}
        if ending == "refusal":
            server.service.begin_drain()
            assert (await complete(server, ACME, **body)).status_code == 503
            assert usage.in_flight == 0
            return
        request = asyncio.create_task(complete(server, ACME, **body))
        while not server.engine.submissions:
            await asyncio.sleep(0)
        assert usage.in_flight == 2
        second = await complete(server, ACME)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        assert "concurrent" in second.json()["error"]["message"]
        if ending == "loss":
            server.engine.lose()
        elif ending == "disconnect":
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            for flight in {sequence.flight for sequence in server.service.batcher._live.values()}:
                flight.abandon()  # what the watcher of a real connection does
        elif ending == "shutdown":
            await server.service.stop()
        async with asyncio.timeout(10):
            while usage.in_flight:
                if ending in ("answer", "error"):
                    server.engine.step()
                await asyncio.sleep(0)
            await asyncio.gather(request, return_exceptions=True)
    assert usage.in_flight == 0


async def test_limits_change_with_the_file_and_what_was_used_stays(
    make_still_server: MakeServer, tmp_path: Path
) -> None:
    async with make_still_server(limited(tmp_path, requests=1000)) as server:
        for _ in range(3):
            await complete(server, ACME)
        limited(tmp_path, requests=4)
        server.service.keys.ask_reload()
        async with asyncio.timeout(10):
            while server.service.keys.find([f"Bearer {ACME}".encode()]).limits.requests_per_minute != 4:
                await asyncio.sleep(0.01)
        assert (await complete(server, ACME)).headers["x-ratelimit-remaining-requests"] == "0"
        assert (await complete(server, ACME)).status_code == 429


async def test_the_document_says_that_a_key_is_needed(server: Server, make_server: MakeServer) -> None:
    document = (await server.http.get("/openapi.json", headers=with_key(BOSS))).json()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"key": []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    async with make_server() as open_server:
        assert "security" not in json.dumps((await open_server.http.get("/openapi.json")).json())
