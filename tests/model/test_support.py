"""What the config alone rules out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from punica_core.errors import ConfigError
from punica_core.model.support import check_supported, max_model_len


def config(**keys: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"model_type": "made_up", "max_position_embeddings": 4096} | keys))


def test_a_plain_decoder_is_supported() -> None:
    check_supported(config(architectures=["MadeUpForCausalLM"], layer_types=["full_attention", "sliding_attention"]))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"is_causal": False}, "not causal"),
        ({"use_bidirectional_attention": True}, "not causal"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"vision_config": {"depth": 2}}, "images"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"architectures": ["MadeUpForSequenceClassification"]}, "MadeUpForSequenceClassification"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check_supported(config(**keys))
    assert "made_up" in caught.value.message


def test_the_length_is_the_models_unless_a_shorter_one_is_asked_for() -> None:
    assert max_model_len(config(), 0) == 4096
    assert max_model_len(config(), 100) == 100


def test_more_positions_than_the_model_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"5000.*4096"):
        max_model_len(config(), 5000)


def test_a_model_without_a_stated_limit_needs_one() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        max_model_len(SimpleNamespace(), 0)


def test_longrope_is_fixed_to_the_length_before_its_frequencies_change() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 1024}
    assert max_model_len(config(rope_parameters=rope), 0) == 1024
    with pytest.raises(ConfigError, match="longrope"):
        max_model_len(config(rope_parameters=rope), 1025)


def test_dynamic_rope_is_fixed_to_the_length_before_its_frequencies_change() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    assert max_model_len(config(rope_parameters=rope), 0) == 4096
    with pytest.raises(ConfigError, match="dynamic RoPE"):
        max_model_len(config(rope_parameters=rope), 4097)


def test_each_kind_of_layer_may_have_its_own_rope() -> None:
    ropes = {"full_attention": {"rope_type": "linear"}, "sliding_attention": {"rope_type": "no_such_rope"}}
    with pytest.raises(ConfigError, match="no_such_rope"):
        max_model_len(config(rope_parameters=ropes), 0)
