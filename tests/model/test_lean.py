"""The forward pass in few calls: taken where it is the model's own, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from punica_core.model.loader import LoadedModel, prepare
from punica_core.model.probe import AttentionProbe
from tests.support.driven_runner import DrivenRunner, random_prompt
from tests.support.tiny_models import TINY_MODELS, TINY_SIZES, VOCAB_SIZE, spread

LIMIT = 256


def prepared(base: PreTrainedModel) -> LoadedModel:
    return prepare(base, Path("."), LIMIT)


def of_type(model_type: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**TINY_SIZES, **more)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    spread(model)
    return model.eval()


@pytest.mark.parametrize("name", ["smollm2", "llama", "qwen2", "qwen3", "mistral", "mistral_window"])
def test_common_decoders_run_in_few_calls(name: str) -> None:
    assert prepared(TINY_MODELS[name]()).lean is not None


@pytest.mark.parametrize("name", ["gemma2"])
def test_other_parts_run_as_transformers_wrote_them(name: str) -> None:
    assert prepared(TINY_MODELS[name]()).lean is None


@pytest.mark.parametrize(
    ("model_type", "special"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 1]}),
        ("granite", {"residual_multiplier": 0.5}),
        ("granite", {"logits_scaling": 2.0}),
    ],
)
def test_known_parts_put_together_differently_are_noticed_by_their_logits(
    model_type: str, special: dict[str, Any]
) -> None:
    assert prepared(of_type(model_type)).lean is not None
    assert prepared(of_type(model_type, **special)).lean is None


def changed(part: type, change: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]) -> PreTrainedModel:
    """A Llama whose second layer does something else with what `part` gets."""
    base = TINY_MODELS["llama"]()
    (found,) = (m for m in base.model.layers[1].children() if isinstance(m, part))
    plain = found.forward

    def forward(hidden_states: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return plain(change(hidden_states, others), **others)

    found.forward = forward
    return base


def scaled_far_out(hidden: torch.Tensor, others: dict[str, torch.Tensor]) -> torch.Tensor:
    """As models do whose attention changes with the position."""
    return hidden * (1 + 0.5 * (others["position_ids"][..., None] > 100))


def test_a_difference_at_far_positions_alone_is_noticed() -> None:
    assert prepared(changed(LlamaAttention, scaled_far_out)).lean is None
    assert prepared(changed(LlamaAttention, lambda hidden, others: hidden)).lean is not None


def test_a_difference_in_one_layer_is_noticed() -> None:
    assert prepared(changed(LlamaMLP, lambda hidden, others: hidden * 1.1)).lean is None
    assert prepared(changed(LlamaMLP, lambda hidden, others: hidden)).lean is not None


def test_what_only_loud_numbers_would_show_is_noticed() -> None:
    assert prepared(of_type("olmo")).lean is not None
    assert prepared(of_type("olmo", clip_qkv=8.0)).lean is None
    assert prepared(changed(LlamaMLP, lambda hidden, others: hidden.clamp(-12, 12))).lean is None


def test_a_trial_leaves_no_norm_loud() -> None:
    base = TINY_MODELS["llama"]()
    ids = torch.tensor([[5, 9, 3, 70, 8]])
    with torch.inference_mode():
        expected = base(ids, use_cache=False).logits[0]
        loaded = prepared(base)
        assert loaded.lean is not None
        got = loaded.lean(ids, torch.arange(5)[None], None, AttentionProbe())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_models_that_rotate_in_another_dtype_than_their_own_are_left_alone() -> None:
    """OLMo's positions stay in fp32."""
    assert prepared(of_type("olmo").to(torch.bfloat16)).lean is None


@pytest.mark.parametrize("rows", [[4], [0, 4], [3, 1, 1], []])
def test_logits_are_those_of_the_rows_asked_for(rows: list[int]) -> None:
    loaded = prepared(TINY_MODELS["qwen3"]())
    assert loaded.lean is not None
    ids, positions = torch.tensor([[5, 9, 3, 70, 8]]), torch.arange(5)[None]
    with torch.inference_mode():
        whole = loaded.model(input_ids=ids, position_ids=positions, use_cache=False, paged=AttentionProbe()).logits[0]
        got = loaded.lean(ids, positions, torch.tensor(rows, dtype=torch.long), AttentionProbe())
    torch.testing.assert_close(got, whole[rows], rtol=1e-4, atol=1e-4)


def test_a_step_that_needs_no_logits_computes_its_keys_and_values() -> None:
    driven = DrivenRunner(TINY_MODELS["llama"]())
    sequence = driven.sequence(random_prompt(2, VOCAB_SIZE))
    driven.step([sequence], budget=1)
    assert not sequence.num_generated
    driven.step([sequence], budget=1)
    with torch.inference_mode():
        expected = TINY_MODELS["llama"]()(torch.tensor([sequence.token_ids[:2]]), use_cache=False).logits[0, -1:]
    torch.testing.assert_close(driven.logits_of(sequence), expected, rtol=1e-4, atol=1e-4)


def test_sixteen_bit_models_run_in_few_calls_too() -> None:
    assert prepared(TINY_MODELS["llama"]().to(torch.bfloat16)).lean is not None
