"""LangChain, LiteLLM and the Node SDK, used as their users use them: what they send is what must work."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import Settings
from punica_core.errors import AdapterMismatch, PunicaError
from punica_core.protocol import NewSequence
from tests.app.conftest import BASE, write_adapters
from tests.support.fake_engine import FakeEngine
from tests.support.thread_server import serving
from tests.support.tokenizer_folders import byte_level_tokenizer, write_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # these packages' own deprecations are not ours

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_client.py"
TOKENIZER = byte_level_tokenizer()
ANSWER = "Hi 😀!"
NODE_CLIENT = Path(__file__).resolve().parents[1] / "support" / "node_client.mjs"
NODE_SDK = "openai@6.49.0"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("clients")
    model_dir = write_folder(root / BASE, byte_level_tokenizer())
    adapters = write_adapters(root / "adapters")
    shutil.copytree(adapters / "sql", adapters / "org" / "tiny")
    chosen = Settings(model=str(model_dir), adapters=str(adapters))
    reply = TOKENIZER.encode(ANSWER).ids
    with serving(chosen, lambda: FakeEngine(model_dir=str(model_dir), reply=lambda sequence: reply)) as address:
        yield f"{address}/v1"


class TestLangChain:
    @pytest.fixture(scope="class")
    def options(self, url: str) -> Iterator[dict[str, Any]]:
        with httpx.Client() as http:  # its own would stay open
            yield {"model": "sql", "base_url": url, "api_key": "none", "max_retries": 0, "http_client": http}

    @pytest.fixture(scope="class")
    def chat(self, options: dict[str, Any]) -> Any:
        return pytest.importorskip("langchain_openai").ChatOpenAI(temperature=0, **options)

    def test_a_chat_is_answered(self, chat: Any) -> None:
        answer = chat.invoke([("system", "be brief"), ("human", "hello")])
        assert answer.content == ANSWER
        assert answer.response_metadata["finish_reason"] == "stop"
        assert answer.response_metadata["model_name"] == "sql"
        assert answer.usage_metadata["output_tokens"] == len(TOKENIZER.encode(ANSWER).ids) + 1

    def test_a_stream_adds_up_and_has_usage(self, chat: Any) -> None:
        chunks = list(chat.stream("hello", stream_usage=True))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert whole.content == ANSWER
        assert whole.usage_metadata["total_tokens"] > whole.usage_metadata["output_tokens"] > 0
        assert whole.response_metadata["finish_reason"] == "stop"

    def test_logprobs_stops_and_extensions_are_taken(self, chat: Any) -> None:
        bound = chat.bind(logprobs=True, top_logprobs=2, stop=["!"], seed=7, n=2, extra_body={"top_k": 5})
        answer = bound.invoke("hello")
        assert answer.content == ANSWER.removesuffix("!")
        assert len(answer.response_metadata["logprobs"]["content"]) == len(TOKENIZER.encode(ANSWER).ids)

    def test_many_at_once(self, chat: Any) -> None:
        assert [answer.content for answer in chat.batch(["a", "b", "c"])] == [ANSWER] * 3

    def test_a_prompt_that_is_too_long_is_what_it_calls_so(self, chat: Any) -> None:
        exceptions = pytest.importorskip("langchain_core.exceptions")
        with pytest.raises(exceptions.ContextOverflowError):
            chat.invoke("hello " * 500)

    def test_the_completion_model(self, options: dict[str, Any]) -> None:
        module = pytest.importorskip("langchain_openai")
        model = module.OpenAI(max_tokens=50, n=2, best_of=3, **options)
        result = model.generate(["one", "two"])
        assert [[choice.text for choice in choices] for choices in result.generations] == [[ANSWER] * 2] * 2
        streaming = module.OpenAI(max_tokens=50, **options)
        assert "".join(streaming.stream("one")) == ANSWER


class TestLiteLLM:
    MESSAGES = ({"role": "user", "content": "hello"},)

    @pytest.fixture(scope="class")
    def litellm(self) -> Iterator[Any]:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)  # it takes the thread's, or would leave one behind that nobody closes
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network at import
            module = pytest.importorskip("litellm")
            yield module
            for client in module.in_memory_llm_clients_cache.cache_dict.values():
                if hasattr(client, "close"):
                    client.close()
        asyncio.set_event_loop(None)
        loop.close()

    @pytest.fixture(params=["openai", "hosted_vllm"])
    def options(self, request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
        return {"model": f"{request.param}/sql", "api_base": url, "api_key": "none", "max_retries": 0}

    def test_a_chat_is_answered(self, litellm: Any, options: dict[str, Any]) -> None:
        answer = litellm.completion(messages=list(self.MESSAGES), temperature=0, **options)
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens > 0

    def test_a_stream_adds_up(self, litellm: Any, options: dict[str, Any]) -> None:
        chunks = litellm.completion(
            messages=list(self.MESSAGES), stream=True, stream_options={"include_usage": True}, **options
        )
        whole = litellm.stream_chunk_builder(list(chunks))
        assert whole.choices[0].message.content == ANSWER
        assert whole.usage.prompt_tokens > 0

    def test_a_text_completion(self, litellm: Any, url: str) -> None:
        answer = litellm.text_completion(
            model="text-completion-openai/sql", prompt="one", max_tokens=50, logprobs=1, api_base=url, api_key="none"
        )
        assert answer.choices[0].text == ANSWER

    def test_errors_are_what_it_calls_them(self, litellm: Any, options: dict[str, Any]) -> None:
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(messages=[{"role": "user", "content": "hello " * 500}], **options)
        with pytest.raises(litellm.BadRequestError, match="tools"):
            litellm.completion(
                messages=list(self.MESSAGES),
                tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
                **options,
            )
        options["model"] = options["model"] + "-not"
        with pytest.raises(litellm.NotFoundError, match="does not exist"):
            litellm.completion(messages=list(self.MESSAGES), **options)


@pytest.mark.parametrize("refused", [(), ("pirate", "sql")])
def test_the_example_shows_a_refusal_beside_the_answers(tmp_path: Path, refused: tuple[str, ...]) -> None:
    """sql is the last of the names, which the example streams."""
    model_dir = write_folder(tmp_path / BASE, byte_level_tokenizer())
    chosen = Settings(model=str(model_dir), adapters=str(write_adapters(tmp_path / "adapters")))

    def reply(sequence: NewSequence) -> list[int] | PunicaError:
        is_refused = sequence.adapter is not None and sequence.adapter.name in refused
        return AdapterMismatch("shapes differ") if is_refused else TOKENIZER.encode(ANSWER).ids

    with serving(chosen, lambda: FakeEngine(model_dir=str(model_dir), reply=reply)) as address:
        command = [sys.executable, str(EXAMPLE), "--base-url", f"{address}/v1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = {row[0].strip(): row[1] for line in done.stdout.splitlines() if len(row := line.split(" │ ")) == 2}
    assert {name for name, answer in told.items() if "400 - shapes differ" in answer} == set(refused)
    assert {name for name, answer in told.items() if answer == ANSWER} == {BASE, "pirate", "sql"} - set(refused)
    assert ("sql (streamed)" in done.stdout) == ("sql" not in refused)


@pytest.fixture
def node_folder(tmp_path: Path) -> Path:
    """A folder with the Node SDK. Skips where there is no Node or no registry, unless TESTS_REQUIRE names it."""
    reason = "needs node and npm"
    if shutil.which("node") and shutil.which("npm"):
        command = ("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(tmp_path), NODE_SDK)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return tmp_path
        reason = f"npm cannot install {NODE_SDK}: {done.stderr.strip()[-300:]}"
    if "node" in os.environ.get("TESTS_REQUIRE", "").split(","):
        pytest.fail(reason)
    pytest.skip(reason)


def test_the_node_sdk(url: str, node_folder: Path) -> None:
    script = shutil.copy(NODE_CLIENT, node_folder)
    done = subprocess.run(("node", script, url), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "models": [BASE, "org/tiny", "pirate", "sql"],
        "text": ANSWER,
        "streamed": ANSWER,
        "final": ANSWER,
        "logprobs": len(TOKENIZER.encode(ANSWER).ids),
        "usage": True,
        "echoed": f"a{ANSWER}",
        "retrieved": "org/tiny",
        "unknown": [True, "model_not_found"],
        "long": [True, "context_length_exceeded"],
    }


def told_by_example(base_url: str, **keys: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), "--base-url", base_url]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")} | keys
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_example_tells_in_a_line_that_no_server_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    done = told_by_example(nowhere)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{nowhere} does not answer. ")
    assert "--base-url" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_example_tells_in_a_line_that_a_key_is_wanted(tmp_path: Path) -> None:
    model_dir = write_folder(tmp_path / BASE, byte_level_tokenizer())
    chosen = Settings(model=str(model_dir), api_key="a-key-of-16-chars")
    reply = TOKENIZER.encode(ANSWER).ids
    with serving(chosen, lambda: FakeEngine(model_dir=str(model_dir), reply=lambda sequence: reply)) as address:
        for wrong in ({}, {"OPENAI_API_KEY": "another", "PUNICA_API_KEY": "a-key-of-16-chars"}):
            refused = told_by_example(f"{address}/v1", **wrong)
            assert refused.returncode == 1
            assert "OPENAI_API_KEY or else PUNICA_API_KEY" in refused.stderr
            assert ".." not in refused.stderr
            assert refused.stderr.count("\n") == 1
        for name in ("OPENAI_API_KEY", "PUNICA_API_KEY"):
            answered = told_by_example(f"{address}/v1", **{name: "a-key-of-16-chars"})
            assert answered.returncode == 0, answered.stderr
            assert ANSWER in answered.stdout
        elsewhere = told_by_example(address, OPENAI_API_KEY="a-key-of-16-chars")
    assert "404" in elsewhere.stderr
    assert "OPENAI_API_KEY" not in elsewhere.stderr
