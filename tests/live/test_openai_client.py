"""The official OpenAI SDK and curl against a live server on the demo model."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from tests.support.demo import adapter_names, prompts
from tests.support.server import LiveServer

MAX_TOKENS = 24


@pytest.fixture
def client(demo_server: LiveServer) -> OpenAI:
    return OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0)


def ask(client: OpenAI, model: str, content: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=MAX_TOKENS
    )
    assert answer.model == model
    return answer.choices[0].message.content or ""


def test_models_lists_the_base_and_every_adapter(client: OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {"base", *adapter_names()}
    for name in adapter_names():
        assert models[name].model_dump()["parent"] == "base"


def test_mixed_load_gives_each_request_its_solo_answer(client: OpenAI, demo_server: LiveServer) -> None:
    models = ["base", *adapter_names()]
    questions = [conversation[-1]["content"] for conversation in prompts()[:2]]
    pairs = [(model, question) for question in questions for model in models]
    solo = [ask(client, model, question) for model, question in pairs]

    async def all_at_once() -> list[str]:
        async with AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as concurrent:
            answers = await asyncio.gather(
                *(
                    concurrent.chat.completions.create(
                        model=model,
                        messages=[{"role": "user", "content": question}],
                        temperature=0,
                        max_tokens=MAX_TOKENS,
                    )
                    for model, question in pairs
                )
            )
        return [answer.choices[0].message.content or "" for answer in answers]

    assert asyncio.run(all_at_once()) == solo
    for start in range(0, len(pairs), len(models)):
        assert len(set(solo[start : start + len(models)])) > 2, "adapters have no visible effect"


def test_a_stream_joins_to_the_whole_answer_and_reports_usage(client: OpenAI) -> None:
    name = adapter_names()[0]
    content = prompts()[0][-1]["content"]
    whole = ask(client, name, content)
    chunks = list(
        client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert {chunk.model for chunk in chunks} == {name}
    assert len({chunk.id for chunk in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= MAX_TOKENS


def test_completions_continue_a_raw_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model="base", prompt="The capital of France is", temperature=0, max_tokens=6)
    assert "Paris" in answer.choices[0].text


def test_seeded_sampling_repeats_and_other_seeds_differ(client: OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.chat.completions.create(
            model="base",
            messages=[{"role": "user", "content": "Tell me a story."}],
            temperature=1.0,
            seed=seed,
            max_tokens=MAX_TOKENS,
        )
        return answer.choices[0].message.content or ""

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in (7, 8, 9)}) > 1


def test_an_unknown_model_is_404_and_names_close_matches(client: OpenAI) -> None:
    name = adapter_names()[0]
    with pytest.raises(NotFoundError, match=name) as caught:
        ask(client, name[:-1], "hello")
    assert caught.value.code == "model_not_found"


def test_a_prompt_longer_than_the_context_names_both_numbers(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="maximum context length") as caught:
        ask(client, "base", "word " * 20_000)
    assert caught.value.code == "context_length_exceeded"


def test_a_stop_string_ends_the_answer_and_is_not_in_it(client: OpenAI) -> None:
    free = client.completions.create(model="base", prompt="1 2 3 4 5 6 7", temperature=0, max_tokens=12).choices[0]
    stop = free.text.strip()[2:5]
    cut = client.completions.create(model="base", prompt="1 2 3 4 5 6 7", temperature=0, max_tokens=12, stop=stop)
    assert cut.choices[0].finish_reason == "stop"
    assert stop not in cut.choices[0].text
    assert free.text.startswith(cut.choices[0].text)


def test_curl_gets_an_answer(demo_server: LiveServer) -> None:
    body = {"model": adapter_names()[0], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    url = f"{demo_server.url}/v1/chat/completions"
    done = subprocess.run(
        ["curl", "-sS", "--fail", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)],
        check=True,
        capture_output=True,
    )
    answer = json.loads(done.stdout)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"]


def test_the_front_end_never_imports_torch(demo_server: LiveServer) -> None:
    (worker,) = demo_server.worker_pids()
    assert "libtorch" not in Path(f"/proc/{demo_server.process.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{worker}/maps").read_text()
