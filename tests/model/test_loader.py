"""Loading: what a folder must have, what is computed from it, what is refused and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from punica_core.config import EngineConfig
from punica_core.engine.runner import KV_SEQUENCES, kv_bytes_per_block, plan_memory
from punica_core.errors import ConfigError
from punica_core.model.loader import load_model, prepare
from tests.support.peft_adapters import linear_shapes
from tests.support.tiny_models import MAX_POSITIONS, TINY_MODELS, VOCAB_SIZE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TINY_MODELS["qwen2"]().save_pretrained(tmp_path)
    return tmp_path


def config_of(folder: Path | str, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", **options)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_saved_model_loads_with_what_its_files_say(folder: Path) -> None:
    seen: list[float] = []
    loaded = load_model(config_of(folder), lambda what, fraction: seen.append(fraction))
    assert (loaded.architecture, loaded.dtype, loaded.device.type) == ("Qwen2ForCausalLM", torch.float32, "cpu")
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (VOCAB_SIZE, MAX_POSITIONS, (2,))
    assert loaded.module_shapes == linear_shapes(TINY_MODELS["qwen2"]()) | {"lm_head": (48, VOCAB_SIZE)}
    assert loaded.module_shapes.embedding_shape == (VOCAB_SIZE, 48)
    assert loaded.module_shapes.tied
    assert seen == sorted(seen)
    assert seen


def test_weights_are_those_of_the_files(folder: Path) -> None:
    loaded = load_model(config_of(folder))
    stored = load_file(folder / "model.safetensors")
    fused = loaded.model.get_submodule("model.layers.1.self_attn.q_proj").fused
    names = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
    assert torch.equal(fused.weight, torch.cat([stored[f"{name}.weight"] for name in names]))
    assert torch.equal(fused.bias, torch.cat([stored[f"{name}.bias"] for name in names]))


def test_end_ids_come_from_the_generation_config_first(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[9, 4])
    assert load_model(config_of(folder)).eos_token_ids == (4, 9)


def test_the_dtype_can_be_chosen(folder: Path) -> None:
    loaded = load_model(config_of(folder, dtype="bfloat16"))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["no/such-model-here", "/no/such/folder", "./nothing"])
def test_a_model_that_is_not_there_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=name) as caught:
        load_model(config_of(name))
    assert caught.value.param == "model"


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(config_of(tmp_path))


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load_model(config_of(folder))


def test_a_missing_tensor_is_named_instead_of_made_up(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj"):
        load_model(config_of(folder))


def test_a_model_type_that_transformers_does_not_know_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="no_such_type")
    with pytest.raises(ConfigError, match="no_such_type"):
        load_model(config_of(folder))


def _wrong_layer(attention: torch.nn.Module) -> None:
    attention.layer_idx = 0


def _window_in_the_mask_only(attention: torch.nn.Module) -> None:
    attention.sliding_window = None


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("llama", _wrong_layer, "several attentions"),
        ("gemma2", _window_in_the_mask_only, "window"),
        ("gemma2", lambda attention: setattr(attention, "attn_logit_softcapping", 0.5), "differ"),
    ],
)
def test_a_model_whose_attention_would_come_out_wrong_is_refused(
    name: str, spoil: Callable[[torch.nn.Module], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from punica_core.model import loader

    model = TINY_MODELS[name]()
    real = loader.reference_logits

    def reference_then_spoil(model: torch.nn.Module) -> torch.Tensor:
        logits = real(model)
        for layer in model.model.layers:
            spoil(layer.self_attn)
        return logits

    monkeypatch.setattr(loader, "reference_logits", reference_then_spoil)
    with pytest.raises(ConfigError, match=reason):
        prepare(model, Path("."), MAX_POSITIONS)


def test_blocks_follow_kv_tokens_else_free_memory_within_what_can_be_used(folder: Path) -> None:
    loaded = load_model(config_of(folder))
    block_bytes = kv_bytes_per_block(loaded)
    assert block_bytes == 2 * 3 * 16 * 2 * 8 * 4
    assert plan_memory(config_of(folder, kv_tokens=1600), loaded, 0) == 100
    assert plan_memory(config_of(folder), loaded, 100 * block_bytes) == 50
    assert plan_memory(config_of(folder), loaded, 1 << 40) == KV_SEQUENCES * MAX_POSITIONS // 16


def test_a_cache_that_cannot_hold_one_longest_sequence_is_refused(folder: Path) -> None:
    loaded = load_model(config_of(folder))
    with pytest.raises(ConfigError, match=rf"240 tokens.*{MAX_POSITIONS}"):
        plan_memory(config_of(folder, kv_tokens=240), loaded, 0)
