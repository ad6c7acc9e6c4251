"""Every adapter's answers through the server equal PEFT's, in mixed concurrent load, streamed or not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.support.demo import ADAPTERS, adapter_names, demo_model, peft_answers, prompts
from tests.support.server import LiveServer

# PEFT asks transformers for it; neither is ours to change.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

MAX_TOKENS = 40
BASE = "base"


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return demo_model()


async def ask(client: AsyncOpenAI, model: str, messages: list[dict[str, str]], stream: bool) -> str:
    arguments = {"model": model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
    if not stream:
        answer = await client.chat.completions.create(**arguments)  # type: ignore[call-overload]
        return answer.choices[0].message.content or ""
    chunks = await client.chat.completions.create(**arguments, stream=True)  # type: ignore[call-overload]
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])


async def ask_all(url: str, conversations: list[list[dict[str, str]]], stream: bool) -> dict[str, list[str]]:
    """All prompts × all models at once."""
    models = [BASE, *adapter_names()]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=1200, max_retries=0) as client:
        pairs = [(model, messages) for messages in conversations for model in models]
        texts = await asyncio.gather(*(ask(client, model, messages, stream) for model, messages in pairs))
    answers: dict[str, list[str]] = {model: [] for model in models}
    for (model, _), text in zip(pairs, texts, strict=True):
        answers[model].append(text)
    return answers


def check_parity(server: LiveServer, model_dir: Path, conversations: list[list[dict[str, str]]]) -> None:
    whole = asyncio.run(ask_all(server.url, conversations, stream=False))
    streamed = asyncio.run(ask_all(server.url, conversations, stream=True))
    assert streamed == whole
    for model in whole:
        adapter = None if model == BASE else ADAPTERS / model
        expected = [answer.text for answer in peft_answers(model_dir, adapter, conversations, MAX_TOKENS)]
        differing = [
            json.dumps({"prompt": messages[-1]["content"], "peft": want, "punica": got})
            for messages, want, got in zip(conversations, expected, whole[model], strict=True)
            if want != got
        ]
        assert not differing, f"{model}: {len(differing)} of {len(expected)} answers differ\n" + "\n".join(differing)
    # The control: were adapters ignored or mixed up, these could not all differ.
    all_answers = [tuple(texts) for texts in whole.values()]
    assert len(set(all_answers)) == len(all_answers), "two models gave the same answers to every prompt"


def test_answers_equal_pefts_on_some_prompts(demo_server: LiveServer, model_dir: Path) -> None:
    check_parity(demo_server, model_dir, prompts()[::10])


@pytest.mark.slow
def test_answers_equal_pefts_on_all_prompts(demo_server: LiveServer, model_dir: Path) -> None:
    conversations = prompts()
    assert len(conversations) == 30
    check_parity(demo_server, model_dir, conversations)
