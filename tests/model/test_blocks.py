"""Rewritten decoder blocks compute what transformers' do; what computes something else is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from punica_core.model.attention_op import split_rotated
from punica_core.model.blocks import fuse_blocks
from punica_core.model.loader import LoadedModel, prepare
from punica_core.model.probe import AttentionProbe, probe_inputs
from tests.model.test_model_types import SERVED, build
from tests.support.driven_device_runner import DrivenDeviceRunner
from tests.support.peft_adapters import tiny_llama
from tests.support.tiny_models import TINY_MODELS, TINY_SIZES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class RotaryProbe(AttentionProbe):
    """Attends as the probe does, and can rotate; counts who left it to do so. `specs` are those of a probe before."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self._loaded = loaded
        self.rotated: list[int] = []

    def attend_rotary(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int, soon: torch.Tensor
    ) -> torch.Tensor:
        self.rotated.append(layer)
        kv_shape = self._loaded.kv_shape
        heads = split_rotated(qkv, cos, sin, kv_shape.num_kv_heads, kv_shape.head_dim)
        return self.attend(layer, *heads, self._loaded.attention_specs[layer]).flatten(1)


def prepared(model: PreTrainedModel) -> LoadedModel:
    return prepare(model, Path(), 128)


def logits_of(loaded: LoadedModel, paged: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(**probe_inputs(loaded.model), use_cache=False, paged=paged).logits[0]
    return logits


def layers_of(loaded: LoadedModel) -> list[nn.Module]:
    return list(loaded.model.model.layers)


def passes_pairs(loaded: LoadedModel) -> bool:
    found = {type(layer).__name__.startswith("Unsummed") for layer in layers_of(loaded)}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "rotary", "pairs"),
    [
        ("llama", True, True),
        ("qwen2", True, True),
        ("mistral_window", True, True),
        ("qwen3", False, True),
        ("gemma2", True, False),
    ],
)
def test_what_can_be_is_rewritten_and_computes_the_same(
    name: str, rotary: bool, pairs: bool, dtype: torch.dtype
) -> None:
    loaded = prepared(TINY_MODELS[name]().to(dtype))
    expected = logits_of(loaded, AttentionProbe())
    fuse_blocks(loaded.model)
    probe = RotaryProbe(loaded)
    found = logits_of(loaded, probe)
    assert probe.rotated == (list(range(len(layers_of(loaded)))) if rotary else [])
    assert passes_pairs(loaded) == pairs
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("dtype", "rotates"), [(torch.float32, True), (torch.bfloat16, False)])
def test_positions_of_another_dtype_than_the_cache_are_not_left_to_the_kernel(
    dtype: torch.dtype, rotates: bool
) -> None:
    """OLMo's cosines are fp32 whatever the model is, and the kernel takes them in the cache's dtype."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["olmo"](**TINY_SIZES)).eval()
    loaded = prepared(model.to(dtype))
    fuse_blocks(loaded.model)
    probe = RotaryProbe(loaded)
    logits_of(loaded, probe)
    assert bool(probe.rotated) == rotates


@pytest.mark.parametrize("model_type", ["phi", "opt", "biogpt"])
def test_attention_whose_output_projection_has_another_name_is_left_alone(model_type: str) -> None:
    torch.manual_seed(0)
    loaded = prepared(AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**TINY_SIZES)).eval())
    expected = logits_of(loaded, AttentionProbe())
    fuse_blocks(loaded.model)
    probe = RotaryProbe(loaded)
    torch.testing.assert_close(logits_of(loaded, probe), expected)
    assert probe.rotated == []


@pytest.mark.parametrize("model_type", SERVED)
def test_every_served_type_computes_the_same_once_rewritten(model_type: str) -> None:
    loaded = prepared(build(model_type, **SERVED[model_type]))
    expected = logits_of(loaded, AttentionProbe())
    fuse_blocks(loaded.model)
    torch.testing.assert_close(logits_of(loaded, RotaryProbe(loaded)), expected, rtol=1e-4, atol=1e-4)


def test_attention_that_cannot_rotate_is_served_as_before() -> None:
    loaded = prepared(tiny_llama())
    expected = logits_of(loaded, AttentionProbe())
    fuse_blocks(loaded.model)
    torch.testing.assert_close(logits_of(loaded, AttentionProbe()), expected)


def test_rewriting_twice_changes_nothing() -> None:
    loaded = prepared(tiny_llama())
    fuse_blocks(loaded.model)
    classes = [type(module) for module in loaded.model.modules()]
    fuse_blocks(loaded.model)
    assert [type(module) for module in loaded.model.modules()] == classes


class ClippingAttention(modeling_llama.LlamaAttention):
    """Cuts off what only loud inputs reach, as OLMo can."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states.clamp(-20, 20), **kwargs)


class InterleavedAttention(modeling_llama.LlamaAttention):
    """Rotates other pairs of elements."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:
        turned = tuple(part.roll(1, -1) for part in position_embeddings)
        return super().forward(hidden_states, position_embeddings=turned, **kwargs)


class ScalingLayer(modeling_llama.LlamaDecoderLayer):
    """Adds its branches scaled, as Granite does."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return hidden_states + 0.9 * (super().forward(hidden_states, **kwargs) - hidden_states)


@pytest.mark.parametrize("other", [ClippingAttention, InterleavedAttention])
def test_an_attention_that_does_something_else_is_left_alone(other: type) -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.__class__ = other
    loaded = prepared(model)
    expected = logits_of(loaded, AttentionProbe())
    fuse_blocks(loaded.model)
    probe = RotaryProbe(loaded)
    torch.testing.assert_close(logits_of(loaded, probe), expected)
    assert 1 not in probe.rotated
    assert 0 in probe.rotated


def test_one_layer_that_does_something_else_leaves_all_sums_where_they_are() -> None:
    model = tiny_llama()
    model.model.layers[1].__class__ = ScalingLayer
    loaded = prepared(model)
    expected = logits_of(loaded, AttentionProbe())
    fuse_blocks(loaded.model)
    assert not passes_pairs(loaded)
    torch.testing.assert_close(logits_of(loaded, RotaryProbe(loaded)), expected)


@pytest.mark.parametrize("read", [lambda out: out / 2, lambda out: out * 2])
def test_who_reads_what_a_layer_passes_on_gets_the_sum(read: Callable[[Any], Any]) -> None:
    loaded = prepared(tiny_llama())
    layers_of(loaded)[1].register_forward_hook(lambda module, args, out: read(out))
    expected = logits_of(loaded, AttentionProbe())
    fuse_blocks(loaded.model)
    torch.testing.assert_close(logits_of(loaded, RotaryProbe(loaded)), expected)
    assert not passes_pairs(loaded)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_one_piece_of_compiled_code_serves_all_layers() -> None:
    graphs = []
    for num_layers in (2, 12):
        torch._dynamo.reset()
        counters.clear()
        driven = DrivenDeviceRunner(tiny_llama(num_layers=num_layers), compiled=True)
        driven.generate([driven.sequence([1, 2, 3, 4, 5]), driven.sequence([7, 8])], new_tokens=3)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0
