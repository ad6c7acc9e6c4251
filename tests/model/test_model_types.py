"""Many model types of transformers, tiny and random: each one is right or is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from punica_core.errors import ConfigError
from punica_core.model.support import check_supported, max_model_len
from tests.support.driven_runner import DrivenRunner, random_prompt
from tests.support.tiny_models import TINY_SIZES, VOCAB_SIZE, spread

SERVED: dict[str, dict[str, Any]] = {
    "phi3": {},
    "phi": {"num_key_value_heads": 6},
    "gemma": {"head_dim": 12},
    "gemma3_text": {"head_dim": 12, "sliding_window": 7},
    "olmo2": {},
    "starcoder2": {},
    "granite": {},
    "cohere2": {"sliding_window": 7},
    "smollm3": {},
    "glm4": {},
    "gpt_neox": {},
    "exaone4": {"sliding_window": 7},
    "ministral": {"head_dim": 8, "sliding_window": 7},
    "helium": {"head_dim": 8},
}
REFUSED = {
    "mixtral": "mixture of experts",
    "mamba": "linear_attention",
    "bloom": "0 of its 3 layers",
    "stablelm": "do not pass keywords",
    "diffllama": "several attentions",
}


def build(model_type: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**TINY_SIZES, **more}))
    spread(model)
    return model.eval()


def try_to_serve(model: PreTrainedModel) -> None:
    check_supported(model.config)
    max_model_len(model.config, 256)
    DrivenRunner(model)


@pytest.mark.parametrize("model_type", SERVED)
def test_a_served_type_gives_the_logits_of_transformers(model_type: str) -> None:
    reference = build(model_type, **SERVED[model_type])
    check_supported(reference.config)
    driven = DrivenRunner(copy.deepcopy(reference))
    sequences = [driven.sequence(random_prompt(length, VOCAB_SIZE)) for length in (3, 20, 40)]
    driven.generate(sequences, new_tokens=4, budget=16)
    for sequence in sequences:
        with torch.inference_mode():
            expected = reference(torch.tensor([sequence.token_ids[:-1]]), use_cache=False).logits[0]
        torch.testing.assert_close(
            driven.logits_of(sequence), expected[sequence.num_prompt - 1 :], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_that_cannot_be_right_is_refused_with_its_reason(model_type: str) -> None:
    model = build(model_type)
    with pytest.raises(ConfigError, match=REFUSED[model_type]):
        try_to_serve(model)
