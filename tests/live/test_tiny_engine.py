"""A real server on a tiny model with few KV blocks and little room for adapters, held where a fault is to hit it.

The prompts are token ids and every id has a text, so equal answers are equal tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from punica_core.bench.shapes import write_tokenizer
from punica_core.config import BLOCK_SIZE
from punica_core.lora.weights import AdapterReader
from punica_core.model.shapes import model_shapes
from tests.support.demo import ROOT
from tests.support.gated_worker import PREFILL, SLOW
from tests.support.peft_adapters import adapter_ref, save_peft_adapter, tiny_llama
from tests.support.server import LiveServer, serve

RANKS = {"a": 4, "b": 8, "c": 16, "large": 40}
"""The memory for adapters takes the first three, or the last one alone."""

KV_TOKENS = 512
STEP_TOKENS = 32
LONG_PROMPT = [3 + i % 500 for i in range(300)]


@dataclass(frozen=True)
class Tiny:
    """The server, and the folders where its adapters are and its worker is held."""

    server: LiveServer
    adapters: Path
    gates: Path

    def metric(self, name: str, label: str = "") -> float:
        return self.server.metric(f"punica_{name}", label)

    def num_cancelled(self) -> float:
        return self.metric("requests_total", 'status="cancelled"')

    def is_ready(self) -> bool:
        return httpx.get(f"{self.server.url}/ready").status_code == 200

    @contextlib.contextmanager
    def held(self, gate: str) -> Iterator[Callable[[], bool]]:
        """Hold the worker at a gate; yields whether it is there."""
        reached = self.gates / f"{gate}.reached"
        (self.gates / gate).touch()
        try:
            yield reached.exists
        finally:
            (self.gates / gate).unlink()
            reached.unlink(missing_ok=True)

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    await asyncio.sleep(0.02)
                return
        raise AssertionError(f"{what}: not within {seconds} s; {self.server.log.read_text()[-2000:]}")

    async def until_idle(self) -> None:
        """Nothing runs or waits, and every block is free again."""
        blocks = KV_TOKENS // BLOCK_SIZE
        gauges = ("in_flight", "running", "waiting")
        await self.until(lambda: not any(map(self.metric, gauges)), "the gauges return to 0")
        await self.until(lambda: not self.metric("waiting_by_reason", "reason="), "nothing waits for a reason")
        await self.until(lambda: self.metric("free_blocks") == blocks, "all blocks are free")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    root = tmp_path_factory.mktemp("tiny")
    model, adapters, gates = root / "base", root / "adapters", root / "gates"
    gates.mkdir()
    tiny_llama().save_pretrained(model)
    write_tokenizer(model, 512)
    for name, lora_rank in RANKS.items():
        save_peft_adapter(adapters / name, seed=lora_rank, r=lora_rank)
    with AdapterReader(adapter_ref(adapters / "large"), model_shapes(tiny_llama()), torch.float32, 256) as reader:
        room = reader.nbytes
    flags = {
        "model": model, "adapters": adapters, "device": "cpu", "kv-tokens": KV_TOKENS, "max-model-len": KV_TOKENS,
        "max-num-seqs": 16, "max-num-batched-tokens": STEP_TOKENS, "adapter-host-bytes": room,
    }  # fmt: skip
    options = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    with serve(root / "log", *options, module=("tests.support.gated_server", str(gates))) as server:
        yield Tiny(server, adapters, gates)


@pytest.fixture
async def http(tiny: Tiny) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=tiny.server.url, timeout=60) as client:
        yield client


@pytest.fixture
def cold(tiny: Tiny) -> str:
    """The name of an adapter that nobody has asked for yet; its content is that of "a"."""
    name = f"cold-{uuid.uuid4().hex}"
    shutil.copytree(tiny.adapters / "a", tiny.adapters / name)
    return name


def body(model: str, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    common = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return common | more


async def text(http: httpx.AsyncClient, request: dict[str, Any]) -> str:
    response = await http.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def gone(task: asyncio.Task[Any]) -> None:
    """The client disconnects."""
    assert not task.done(), task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def requests() -> list[dict[str, Any]]:
    """Sixteen over the base and the three adapters; each prompt is asked of all four."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randrange(4, 30))] for _ in range(4)]
    return [body(model, prompt, 60) for prompt in prompts for model in ("base", "a", "b", "c")]


async def test_answers_of_preempted_requests_over_all_adapters_equal_solo_answers(
    tiny: Tiny, http: httpx.AsyncClient
) -> None:
    solo = [await text(http, request) for request in requests()]
    assert tiny.metric("preemptions_total") == 0
    for start in range(0, len(solo), 4):
        assert len(set(solo[start : start + 4])) == 4, "an adapter has no effect"
    together = await asyncio.gather(*(text(http, request) for request in requests()))
    await tiny.until_idle()
    assert tiny.metric("preemptions_total") > 0
    assert together == solo


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_adapter_loads(
    tiny: Tiny, http: httpx.AsyncClient, cold: str, stream: bool
) -> None:
    """Who leaves is forgotten while the load goes on; who stays is answered when it has ended."""
    request = body(cold, [5, 6, 7], 8)
    with tiny.held(cold) as reached:
        leaving = asyncio.create_task(http.post("/v1/completions", json=request | {"stream": stream}))
        staying = asyncio.create_task(text(http, request))
        await tiny.until(reached, "the adapter is being read")
        loading = 'reason="adapter_loading"'
        await tiny.until(lambda: tiny.metric("waiting_by_reason", loading) == 2, "both wait for the adapter")
        await gone(leaving)
        await tiny.until(lambda: tiny.metric("in_flight") == 1, "the request of the client that left ends")
        await tiny.until(lambda: tiny.metric("waiting_by_reason", loading) == 1, "only one waits for the adapter")
        assert await text(http, body("base", [5, 6, 7], 8))
        assert not staying.done()
    assert await staying == await text(http, request | {"model": "a"}) != await text(http, request | {"model": "base"})
    await tiny.until_idle()


async def test_a_client_that_leaves_while_its_prompt_is_computed(tiny: Tiny, http: httpx.AsyncClient) -> None:
    request = body("a", LONG_PROMPT, 2)
    computed, cancelled = tiny.metric("prefill_tokens_total"), tiny.num_cancelled()
    with tiny.held(PREFILL) as reached:
        leaving = asyncio.create_task(http.post("/v1/completions", json=request))
        await tiny.until(reached, "the prompt is being computed")
        await gone(leaving)
        await tiny.until(lambda: tiny.num_cancelled() > cancelled, "the server sees that the client left")
    await tiny.until_idle()
    chunks = 3 * STEP_TOKENS  # one done, one held, and one more if the cancel comes late
    assert tiny.metric("prefill_tokens_total") - computed <= chunks < len(LONG_PROMPT) / 2
    assert await text(http, body("large", [5, 6, 7], 8)), "the adapter's memory was not given back"

    computed = tiny.metric("prefill_tokens_total")
    assert await text(http, request), "who stays is answered"
    await tiny.until_idle()
    assert tiny.metric("prefill_tokens_total") - computed >= len(LONG_PROMPT) - chunks


async def test_an_adapter_in_use_keeps_its_memory_until_its_client_leaves(tiny: Tiny, http: httpx.AsyncClient) -> None:
    with tiny.held(SLOW):
        running = asyncio.create_task(http.post("/v1/completions", json=body("a", [5, 6, 7], KV_TOKENS - 3)))
        await tiny.until(lambda: tiny.metric("running") == 1, "the request runs")
        waiting = asyncio.create_task(text(http, body("large", [5, 6, 7], 8)))
        no_room = 'reason="adapter_no_room"'
        await tiny.until(lambda: tiny.metric("waiting_by_reason", no_room) == 1, "there is no room for another adapter")
        await gone(running)
        assert await waiting
    await tiny.until_idle()


def bench(url: str, *options: str) -> tuple[int, str]:
    """Exit code and output of `punica bench serve` on the smoke scenario."""
    command = (sys.executable, "-m", "app.cli", "bench", "serve", "load_tests/scenarios/smoke.yaml", "--base-url", url)
    done = subprocess.run(
        (*command, *options), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    return done.returncode, done.stdout


async def test_64_clients_of_the_load_test_see_no_error(tiny: Tiny, tmp_path: Path) -> None:
    options = ("--clients", "64", "--token-low", "3", "--token-high", "500", "--models", "a,b,c")
    out = tmp_path / "report"
    code, output = bench(
        tiny.server.url, *options, "--requests", "128", "--popularity", "base,uniform", "--out", str(out)
    )
    assert code == 0, output
    runs: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())["runs"]
    assert list(runs) == ["base", "uniform"]
    for run in runs.values():
        assert (run["completed"], run["errors"]) == (128, {})
    assert set(runs["uniform"]["by_model"]) == {"a", "b", "c"}
    await tiny.until_idle()

    code, output = bench(tiny.server.url, *options, "--requests", "2", "--lengths", f"fixed:{KV_TOKENS}:8")
    assert code == 1, "errors are not seen"
    assert "http_400" in output


async def test_a_worker_that_is_killed_while_an_adapter_loads(tiny: Tiny, http: httpx.AsyncClient, cold: str) -> None:
    request = body(cold, [5, 6, 7], 8)
    expected = await text(http, request | {"model": "a"})
    (worker,) = tiny.server.worker_pids()
    with tiny.held(cold) as reached:
        waiting: list[Awaitable[httpx.Response]] = [
            asyncio.create_task(http.post("/v1/completions", json=request | {"stream": stream}))
            for stream in (False, True)
        ]
        await tiny.until(reached, "the adapter is being read")
        os.kill(worker, signal.SIGKILL)
        for response in await asyncio.wait_for(asyncio.gather(*waiting), 10):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_lost")
            assert int(response.headers["retry-after"]) >= 1
        await tiny.until(tiny.is_ready, "a new worker takes over", seconds=90)
        assert tiny.server.worker_pids() != [worker]
        assert await text(http, body("base", [5, 6, 7], 8))
        again = asyncio.create_task(text(http, request))
        await tiny.until(lambda: tiny.metric("waiting") == 1, "the adapter is awaited again")
    assert await again == expected
    await tiny.until_idle()
