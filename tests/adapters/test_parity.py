"""The parsed A, B and scale, applied by hand, are PEFT's own mathematics (fp32, max |Δlogit| ≤ 1e-5)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from transformers import LlamaForCausalLM

from punica_core.adapters.peft_config import parse_config
from punica_core.lora.weights import AdapterWeights, load_adapter
from tests.support.peft_adapters import (
    ALL_LINEARS,
    adapter_ref,
    edit_config,
    edit_tensors,
    linear_shapes,
    peft_logits,
    save_peft_adapter,
    tiny_llama,
)

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]
TOLERANCE = 1e-5


def load(folder: Path, dtype: torch.dtype = torch.float32) -> AdapterWeights:
    return load_adapter(adapter_ref(folder), linear_shapes(tiny_llama()), dtype, 256)


def applied_logits(weights: AdapterWeights, base: LlamaForCausalLM | None = None) -> torch.Tensor:
    """[T, V] logits of a base with y += scale · (x · aᵀ) · bᵀ added to each adapted module."""
    model = base if base is not None else tiny_llama()
    for path, lora in weights.modules.items():

        def add(module: torch.nn.Module, inputs: Any, output: torch.Tensor, lora: Any = lora) -> torch.Tensor:
            return output + lora.scale * (inputs[0] @ lora.a.T) @ lora.b.T

        model.get_submodule(path).register_forward_hook(add)
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


def base_logits() -> torch.Tensor:
    with torch.no_grad():
        return tiny_llama()(torch.tensor([PROMPT])).logits[0]


def assert_is_pefts(folder: Path, reference: torch.Tensor | None = None) -> AdapterWeights:
    weights = load(folder)
    ours = applied_logits(weights)
    torch.testing.assert_close(
        ours, peft_logits(folder, PROMPT) if reference is None else reference, rtol=0, atol=TOLERANCE
    )
    assert (ours - base_logits()).abs().max() > 100 * TOLERANCE, "the adapter does nothing: the test proves nothing"
    return weights


PLAIN: dict[str, dict[str, Any]] = {
    "all linears": {},
    "rsLoRA of rank 16": {"use_rslora": True, "r": 16},
    "rsLoRA of rank 64": {"use_rslora": True, "r": 64},
    "rank 1": {"r": 1},
    "rank 3, alpha 7": {"r": 3, "lora_alpha": 7},
    "q and v only": {"target_modules": ["q_proj", "v_proj"], "r": 4},
    "q only": {"target_modules": ["q_proj"]},
    "k only": {"target_modules": ["k_proj"]},
    "gate only": {"target_modules": ["gate_proj"]},
    "up only": {"target_modules": ["up_proj"]},
    "one layer": {"layers_to_transform": [1]},
    "rank_pattern by name": {"rank_pattern": {"down_proj": 33}},
    "rank_pattern by path, first match wins": {
        "rank_pattern": {"model.layers.0.self_attn.q_proj": 2, "q_proj": 5, "self_attn.q_proj": 7}
    },
    "rank_pattern by expression": {"rank_pattern": {r"layers\.(0|2)\..*_proj": 4}},
    "anchored rank_pattern": {"rank_pattern": {"^model.layers.1.mlp.up_proj": 6}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 3, "layers.2.mlp.gate_proj": 40}},
    "both patterns with rsLoRA": {"rank_pattern": {"o_proj": 9}, "alpha_pattern": {"o_proj": 5}, "use_rslora": True},
}


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN.keys())
def test_plain_lora_is_pefts(tmp_path: Path, config: dict[str, Any]) -> None:
    assert_is_pefts(save_peft_adapter(tmp_path / "adapter", **config))


def test_the_scale_matters(adapter: Path) -> None:
    """Negative control: without rsLoRA's square root the same tensors compute something else."""
    reference = peft_logits(adapter, PROMPT)
    edit_config(adapter, use_rslora=True)
    assert (applied_logits(load(adapter)) - reference).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_files_of_other_dtypes_are_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    assert_is_pefts(save_peft_adapter(tmp_path / "adapter", dtype=dtype))


def test_a_16_bit_model_gets_16_bit_weights(adapter: Path) -> None:
    exact, cast = load(adapter), load(adapter, torch.bfloat16)
    for path, module in cast.modules.items():
        assert torch.equal(module.a, exact.modules[path].a.bfloat16())
        assert torch.equal(module.b, exact.modules[path].b.bfloat16())


def test_an_adapter_on_a_tied_base_is_pefts(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", tiny_llama(tied=True))
    ours = applied_logits(load(folder), tiny_llama(tied=True))
    torch.testing.assert_close(ours, peft_logits(folder, PROMPT, tiny_llama(tied=True)), rtol=0, atol=TOLERANCE)


def test_an_untrained_adapter_loads_and_changes_nothing(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "adapter")
    edit_tensors(folder, lambda found: {name: t * 0 if "lora_B" in name else t for name, t in found.items()})
    assert torch.equal(applied_logits(load(folder)), base_logits())


def keep_config(folder: Path, *keys: str) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: config[key] for key in keys}))


HARMLESS: dict[str, Callable[[Path], None]] = {
    "newer keys": lambda folder: edit_config(
        folder, eva_config=None, corda_config=None, arrow_config=None, future_flag=1
    ),
    "older keys": lambda folder: edit_config(folder, enable_lora=None, merge_weights=False),
    "target_modules all-linear": lambda folder: edit_config(folder, target_modules="all-linear"),
    "target_modules by expression": lambda folder: edit_config(folder, target_modules=r".*\.(q|k|v)_proj"),
    "modules that are left out": lambda folder: edit_config(folder, exclude_modules=["lm_head"], layers_pattern=None),
    "how it was trained": lambda folder: edit_config(
        folder, lora_dropout=0.1, init_lora_weights="eva", eva_config={"rho": 2.0}, loftq_config={}
    ),
    "target_modules with dots": lambda folder: edit_config(
        folder, target_modules=["self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    ),
    "base unknown": lambda folder: edit_config(folder, base_model_name_or_path=None),
    "base unreachable": lambda folder: edit_config(folder, base_model_name_or_path="nobody/does-not-exist"),
    "base elsewhere": lambda folder: edit_config(folder, base_model_name_or_path="/other/path"),
    "no prefix": lambda folder: edit_tensors(
        folder, lambda found: {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}
    ),
    "default segment": lambda folder: edit_tensors(
        folder, lambda found: {name.replace(".weight", ".default.weight"): tensor for name, tensor in found.items()}
    ),
    "config of 2023": lambda folder: keep_config(folder, "peft_type", "r", "lora_alpha", "target_modules"),
}


@pytest.mark.parametrize("edit", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_does_not_change_the_maths_is_ignored(adapter: Path, edit: Callable[[Path], None]) -> None:
    reference, key = peft_logits(adapter, PROMPT), load(adapter).key
    edit(adapter)
    assert assert_is_pefts(adapter, reference).key == key


PATTERNS = [
    "q_proj",
    "self_attn.q_proj",
    "attn.q_proj",
    r"layers\.1\..*",
    "^model.layers.0.mlp.up_proj",
    "proj",
    "(q|k)_proj",
]


@given(st.lists(st.sampled_from(PATTERNS), unique=True), st.integers(0, 2), st.sampled_from(ALL_LINEARS))
def test_patterns_match_by_pefts_own_rule(patterns: list[str], layer: int, name: str) -> None:
    block = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    path = f"model.layers.{layer}.{block}.{name}"
    ranks = {pattern: 2 + index for index, pattern in enumerate(patterns)}
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "rank_pattern": ranks}
    settings = parse_config(json.dumps(config).encode())
    assert settings.rank_of(path) == ranks.get(get_pattern_key(list(ranks), path), 1)
