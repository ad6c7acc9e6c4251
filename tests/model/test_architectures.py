"""Every supported shape of architecture gives the logits of its own transformers model."""

from __future__ import annotations

import pytest
import torch

from tests.support.driven_runner import DrivenRunner, random_prompt
from tests.support.tiny_models import TINY_MODELS, VOCAB_SIZE

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def hf_logits(name: str, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return TINY_MODELS[name]()(torch.tensor([token_ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("budget", [1000, 16, 7])
def test_whole_or_chunked_prompts_and_decode_in_one_batch_give_the_logits_of_transformers(
    name: str, budget: int
) -> None:
    driven = DrivenRunner(TINY_MODELS[name]())
    sequences = [driven.sequence(random_prompt(length, VOCAB_SIZE)) for length in (1, 5, 16, 17, 40)]
    driven.generate(sequences, new_tokens=6, budget=budget)
    for sequence in sequences:
        expected = hf_logits(name, sequence.token_ids[:-1])[sequence.num_prompt - 1 :]
        torch.testing.assert_close(driven.logits_of(sequence), expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["mistral_window", "gemma2"])
def test_a_sliding_window_changes_what_long_prompts_say(name: str) -> None:
    prompt = random_prompt(40, VOCAB_SIZE)
    base = TINY_MODELS[name]()
    windowed = hf_logits(name, prompt)[-1]
    base.config.sliding_window = 1000
    for layer in base.model.layers:
        layer.self_attn.sliding_window = 1000 if getattr(layer.self_attn, "sliding_window", None) else None
    driven = DrivenRunner(base)
    sequence = driven.sequence(prompt)
    driven.step([sequence])
    assert not torch.allclose(driven.logits_of(sequence)[0], windowed, **TOLERANCE)


def test_the_order_of_the_rows_does_not_change_an_answer() -> None:
    prompts = [random_prompt(length, VOCAB_SIZE) for length in (3, 9, 30)]
    answers = []
    for order in ((0, 1, 2), (2, 0, 1)):
        driven = DrivenRunner(TINY_MODELS["llama"]())
        sequences = {index: driven.sequence(prompts[index]) for index in order}
        driven.generate(list(sequences.values()), new_tokens=12)
        answers.append([sequences[index].token_ids for index in range(3)])
    assert answers[0] == answers[1]


def test_a_prompt_that_joins_running_sequences_changes_nothing_for_them() -> None:
    prompt = random_prompt(11, VOCAB_SIZE)
    alone, joined = (DrivenRunner(TINY_MODELS["qwen3"]()) for _ in range(2))
    solo = alone.sequence(prompt)
    alone.generate([solo], new_tokens=10)
    first = joined.sequence(prompt)
    joined.generate([first], new_tokens=4)
    joined.generate([first, joined.sequence(random_prompt(25, VOCAB_SIZE))], new_tokens=10, budget=8)
    assert first.token_ids == solo.token_ids


def test_the_weights_exist_once() -> None:
    base = TINY_MODELS["smollm2"]()
    nbytes = sum(parameter.nbytes for parameter in base.parameters())
    loaded = DrivenRunner(base).loaded
    assert sum(parameter.nbytes for parameter in loaded.model.parameters()) == nbytes
    assert nbytes <= loaded.base_bytes < nbytes + 4096
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
