"""A server on a fake engine, spoken to over ASGI."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.main import create_app
from app.service import Service
from app.settings import Settings
from tests.support.fake_engine import FakeEngine
from tests.support.tokenizer_folders import byte_level_tokenizer, write_folder

BASE = "base"


@dataclass(frozen=True)
class Server:
    """engines: one for each life so far."""

    app: FastAPI
    service: Service
    http: httpx.AsyncClient
    engines: list[FakeEngine]

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    async def chat(self, **body: Any) -> httpx.Response:
        defaults = {"model": BASE, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        return await self.http.post("/v1/chat/completions", json=defaults | body)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": BASE, "prompt": "hello", "max_tokens": 8} | body)


MakeServer = Callable[..., AbstractAsyncContextManager[Server]]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of a stream's events; the stream must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def write_adapters(root: Path) -> Path:
    """Two adapters that do for a front end without a worker: it reads no more than their headers, to warn of them."""
    for name in ("sql", "pirate"):
        (root / name).mkdir(parents=True)
        (root / name / "adapter_config.json").write_text("{}")
        (root / name / "adapter_model.safetensors").write_bytes(b"weights")
    return root


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_folder(tmp_path / BASE, byte_level_tokenizer(), eos_token="<|im_end|>")


@pytest.fixture
def adapters_dir(tmp_path: Path) -> Path:
    return write_adapters(tmp_path / "adapters")


@pytest.fixture
def make_server(model_dir: Path, adapters_dir: Path) -> MakeServer:
    """make_server(settings={...}, **engine options): a started server."""

    @contextlib.asynccontextmanager
    async def start(settings: dict[str, Any] | None = None, **engine: Any) -> AsyncIterator[Server]:
        engines: list[FakeEngine] = []

        def connect() -> FakeEngine:
            engines.append(FakeEngine(**({"model_dir": str(model_dir)} | engine)))
            return engines[-1]

        keys = {"model": str(model_dir), "adapters": str(adapters_dir)} | (settings or {})
        app = create_app(Settings(**keys), connect)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as http,
        ):
            yield Server(app, app.state.service, http, engines)

    return start


@pytest.fixture
async def server(make_server: MakeServer) -> AsyncIterator[Server]:
    async with make_server() as started:
        yield started
