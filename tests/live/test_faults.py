"""What a live server survives: dead workers, vanished clients, dead front ends, SIGTERM under load."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI

from tests.support.demo import ADAPTERS, adapter_names, demo_model
from tests.support.server import LiveServer, serve


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)


def idle(server: LiveServer) -> bool:
    return server.metric("punica_running") == 0 and server.metric("punica_waiting") == 0


def answer(url: str, model: str = "base", max_tokens: int = 8) -> str:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Count to five."}], temperature=0, max_tokens=max_tokens
    )
    return reply.choices[0].message.content or ""


def test_200_requests_with_random_cancels_all_end_and_leak_nothing(demo_server: LiveServer) -> None:
    before = answer(demo_server.url)
    chance = random.Random(5)
    models = ["base", *adapter_names()]

    async def one(client: AsyncOpenAI, index: int) -> str:
        model, patience = models[index % len(models)], chance.uniform(0.0, 6.0) if index % 2 else None
        call = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"Tell me about the number {index}."}],
            max_tokens=6,
            temperature=0,
        )
        try:
            reply = await asyncio.wait_for(call, patience)
        except TimeoutError:
            return "cancelled"
        return "answered" if reply.choices[0].message.content else "empty"

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=280) as client:
            return await asyncio.gather(*(one(client, index) for index in range(200)))

    outcomes = asyncio.run(all_of_them())
    assert outcomes.count("answered") >= 100
    assert outcomes.count("cancelled") > 0
    assert outcomes.count("answered") + outcomes.count("cancelled") == 200
    wait_for(lambda: idle(demo_server), 10, "running and waiting gauges return to 0")
    assert answer(demo_server.url) == before


def test_a_client_that_leaves_frees_its_sequence(demo_server: LiveServer) -> None:
    with httpx.stream(
        "POST",
        f"{demo_server.url}/v1/completions",
        json={"model": "base", "prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True},
        timeout=60,
    ) as response:
        lines = response.iter_lines()  # kept: a dropped iterator closes the connection
        next(lines)
        wait_for(lambda: demo_server.metric("punica_running") == 1, 10, "the stream runs")
    wait_for(lambda: idle(demo_server), 5, "the sequence of a vanished client ends")


@pytest.fixture
def own_server(tmp_path: Path) -> object:
    with serve(
        tmp_path / "log", "--model", str(demo_model()), "--adapters", str(ADAPTERS), "--served-model-name", "base"
    ) as server:
        yield server


def test_a_killed_worker_ends_its_requests_with_an_error_and_is_replaced(own_server: LiveServer) -> None:
    before = answer(own_server.url)
    (worker,) = own_server.worker_pids()

    async def under_load() -> list[BaseException | object]:
        async with AsyncOpenAI(base_url=f"{own_server.url}/v1", api_key="none", max_retries=0) as client:
            calls = [
                client.completions.create(
                    model="base", prompt=f"{index} is", max_tokens=1000, extra_body={"ignore_eos": True}
                )
                for index in range(8)
            ]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(1.5)
            os.kill(worker, signal.SIGKILL)
            started = time.monotonic()
            done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
            assert time.monotonic() - started < 5
            assert httpx.get(f"{own_server.url}/health").status_code == 503  # loading the next worker takes seconds
            return list(done)

    for outcome in asyncio.run(under_load()):
        assert isinstance(outcome, APIStatusError), outcome
        assert outcome.status_code >= 500
        assert outcome.code == "worker_lost"
    wait_for(lambda: httpx.get(f"{own_server.url}/ready").status_code == 200, 60, "a new worker takes over")
    assert own_server.worker_pids() != [worker]
    assert answer(own_server.url) == before


def test_signals_to_the_whole_process_group_leave_the_worker_to_the_front_end(demo_server: LiveServer) -> None:
    workers = demo_server.worker_pids()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(workers[0], signum)
    answer(demo_server.url)
    assert demo_server.worker_pids() == workers


def test_a_dead_front_end_takes_the_worker_with_it(own_server: LiveServer) -> None:
    (worker,) = own_server.worker_pids()
    own_server.process.kill()
    own_server.process.wait()
    wait_for(lambda: not Path(f"/proc/{worker}/exe").exists(), 5, "the worker ends")


def test_sigterm_finishes_running_streams_and_exits_cleanly(own_server: LiveServer) -> None:
    with httpx.stream(
        "POST",
        f"{own_server.url}/v1/completions",
        json={"model": "base", "prompt": "Once", "max_tokens": 60, "stream": True, "ignore_eos": True},
        timeout=60,
    ) as response:
        lines = response.iter_lines()
        next(lines)
        own_server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert own_server.process.wait(timeout=15) == 0
