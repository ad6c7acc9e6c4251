"""What a tensor's name says, in every spelling."""

from __future__ import annotations

import pytest

from punica_core.adapters.names import TensorName, TensorRole, classify, method_of, parse_name

Q = "model.layers.0.self_attn.q_proj"
NAMES: dict[str, tuple[str, TensorRole, str]] = {
    f"base_model.model.{Q}.lora_A.weight": (Q, TensorRole.LORA_A, ""),
    f"{Q}.lora_B.weight": (Q, TensorRole.LORA_B, ""),
    f"{Q}.lora_A.mine.weight": (Q, TensorRole.LORA_A, "mine"),
    f"{Q}.lora_B.mine.bias": (Q, TensorRole.LORA_BIAS, "mine"),
    f"{Q}.lora_A.bias": (Q, TensorRole.UNKNOWN, ""),
    f"{Q}.lora_A.a.b.weight": (Q, TensorRole.UNKNOWN, ""),
    f"{Q}.lora_magnitude_vector": (Q, TensorRole.DORA_MAGNITUDE, ""),
    f"{Q}.lora_magnitude_vector.weight": (Q, TensorRole.DORA_MAGNITUDE, ""),
    f"{Q}.lora_magnitude_vector.mine": (Q, TensorRole.DORA_MAGNITUDE, "mine"),
    f"{Q}.lora_magnitude_vector.mine.weight": (Q, TensorRole.DORA_MAGNITUDE, "mine"),
    f"{Q}.bias": (Q, TensorRole.BIAS, ""),
    f"{Q}.base_layer.bias": (Q, TensorRole.BIAS, ""),
    f"{Q}.base_layer.weight": (Q, TensorRole.BASE_WEIGHT, ""),
    f"{Q}.weight": (Q, TensorRole.FULL_WEIGHT, ""),
    "model.embed_tokens.lora_embedding_A": ("model.embed_tokens", TensorRole.EMBEDDING_A, ""),
    "model.embed_tokens.lora_embedding_B.mine": ("model.embed_tokens", TensorRole.EMBEDDING_B, "mine"),
    "model.embed_tokens.token_adapter.trainable_tokens_delta": ("model.embed_tokens", TensorRole.TOKEN_DELTA, ""),
    "model.embed_tokens.token_adapter.base_layer.weight": ("model.embed_tokens", TensorRole.BASE_WEIGHT, ""),
    "lm_head.modules_to_save.mine.weight": ("lm_head", TensorRole.FULL_WEIGHT, "mine"),
    "lm_head.original_module.weight": ("lm_head", TensorRole.BASE_WEIGHT, ""),
    f"base_model.model._orig_mod.{Q}.lora_A.weight": (Q, TensorRole.LORA_A, ""),
    f"module.base_model.model.{Q}.lora_A.weight": (Q, TensorRole.LORA_A, ""),
    "model.layers.0._fsdp_wrapped_module.mlp.up_proj.lora_A.weight": (
        "model.layers.0.mlp.up_proj",
        TensorRole.LORA_A,
        "",
    ),
    "default.q.lora_A.default.weight": ("default.q", TensorRole.LORA_A, "default"),
    "lora_A.weight": ("lora_A", TensorRole.FULL_WEIGHT, ""),
    "a.lora_A": ("a", TensorRole.UNKNOWN, ""),
    "..lora_A.weight": (".", TensorRole.LORA_A, ""),
    "weight": ("", TensorRole.UNKNOWN, ""),
    "": ("", TensorRole.UNKNOWN, ""),
}


@pytest.mark.parametrize(("name", "parts"), NAMES.items(), ids=NAMES.keys())
def test_every_spelling_is_understood(name: str, parts: tuple[str, TensorRole, str]) -> None:
    assert parse_name(name) == TensorName(*parts)
    assert classify(name) == parts[:2]


def test_other_methods_are_known_by_their_tensors() -> None:
    assert method_of(f"{Q}.hada_w1_a") == "LoHa"
    assert method_of(f"{Q}.lora_E") == "AdaLoRA"
    assert method_of(f"{Q}.lora_A.weight") == ""
