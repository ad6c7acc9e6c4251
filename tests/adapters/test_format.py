"""What is refused, and that the refusal names the fault: adapter_config.json, the file's header, the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from punica_core.adapters.format import ModelShapes, TensorRole, classify
from punica_core.errors import (
    AdapterInvalid,
    AdapterMismatch,
    AdapterTooLarge,
    AdapterUnsupported,
)
from punica_core.lora.weights import load_adapter
from tests.support.adapter_loading import refusal
from tests.support.peft_adapters import (
    ALL_LINEARS,
    adapter_ref,
    edit_config,
    edit_tensors,
    linear_shapes,
    save_peft_adapter,
    tiny_llama,
)

PREFIX = "base_model.model."
FIRST_A = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
FIRST_B = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_B.weight"


def add(folder: Path, **tensors: torch.Tensor) -> None:
    edit_tensors(folder, lambda found: found | tensors)


def rename(folder: Path, old: str, new: str) -> None:
    edit_tensors(folder, lambda found: {name.replace(old, new): tensor for name, tensor in found.items()})


def test_the_undamaged_adapter_is_accepted(adapter: Path, shapes: ModelShapes) -> None:
    weights = load_adapter(adapter_ref(adapter), shapes, torch.float32, 8)
    assert len(weights.modules) == 3 * len(ALL_LINEARS)


UNSUPPORTED_CONFIG: dict[str, dict[str, Any]] = {
    "peft_type": {"peft_type": "IA3"},
    "task_type": {"task_type": "SEQ_CLS"},
    "use_dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [5, 9]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1, 2]},
    "layer_replication": {"layer_replication": [[0, 2], [1, 3]]},
    "target_parameters": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "megatron_config": {"megatron_config": {"tensor_model_parallel_size": 2}},
    "enable_lora": {"enable_lora": [True, False, True]},
    "use_qalora": {"use_qalora": True},
    "use_bdlora": {"use_bdlora": {"nblocks": 2}},
    "arrow_config": {"arrow_config": {"top_k": 2}},
    "kasa_config": {"kasa_config": {"beta": 0.1}},
    "init_lora_weights": {"init_lora_weights": "pissa_niter_4"},
    "use_future_maths": {"use_future_maths": True},
    "rank_pattern": {"rank_pattern": {"(.*a)+b": 4}},
}


@pytest.mark.parametrize(("key", "change"), UNSUPPORTED_CONFIG.items(), ids=UNSUPPORTED_CONFIG.keys())
def test_an_option_that_changes_the_maths_is_refused_by_name(
    adapter: Path, shapes: ModelShapes, key: str, change: dict[str, Any]
) -> None:
    edit_config(adapter, **change)
    error = refusal(adapter, shapes)
    assert isinstance(error, AdapterUnsupported)
    assert key in error.message


INVALID_CONFIG: dict[str, tuple[str, dict[str, Any]]] = {
    "r as text": ("r is '8'", {"r": "8"}),
    "r negative": ("r is -1", {"r": -1}),
    "r zero": ("r is 0", {"r": 0}),
    "r true": ("r is True", {"r": True}),
    "r null": ("no r;", {"r": None}),
    "lora_alpha null": ("no lora_alpha", {"lora_alpha": None}),
    "lora_alpha text": ("lora_alpha is '16'", {"lora_alpha": "16"}),
    "lora_alpha huge": ("lora_alpha is", {"lora_alpha": 10**400}),
    "use_rslora text": ("use_rslora is 'no'", {"use_rslora": "no"}),
    "peft_type null": ("no peft_type", {"peft_type": None}),
    "rank_pattern list": ("rank_pattern is [", {"rank_pattern": [4]}),
    "rank_pattern text": ("rank_pattern['q_proj'] is 'x'", {"rank_pattern": {"q_proj": "x"}}),
    "alpha_pattern broken": ("not a regular expression", {"alpha_pattern": {"q_proj[": 4}}),
}


@pytest.mark.parametrize(("words", "change"), INVALID_CONFIG.values(), ids=INVALID_CONFIG.keys())
def test_a_damaged_config_value_is_refused_by_name(
    adapter: Path, shapes: ModelShapes, words: str, change: dict[str, Any]
) -> None:
    edit_config(adapter, **change)
    error = refusal(adapter, shapes)
    assert isinstance(error, AdapterInvalid)
    assert words in error.message


INVALID_JSON: dict[str, tuple[str, bytes]] = {
    "not JSON": ("not valid JSON", b"{r: 8}"),
    "empty": ("not valid JSON", b""),
    "a list": ("JSON list", b"[1]"),
    "a byte order mark": ("byte order mark", b"\xef\xbb\xbf{}"),
    "not UTF-8": ("not valid JSON", b'{"r": "\xff"}'),
    "nested too deeply": ("nested too deeply", b'{"a":' + b"[" * 100_000),
    "a key twice": ("'r' appears twice", b'{"r": 8, "r": 4}'),
    "not a number": ("NaN", b'{"lora_alpha": NaN}'),
}


@pytest.mark.parametrize(("words", "raw"), INVALID_JSON.values(), ids=INVALID_JSON.keys())
def test_a_config_that_is_not_a_json_object_is_refused(
    adapter: Path, shapes: ModelShapes, words: str, raw: bytes
) -> None:
    (adapter / "adapter_config.json").write_bytes(raw)
    error = refusal(adapter, shapes)
    assert isinstance(error, AdapterInvalid)
    assert words in error.message


@pytest.mark.parametrize("prefix", ["language_model.model.layers", "transformer.layers"])
def test_other_module_names_are_refused_with_found_and_expected(
    adapter: Path, shapes: ModelShapes, prefix: str
) -> None:
    rename(adapter, "model.layers", prefix)
    error = refusal(adapter, shapes)
    assert isinstance(error, AdapterMismatch)
    assert f"{prefix}.0.mlp.down_proj" in error.message
    assert "'model.layers.0.mlp.down_proj'" in error.message


UNMATCHED = ["model.layers.99.mlp.up_proj", "model.layers.0.mlp.foo_proj", "visual.blocks.0.attn.qkv"]


@pytest.mark.parametrize("path", UNMATCHED)
def test_one_module_too_many_is_refused_by_name(adapter: Path, shapes: ModelShapes, path: str) -> None:
    pair = {f"{PREFIX}{path}.lora_A.weight": torch.ones(8, 64), f"{PREFIX}{path}.lora_B.weight": torch.ones(64, 8)}
    add(adapter, **pair)
    error = refusal(adapter, shapes)
    assert isinstance(error, AdapterMismatch)
    assert f"1 of 22 adapted modules are not in the base model: found '{path}'" in error.message


@pytest.mark.parametrize("missing", [FIRST_A, FIRST_B])
def test_an_orphan_half_is_refused_by_name(adapter: Path, shapes: ModelShapes, missing: str) -> None:
    edit_tensors(adapter, lambda found: {name: tensor for name, tensor in found.items() if name != missing})
    error = refusal(adapter, shapes)
    assert isinstance(error, AdapterInvalid)
    assert "1 tensors lack their other half" in error.message


OTHER_TENSORS: dict[str, str] = {
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector": "DoRA magnitude",
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight": "DoRA magnitude",
    "model.layers.0.self_attn.q_proj.lora_B.bias": "bias of lora_B",
    "model.layers.0.self_attn.q_proj.bias": "trained bias",
    "model.embed_tokens.lora_embedding_A": "LoRA on an embedding",
    "model.embed_tokens.token_adapter.trainable_tokens_delta": "trainable_tokens_delta",
    "lm_head.weight": "modules_to_save",
    "lm_head.base_layer.weight": "weight of the base model",
    "score.weight": "sequence classifier",
    "something.else": "unknown tensor",
}


@pytest.mark.parametrize(("name", "words"), OTHER_TENSORS.items(), ids=OTHER_TENSORS.keys())
def test_a_tensor_that_is_not_plain_lora_is_refused_whatever_the_config_says(
    adapter: Path, shapes: ModelShapes, name: str, words: str
) -> None:
    add(adapter, **{PREFIX + name: torch.ones(8)})
    error = refusal(adapter, shapes)
    assert isinstance(error, AdapterUnsupported)
    assert words in error.message
    assert name in error.message


PEFT_SAVES: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "bias": {"bias": "all"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [5, 9]},
}


@pytest.mark.parametrize("key", PEFT_SAVES)
def test_what_peft_itself_saves_for_an_unserved_option_is_refused(
    tmp_path: Path, shapes: ModelShapes, key: str
) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", **PEFT_SAVES[key])
    error = refusal(folder, shapes)
    assert isinstance(error, AdapterUnsupported)
    assert key in error.message


def test_lora_on_the_embedding_is_refused_by_name(tmp_path: Path, shapes: ModelShapes) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"])
    assert "LoRA on an embedding" in refusal(folder, shapes).message


def test_lora_on_the_head_is_refused_by_name(tmp_path: Path, shapes: ModelShapes) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["lm_head", "q_proj"])
    error = refusal(folder, shapes)
    assert isinstance(error, AdapterUnsupported)
    assert "lm_head" in error.message


def test_two_spellings_of_one_tensor_are_refused(adapter: Path, shapes: ModelShapes) -> None:
    add(adapter, **{FIRST_A.removeprefix(PREFIX): torch.ones(8, 64)})
    assert "are both the lora_A of" in refusal(adapter, shapes).message


def test_a_rank_above_the_limit_is_refused_with_both(adapter: Path, shapes: ModelShapes) -> None:
    error = refusal(adapter, shapes, max_lora_rank=4)
    assert isinstance(error, AdapterTooLarge)
    assert "rank 8 > max 4" in error.message


def test_a_pattern_above_the_limit_is_refused_with_its_module(tmp_path: Path, shapes: ModelShapes) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", rank_pattern={"down_proj": 64})
    error = refusal(folder, shapes, max_lora_rank=16)
    assert "rank 64 > max 16" in error.message
    assert "mlp.down_proj" in error.message


def test_tensors_of_another_rank_than_the_config_are_refused(adapter: Path, shapes: ModelShapes) -> None:
    edit_config(adapter, r=4)
    assert "rank 8 in its tensors and 4 in adapter_config.json" in refusal(adapter, shapes).message


def test_an_adapter_of_a_wider_base_is_refused_with_both_shapes(tmp_path: Path, shapes: ModelShapes) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", tiny_llama(hidden_size=128))
    error = refusal(folder, shapes)
    assert isinstance(error, AdapterMismatch)
    assert "176 → 128" in error.message
    assert "176 → 64" in error.message


def test_an_adapter_of_other_kv_heads_is_refused_with_both_shapes(tmp_path: Path, shapes: ModelShapes) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", tiny_llama(num_kv_heads=4), target_modules=["k_proj"])
    error = refusal(folder, shapes)
    assert "64 → 64" in error.message
    assert "64 → 32" in error.message


def test_an_adapter_of_a_shallower_base_fits_by_shape(tmp_path: Path, shapes: ModelShapes) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", tiny_llama(num_layers=2))
    assert len(load_adapter(adapter_ref(folder), shapes, torch.float32, 256).modules) == 14


def test_an_adapter_of_a_deeper_base_is_refused(tmp_path: Path, shapes: ModelShapes) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", tiny_llama(num_layers=4))
    assert "model.layers.3.mlp.down_proj" in refusal(folder, shapes).message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_with_their_place(
    adapter: Path, shapes: ModelShapes, value: float
) -> None:
    def poison(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found[FIRST_B][2, 3] = value
        return found

    edit_tensors(adapter, poison)
    error = refusal(adapter, shapes)
    assert isinstance(error, AdapterInvalid)
    assert f"the first is element 19: {value}" in error.message


def test_a_value_beyond_the_models_dtype_is_refused(adapter: Path, shapes: ModelShapes) -> None:
    edit_tensors(adapter, lambda found: found | {FIRST_B: torch.full((64, 8), 1e6)})
    load_adapter(adapter_ref(adapter), shapes, torch.bfloat16, 256)
    assert "too large for torch.float16" in refusal(adapter, shapes, dtype=torch.float16).message


def test_integer_weights_are_refused(adapter: Path, shapes: ModelShapes) -> None:
    edit_tensors(adapter, lambda found: found | {FIRST_B: torch.ones(64, 8, dtype=torch.int8)})
    assert "dtype I8" in refusal(adapter, shapes).message


def test_classify_names_what_it_does_not_know() -> None:
    assert classify("lora_A.weight") == ("lora_A", TensorRole.FULL_WEIGHT)
    assert classify("") == ("", TensorRole.UNKNOWN)
    assert classify("default.q.lora_A.default.weight") == ("default.q", TensorRole.LORA_A)


def test_linear_shapes_are_in_then_out() -> None:
    assert linear_shapes(tiny_llama())["model.layers.0.mlp.down_proj"] == (176, 64)
