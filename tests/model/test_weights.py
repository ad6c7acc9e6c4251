"""Weights arrive as the files hold them: equal to what transformers loads, bit by bit, or refused by name."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from punica_core.config import EngineConfig
from punica_core.errors import ConfigError
from punica_core.model import checkpoint, weights
from punica_core.model.checkpoint import read_headers
from punica_core.model.loader import load_model
from punica_core.model.weights import load_weights
from tests.support.tiny_models import TINY_MODELS, TINY_SIZES, VOCAB_SIZE

CPU = torch.device("cpu")


def _more(config_class: type, model_class: type, **options: Any) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        torch.manual_seed(3)
        model: PreTrainedModel = model_class(config_class(**{**TINY_SIZES, **options})).eval()
        return model

    return build


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

MODELS: Mapping[str, Callable[[], PreTrainedModel]] = MappingProxyType(
    {
        **TINY_MODELS,
        "llama3_rope": _more(LlamaConfig, LlamaForCausalLM, rope_parameters=LLAMA3_ROPE),
        "yarn": _more(LlamaConfig, LlamaForCausalLM, rope_parameters=YARN),
        "gemma3": _more(Gemma3TextConfig, Gemma3ForCausalLM, head_dim=12, sliding_window=7, sliding_window_pattern=2),
        "phi3": _more(Phi3Config, Phi3ForCausalLM),
    }
)
"""Those of the engine's tests, and more kinds of buffers that no file holds."""


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by every name they have."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def by_transformers(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    return weights._load_by_transformers(folder, AutoConfig.from_pretrained(folder), dtype, CPU)


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> torch.nn.Module:
    return load_weights(folder, AutoConfig.from_pretrained(folder), dtype, CPU, **options)


def assert_equal(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    ours, theirs = tensors_of(model), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be left to transformers' own loader."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("transformers was asked to load the checkpoint")

    monkeypatch.setattr(weights, "_load_by_transformers", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TINY_MODELS["qwen2"]().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_and_every_logit_is_that_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    expected = by_transformers(tmp_path, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_load_by_transformers", None)  # a call would raise
        model = load(tmp_path, dtype)
    assert_equal(model, expected)
    assert model.config.dtype == dtype
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    token_ids = torch.arange(1, 40)[None] * 7919 % VOCAB_SIZE
    with torch.inference_mode():
        assert torch.equal(model(token_ids).logits, expected(token_ids).logits)


@pytest.mark.usefixtures("by_hand")
def test_tied_weights_are_one(tmp_path: Path) -> None:
    TINY_MODELS["smollm2"]().save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.usefixtures("by_hand")
def test_shards_are_found_by_their_index(folder: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    TINY_MODELS["qwen2"]().save_pretrained(sharded, max_shard_size="30KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    save_file({"stray": torch.zeros(1)}, sharded / "consolidated.safetensors")
    assert_equal(load(sharded), load(folder))


@pytest.mark.usefixtures("by_hand")
def test_a_checkpoint_of_the_headless_model_is_understood(tmp_path: Path) -> None:
    model = TINY_MODELS["smollm2"]()
    model.model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in read_headers(tmp_path)
    assert_equal(load(tmp_path), model)


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
def test_large_tensors_arrive_in_pieces_whatever_their_dtype(
    folder: Path, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(path).items()}, path)
    whole = load(folder)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1024)
    seen: list[float] = []
    assert_equal(load(folder, on_progress=seen.append), whole)
    assert len(seen) > 100
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_tied_weights_stored_twice_and_differently_are_left_to_transformers(tmp_path: Path) -> None:
    TINY_MODELS["smollm2"]().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, path, metadata={"format": "pt"})
    assert_equal(load(tmp_path), by_transformers(tmp_path, torch.float32))


def test_an_architecture_with_conversions_is_left_to_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    real = weights._load_by_transformers

    def load_and_note(model_dir: Path, *arguments: Any) -> torch.nn.Module:
        calls.append(model_dir)
        return real(model_dir, *arguments)

    monkeypatch.setattr(weights, "_load_by_transformers", load_and_note)
    load(folder)
    assert not calls
    monkeypatch.setattr(weights, "get_checkpoint_conversion_mapping", lambda name: ["a conversion"])
    load(folder)
    assert calls == [folder]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_buffer_that_the_model_leaves_undefined_is_never_served(
    folder: Path, load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = by_transformers(folder, torch.float32)
    model_class = type(TINY_MODELS["qwen2"]())
    monkeypatch.setattr(model_class, "initialize_weights", lambda self: None)
    if load_format == "dummy":
        with pytest.raises(ConfigError, match="buffers that only a checkpoint defines"):
            load(folder, load_format=load_format)
    else:
        # what takes over must not meet the patch
        monkeypatch.setattr(weights, "_load_by_transformers", lambda *arguments: expected)
        assert load(folder) is expected


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight: \[79, 48\].*\[80, 48\]"):
        load(folder)


def test_stored_tensors_that_the_model_has_no_place_for_are_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "model.safetensors"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "vision.patch": torch.ones(2)}
    save_file({**load_file(path), **extra}, path, metadata={"format": "pt"})
    load(folder)
    assert "1 stored tensors are not the model's and are left out: vision.patch" in caplog.text


def test_a_file_that_is_cut_off_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut off: .* ends at byte"):
        load(folder)


def test_a_file_that_is_cut_off_while_it_is_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = read_headers(folder)
    os.truncate(folder / "model.safetensors", os.path.getsize(folder / "model.safetensors") - 1000)
    monkeypatch.setattr(weights, "read_headers", lambda model_dir: headers)
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut off at byte"):
        load(folder)


def test_a_file_written_to_while_it_is_read_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def write_meanwhile(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        os.utime(folder / "model.safetensors")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", write_meanwhile)
    with pytest.raises(ConfigError, match="written to while it was read"):
        load(folder)


def header(**entries: Any) -> bytes:
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "header claims"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header claims"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "is a Git LFS pointer.*: run `git lfs pull`"),
        (b"version https://get-lfs.github.com/spec/v1\noid sha256:00", "header claims"),
        (struct.pack("<Q", 4) + b"nope", "no sound safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "no object"),
        (header(w={"dtype": "F32", "shape": [2]}), "lacks dtype, shape or data_offsets"),
        (header(w={"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}), "negative"),
        (header(w={"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}), "does not have 8 bytes"),
    ],
)
def test_a_damaged_header_is_refused_with_the_reason(folder: Path, content: bytes, complaint: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load(folder)
    assert caught.value.param == "model"


def test_elements_that_are_not_served_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name} as F8_E4M3, which is not served"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ("{", "not the index"),
        ('{"weight_map": []}', "not the index"),
        ('{"weight_map": {"w": "../elsewhere.safetensors"}}', "only .* files beside it"),
        ('{"weight_map": {"w": "model.bin"}}', "only .* files beside it"),
        ('{"weight_map": {"w": "a.safetensors"}}', r"names 1 tensors that are not in their files, such as w"),
        ('{"weight_map": {"w": "gone.safetensors"}}', r"gone\.safetensors cannot be read"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(tmp_path: Path, index: str, complaint: str) -> None:
    save_file({"v": torch.zeros(1)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=complaint):
        read_headers(tmp_path)


def test_dummy_weights_need_no_files_and_are_always_the_same(tmp_path: Path) -> None:
    TINY_MODELS["qwen2"]().config.save_pretrained(tmp_path)
    first, second = load(tmp_path, load_format="dummy"), load(tmp_path, load_format="dummy")
    assert_equal(first, second)
    matrices = torch.cat([p.flatten() for p in first.parameters() if p.dim() == 2])
    assert abs(float(matrices.std()) - 0.02) < 0.001
    assert (first.model.norm.weight == 1).all()
    assert (first.model.layers[0].self_attn.q_proj.bias == 0).all()
    assert first.lm_head.weight is first.model.embed_tokens.weight


def test_dummy_weights_have_the_models_own_buffers(folder: Path) -> None:
    dummy, real = load(folder, load_format="dummy"), load(folder)
    buffers = dict(dummy.named_buffers())
    assert buffers
    assert all(torch.equal(buffer, dict(real.named_buffers())[name]) for name, buffer in buffers.items())


def test_a_folder_with_only_a_config_is_loaded_as_a_dummy(tmp_path: Path) -> None:
    TINY_MODELS["llama"]().config.save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy", dtype="bfloat16")
    loaded = load_model(config)
    assert (loaded.vocab_size, loaded.dtype, loaded.eos_token_ids) == (VOCAB_SIZE, torch.bfloat16, (2,))


@pytest.mark.parametrize(("load_format", "with_weights"), [("dummy", False), ("auto", True)])
def test_of_a_hub_model_the_weights_are_downloaded_only_if_they_are_read(
    folder: Path, load_format: Any, with_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(repository: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    load_model(EngineConfig(model="owner/name", device="cpu", load_format=load_format))
    assert ("*.safetensors" in asked[0]) == with_weights
    assert "*.json" in asked[0]


@pytest.mark.gpu
@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gpu_every_tensor_is_that_of_the_file(
    folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 4096)
    model = load_weights(folder, AutoConfig.from_pretrained(folder), dtype, torch.device("cuda"))
    assert {tensor.device.type for tensor in tensors_of(model).values()} == {"cuda"}
    assert_equal(model.cpu(), load(folder, dtype))


@pytest.mark.gpu
def test_on_the_gpu_dummy_weights_are_made_there(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    model = load_weights(folder, config, torch.bfloat16, torch.device("cuda"), load_format="dummy")
    matrices = torch.cat([p.flatten() for p in model.parameters() if p.dim() == 2])
    assert matrices.is_cuda
    assert abs(float(matrices.float().std()) - 0.02) < 0.001
