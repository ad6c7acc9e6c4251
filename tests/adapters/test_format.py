"""What is refused, and that the refusal names the fault: adapter_config.json, the file's header, the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from punica_core.adapters.format import ModelShapes
from punica_core.adapters.names import TensorRole, classify
from punica_core.errors import (
    AdapterError,
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
    peft_warnings_ignored,
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
    "use_dora": {"use_dora": True, "lora_bias": True},
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
    "future_config": {"future_config": {"depth": 2}},
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
    "use_dora text": ("use_dora is 'yes'", {"use_dora": "yes"}),
    "bias unknown": ("bias is 'some'", {"bias": "some"}),
    "modules_to_save text": ("modules_to_save is 'lm_head'", {"modules_to_save": "lm_head"}),
    "token ids negative": ("trainable_token_indices is [-1]", {"trainable_token_indices": [-1]}),
    "token ids twice": ("trainable_token_indices is [5, 5]", {"trainable_token_indices": [5, 5]}),
    "token ids by number": ("trainable_token_indices is 5", {"trainable_token_indices": 5}),
    "use_dora without its tensors": ("21 of 21 modules have no DoRA magnitude", {"use_dora": True}),
    "lora_bias without its tensors": ("21 of 21 modules have no bias of lora_B", {"lora_bias": True}),
    "modules_to_save without its tensor": (
        "modules_to_save names 'lm_head', but the file has no weight of it",
        {"modules_to_save": ["lm_head"]},
    ),
    "token rows without their tensor": (
        "but the file has no trainable_tokens_delta",
        {"trainable_token_indices": [5, 9]},
    ),
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
    assert "1 of 41 tensors lack their other half" in error.message


STRAY_TENSORS: dict[str, tuple[str, type[AdapterError], tuple[int, ...]]] = {
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector": ("use_dora is not true", AdapterInvalid, (64,)),
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight": (
        "use_dora is not true",
        AdapterInvalid,
        (64,),
    ),
    "model.layers.0.self_attn.q_proj.lora_B.bias": ("lora_bias is not true", AdapterInvalid, (64,)),
    "model.layers.0.self_attn.q_proj.bias": ("bias is 'none'", AdapterInvalid, (64,)),
    "model.embed_tokens.lora_embedding_A": ("lack their other half", AdapterInvalid, (8, 512)),
    "model.embed_tokens.token_adapter.trainable_tokens_delta": ("does not say which tokens", AdapterInvalid, (2, 64)),
    "model.layers.0.mlp.gate_proj.weight": ("train without it, or use LoRA for it.", AdapterUnsupported, (176, 64)),
    "model.norm.weight": ("train without it, or merge the adapter into the base", AdapterUnsupported, (64,)),
    "layers.0.input_layernorm.weight": ("train without it, or merge the adapter", AdapterUnsupported, (64,)),
    "model.layers.9.mlp.up_proj.base_layer.weight": ("weight of the base model", AdapterUnsupported, (176, 64)),
    "lm_head.weight": ("the vocabulary was resized", AdapterMismatch, (520, 64)),
    "lm_head.base_layer.weight": ("the vocabulary was resized", AdapterMismatch, (520, 64)),
    "model.embed_tokens.weight": ("it is of another base model", AdapterMismatch, (512, 128)),
    "score.weight": ("sequence classifier (modules_to_save).", AdapterUnsupported, (2, 64)),
    "something.else": ("unknown tensor", AdapterUnsupported, (1,)),
    "model.layers.0.self_attn.q_proj.lora_E": ("AdaLoRA", AdapterUnsupported, (8, 1)),
    "model.layers.0.self_attn.q_proj.hada_w1_a": ("LoHa", AdapterUnsupported, (8, 8)),
    "model.layers.1.self_attn.q_proj.lora_A.other.weight": ("are both the lora_A", AdapterInvalid, (8, 64)),
}


@pytest.mark.parametrize(("name", "expected"), STRAY_TENSORS.items(), ids=STRAY_TENSORS.keys())
def test_a_tensor_that_has_no_place_is_refused_by_name(
    adapter: Path, shapes: ModelShapes, name: str, expected: tuple[str, type[AdapterError], tuple[int, ...]]
) -> None:
    words, kind, shape = expected
    add(adapter, **{PREFIX + name: torch.ones(shape)})
    error = refusal(adapter, shapes)
    assert isinstance(error, kind), error
    assert words in error.message
    assert name in error.message
    assert ("use LoRA for it" in error.message) is ("use LoRA for it" in words)


def test_tensors_of_two_adapters_in_one_file_are_refused(adapter: Path, shapes: ModelShapes) -> None:
    rename(adapter, "lora_A.weight", "lora_A.one.weight")
    rename(adapter, "lora_B.weight", "lora_B.two.weight")
    assert "several adapters: 'one', 'two'" in refusal(adapter, shapes).message


DAMAGED_SAVES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "DoRA with use_dora edited off": ({"use_dora": True}, "use_dora is not true", {"use_dora": False}),
    "lora_bias edited off": ({"lora_bias": True}, "lora_bias is not true", {"lora_bias": False}),
    "fewer token ids than rows": (
        {"trainable_token_indices": [5, 9]},
        "names 1 tokens, so it must be [1, width]",
        {"trainable_token_indices": [5]},
    ),
    "a token beyond the vocabulary": (
        {"trainable_token_indices": [5, 9]},
        "names token 512, the base model has 512",
        {"trainable_token_indices": [5, 512]},
    ),
    "rows of a head that has none": (
        {"trainable_token_indices": [5, 9]},
        "names 'lm_head', of which no rows were saved",
        {"trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [5, 9]}},
    ),
}


@pytest.mark.parametrize(("config", "words", "change"), DAMAGED_SAVES.values(), ids=DAMAGED_SAVES.keys())
def test_a_config_that_does_not_go_with_the_tensors_is_refused(
    tmp_path: Path, shapes: ModelShapes, config: dict[str, Any], words: str, change: dict[str, Any]
) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["q_proj"], **config)
    edit_config(folder, **change)
    error = refusal(folder, shapes)
    assert words in error.message


def test_a_resized_vocabulary_is_refused_with_both_sizes(tmp_path: Path, shapes: ModelShapes) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", resized_llama(), target_modules=["lm_head"])
    error = refusal(folder, shapes)
    assert isinstance(error, AdapterMismatch)
    assert "520 rows in the adapter and 512 in the base" in error.message
    folder = save_peft_adapter(tmp_path / "other", resized_llama(), target_modules=["embed_tokens"])
    assert "an embedding of 520 tokens and width 64, the base model has 512 and 64" in refusal(folder, shapes).message


def resized_llama() -> LlamaForCausalLM:
    model = tiny_llama()
    with peft_warnings_ignored():
        model.resize_token_embeddings(520, mean_resizing=False)
    return model


NEED_THE_BASE: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "copies of the base model's weights": {"target_modules": ["lm_head"]},
    "a trained embedding": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize(("what", "config"), NEED_THE_BASE.items(), ids=NEED_THE_BASE.keys())
def test_what_needs_the_bases_numbers_is_refused_without_them(
    tmp_path: Path, shapes: ModelShapes, what: str, config: dict[str, Any]
) -> None:
    error = refusal(save_peft_adapter(tmp_path / "adapter", **config), shapes)
    assert isinstance(error, AdapterUnsupported)
    assert what in error.message


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
    message = refusal(adapter, shapes).message
    assert "rank 8 in its tensors and 4 in adapter_config.json" in message
    assert "Take both files from one training run, or set r" in message


NAMED_BASES: list[tuple[object, str]] = [
    ("org/Base-1.5", " adapter_config.json names 'org/Base-1.5'."),
    ("gpt2", " adapter_config.json names 'gpt2'."),
    ("/home/someone/base", ""),
    ("./base", ""),
    ("~/base", ""),
    ("a/b/base", ""),
    ("C:\\base", ""),
    ("org/..", ""),
    ("a\nb", ""),
    ("x" * 97, ""),
    (None, ""),
    (["org/base"], ""),
]


@pytest.mark.parametrize(("named", "told"), NAMED_BASES, ids=[repr(named)[:20] for named, _ in NAMED_BASES])
def test_of_another_base_its_id_is_told_but_never_a_path(
    adapter: Path, shapes: ModelShapes, named: object, told: str
) -> None:
    edit_config(adapter, base_model_name_or_path=named)
    wider = {path: (2 * width, rows) for path, (width, rows) in shapes.items()}
    assert refusal(adapter, ModelShapes(wider)).message.endswith(f"Was it trained on another base model?{told}")
    rename(adapter, "model.layers", "other.layers")
    assert refusal(adapter, shapes).message.endswith(f", or saved with other names?{told}")


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
