"""Requests of every kind in one batch, each as if it were alone; and the requests that evaluation harnesses make."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.support.demo import adapter_names
from tests.support.server import LiveServer

TOLERANCE = 1e-3
"""Of logprobs: another batch shape sums in another order."""

PROMPT = "The three primary colours are"
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "logprobs": {"temperature": 0, "logprobs": 5, "echo": True},
    "penalties": {"temperature": 0, "frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 1.5},
    "bias": {"temperature": 0, "logit_bias": {"28": 100}},
    "seed": {"temperature": 1.5, "seed": 11},
    "truncated": {"temperature": 1.5, "seed": 11, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "n": 2},
    "scored": {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 2},
    "best": {"temperature": 1.5, "seed": 5, "best_of": 3},
}


def bodies() -> list[dict[str, Any]]:
    models = ["base", *adapter_names()[:2]]
    return [
        {"model": model, "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True} | variant
        for variant in VARIANTS.values()
        for model in models
    ]


def numbers(value: Any) -> list[float]:
    """All logprobs in an answer, in order."""
    if isinstance(value, dict):
        return [number for entry in value.values() for number in numbers(entry)]
    if isinstance(value, list):
        return [number for entry in value for number in numbers(entry)]
    return [value] if isinstance(value, float) else []


def test_mixed_requests_get_what_they_get_alone(demo_server: LiveServer) -> None:
    async def all_answers() -> tuple[list[Any], list[Any]]:
        async with httpx.AsyncClient(base_url=demo_server.url, timeout=120) as http:

            async def answer(body: dict[str, Any]) -> Any:
                response = await http.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                return response.json()["choices"]

            alone = [await answer(body) for body in bodies()]
            return alone, await asyncio.gather(*map(answer, bodies()))

    alone, mixed = asyncio.run(all_answers())
    for body, one, other in zip(bodies(), alone, mixed, strict=True):
        assert [choice["text"] for choice in one] == [choice["text"] for choice in other], body
        assert numbers(one) == pytest.approx(numbers(other), abs=TOLERANCE), body
    texts = [[choice["text"] for choice in choices] for choices in alone]
    base = dict(zip(VARIANTS, texts[::3], strict=True))
    assert base["logprobs"] == [PROMPT + base["greedy"][0]]
    assert base["truncated"][0] != base["truncated"][1]  # choices have seeds of their own
    for variant in ("penalties", "bias", "seed"):
        assert base[variant] != base["greedy"], f"{variant} has no effect"
    for start in range(0, 6, 3):
        assert len({texts[start][0], texts[start + 1][0], texts[start + 2][0]}) > 1, "adapters have no effect"


def test_the_chosen_tokens_logprob_is_the_top_one_when_greedy(demo_server: LiveServer) -> None:
    body = {
        "model": adapter_names()[0],
        "messages": [{"role": "user", "content": "Count to five."}],
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answer = httpx.post(f"{demo_server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert entries
    for entry in entries:
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        assert entry["token"] == entry["top_logprobs"][0]["token"]


@pytest.mark.parametrize("model_index", [0, 1])
def test_loglikelihood_as_lm_evaluation_harness_asks_for_it(demo_server: LiveServer, model_index: int) -> None:
    """Its `local-completions` sends token ids of context and continuation with max_tokens 1, echo and logprobs, and
    reads the entries between the context and the one generated token."""
    model = ["base", adapter_names()[0]][model_index]
    with httpx.Client(base_url=demo_server.url, timeout=60) as http:

        def ids(text: str) -> list[int]:
            return http.post("/tokenize", json={"model": model, "prompt": text}).raise_for_status().json()["tokens"]

        context = ids("The capital of France is")
        continuations = [ids(" Paris"), ids(" London"), ids(" potato")]
        greedy = http.post(
            "/v1/completions", json={"model": model, "prompt": context, "max_tokens": 1, "temperature": 0}
        )
        prompts = [context + continuation for continuation in continuations]
        body = {
            "model": model,
            "prompt": prompts,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        choices = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        texts = [http.post("/detokenize", json={"tokens": prompt}).json()["prompt"] for prompt in prompts]
    scores, are_greedy = [], []
    for choice, prompt in zip(sorted(choices, key=lambda choice: choice["index"]), prompts, strict=True):
        logprobs = choice["logprobs"]
        assert {len(entries) for entries in logprobs.values()} == {len(prompt) + 1}
        assert logprobs["token_logprobs"][0] is None
        tokens = logprobs["tokens"][len(context) : -1]
        tops = logprobs["top_logprobs"][len(context) : -1]
        scores.append(sum(logprobs["token_logprobs"][len(context) : -1]))
        are_greedy.append(all(token == max(top, key=top.get) for token, top in zip(tokens, tops, strict=True)))
    assert scores[0] > scores[1] > scores[2]
    expected = greedy.json()["choices"][0]["text"]
    assert are_greedy == [text.endswith(f"is{expected}") for text in texts]
