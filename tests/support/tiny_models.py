"""Tiny random causal language models, one for each shape of architecture that the engine must get right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 131
MAX_POSITIONS = 256
LONG_VOCAB_SIZE = 512

TINY_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
)


def _build(config_class: type, model_class: type, **more: Any) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        torch.manual_seed(7)
        model: PreTrainedModel = model_class(config_class(**{**TINY_SIZES, **more})).eval()
        spread(model)
        return model

    return build


def long_llama() -> LlamaForCausalLM:
    """A random Llama of heads and context as kernels for GPUs want them: LONG_VOCAB_SIZE tokens, 9,000 positions."""
    more = {
        "vocab_size": LONG_VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 352,
        "num_attention_heads": 4,
        "max_position_embeddings": 9000,
    }
    model = _build(LlamaConfig, LlamaForCausalLM, tie_word_embeddings=False, **more)()
    assert isinstance(model, LlamaForCausalLM)
    return model


def spread(model: PreTrainedModel) -> None:
    """Larger weights, and biases and norms off their initial 0 and 1, so that leaving any of them out shows."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * parameter.size(-1) ** -0.5)


TINY_MODELS: Mapping[str, Callable[[], PreTrainedModel]] = MappingProxyType(
    {
        "smollm2": _build(LlamaConfig, LlamaForCausalLM, tie_word_embeddings=True),
        "llama": _build(LlamaConfig, LlamaForCausalLM, tie_word_embeddings=False, head_dim=16),
        "qwen2": _build(Qwen2Config, Qwen2ForCausalLM, tie_word_embeddings=True),
        "qwen3": _build(Qwen3Config, Qwen3ForCausalLM, tie_word_embeddings=False, head_dim=12),
        "mistral": _build(MistralConfig, MistralForCausalLM, sliding_window=None),
        "mistral_window": _build(MistralConfig, MistralForCausalLM, sliding_window=9),
        "gemma2": _build(
            Gemma2Config,
            Gemma2ForCausalLM,
            head_dim=12,
            sliding_window=7,
            query_pre_attn_scalar=12,
            attn_implementation="eager",
        ),
    }
)
"""Builders by name. Two calls of one give equal, separate models; PEFT changes its base in place, so build afresh."""
