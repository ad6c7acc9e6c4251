"""A real server and a real engine on a tiny model: tenants kept apart, adapters loaded and unloaded while it runs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from punica_core.adapter_tools.base import read_base
from punica_core.adapter_tools.pack import pack
from tests.support.peft_adapters import peft_logits, save_peft_adapter, tiny_llama
from tests.support.server import LiveServer, serve
from tests.support.tokenizer_folders import byte_level_tokenizer, write_folder

ACME, BETA, BOSS, LATER = "acme-secret-1", "beta-secret-2", "boss-secret-3", "later-secret-4"
KEYS = f"""
keys:
  - {{name: acme, key: {ACME}}}
  - {{name: beta, key: {BETA}}}
  - {{name: boss, key: {BOSS}, admin: true}}
"""
PROMPT = [(7 * index) % 250 for index in range(100)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base: the model; more/{tuned,foreign}: an adapter of it and one of another base; keys.yaml."""
    root = tmp_path_factory.mktemp("tenants")
    write_folder(root / "base", byte_level_tokenizer())
    tiny_llama().save_pretrained(root / "base")
    save_peft_adapter(root / "more" / "tuned")
    save_peft_adapter(root / "more" / "foreign", tiny_llama(hidden_size=128))
    (root / "keys.yaml").write_text(KEYS)
    return root


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[LiveServer]:
    flags = ("--model", str(place / "base"), "--adapter-roots", str(place / "more"), "--open-metrics")
    flags += ("--api-keys-file", str(place / "keys.yaml"), "--device", "cpu", "--kv-tokens", "8192")
    with serve(place / "log", *flags) as started:
        yield started


def post(server: LiveServer, token: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers={"authorization": f"Bearer {token}"}, timeout=60)


def complete(server: LiveServer, token: str, model: str = "base", **body: Any) -> dict[str, Any]:
    default = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    response = post(server, token, "/v1/completions", model=model, **(default | body))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def tokens_of(answer: dict[str, Any]) -> list[str]:
    tokens: list[str] = answer["choices"][0]["logprobs"]["tokens"]
    return tokens


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def peft_ids(folder: Path, count: int) -> list[int]:
    """Greedy tokens after PROMPT, by PEFT itself."""
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(int(torch.argmax(peft_logits(folder, ids)[-1])))
    return ids[len(PROMPT) :]


def test_one_tenant_never_gets_anothers_cached_prefix(server: LiveServer) -> None:
    first, again = complete(server, ACME), complete(server, ACME)
    other, other_again = complete(server, BETA), complete(server, BETA)
    assert cached(first) == 0
    assert cached(again) >= 80  # the cache works
    assert cached(other) == 0
    assert cached(other_again) >= 80
    assert tokens_of(first) == tokens_of(again) == tokens_of(other) == tokens_of(other_again)


def test_an_adapter_is_loaded_served_as_peft_does_unloaded_and_its_memory_given_back(
    server: LiveServer, place: Path
) -> None:
    base = tokens_of(complete(server, ACME))
    refused = post(server, BOSS, "/v1/load_lora_adapter", lora_name="tuned", lora_path="foreign")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_mismatch")
    assert "128" in refused.json()["error"]["message"]
    assert "64" in refused.json()["error"]["message"]
    assert post(server, ACME, "/v1/load_lora_adapter", lora_name="tuned", lora_path="tuned").status_code == 403
    assert post(server, ACME, "/v1/completions", model="tuned", prompt="x").status_code == 404
    assert server.metric("punica_adapters_host") == 0

    loaded = post(server, BOSS, "/v1/load_lora_adapter", lora_name="tuned", lora_path=str(place / "more" / "tuned"))
    assert loaded.status_code == 200, loaded.text
    alone = complete(server, ACME, "tuned", max_tokens=300)
    assert tokens_of(alone)[:12] != base
    ids = peft_ids(place / "more" / "tuned", 12)
    expected = post(server, ACME, "/detokenize", model="tuned", tokens=ids).json()["prompt"]
    assert complete(server, ACME, "tuned")["choices"][0]["text"] == expected
    wait_for(lambda: server.metric("punica_adapters_host") == 1, "the adapter is in memory")

    body = {"model": "tuned", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {ACME}"}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, headers=headers, timeout=60
    ) as stream:
        lines = stream.iter_lines()
        texts = [next(line for line in lines if line)]
        assert post(server, BOSS, "/v1/unload_lora_adapter", lora_name="tuned").status_code == 200
        assert post(server, ACME, "/v1/completions", model="tuned", prompt="x").status_code == 404
        texts += [line for line in lines if line]
    assert texts.pop() == "data: [DONE]"
    streamed = "".join(json.loads(text.removeprefix("data: "))["choices"][0]["text"] for text in texts)
    assert streamed == alone["choices"][0]["text"]  # to its end on the adapter it began with
    wait_for(lambda: server.metric("punica_adapters_host") == 0, "the adapter's memory is given back")
    assert tokens_of(complete(server, ACME)) == base


def test_a_packed_adapter_answers_as_its_folder(server: LiveServer, place: Path) -> None:
    base = read_base(str(place / "base"))
    file = place / "more" / "packed.punica"
    pack(str(place / "more" / "tuned"), str(file), base, torch.float32)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    for name, path in (("folder", "tuned"), ("packed", "packed.punica")):
        assert post(server, BOSS, load, lora_name=name, lora_path=path).status_code == 200
    answers = [complete(server, ACME, name) for name in ("folder", "packed", "base")]
    tokens, logprobs = zip(
        *((tokens_of(a), a["choices"][0]["logprobs"]["token_logprobs"]) for a in answers), strict=True
    )
    assert tokens[0] == tokens[1] != tokens[2]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    file.write_bytes(file.read_bytes()[:-1])
    refused = post(server, BOSS, load, lora_name="cut", lora_path="packed.punica")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_invalid")
    for name in ("folder", "packed"):
        assert post(server, BOSS, unload, lora_name=name).status_code == 200
    wait_for(lambda: server.metric("punica_adapters_host") == 0, "the adapters' memory is given back")


def test_a_loaded_adapter_survives_the_worker(server: LiveServer) -> None:
    assert post(server, BOSS, "/v1/load_lora_adapter", lora_name="kept", lora_path="tuned").status_code == 200
    before = tokens_of(complete(server, ACME, "kept"))
    (worker,) = server.worker_pids()
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code != 200, "the loss is noticed")
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "a new worker is ready")
    assert tokens_of(complete(server, ACME, "kept")) == before


def test_keys_change_while_the_server_runs_and_are_never_written_down(server: LiveServer, place: Path) -> None:
    def is_valid(token: str) -> bool:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200

    assert (is_valid(BETA), is_valid(LATER)) == (True, False)
    (place / "keys.yaml").write_text(KEYS.replace(BETA, LATER))
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: is_valid(LATER), "the new key is valid")
    assert not is_valid(BETA)
    log = server.log.read_text()
    assert "Keys read again: 3 in all" in log
    for token in (ACME, BETA, BOSS, LATER):
        assert token not in log
        assert token not in httpx.get(f"{server.url}/metrics").text
