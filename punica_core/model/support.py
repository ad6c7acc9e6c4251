"""Which models can be served correctly, as far as the config tells. What it cannot tell, `probe` tries out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from punica_core.errors import ConfigError

_ROPE_FIXED = frozenset({"default", "linear", "yarn", "llama3"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_supported(config: Any) -> None:
    """Raise `ConfigError`, naming the model type and the reason, for a `transformers` config that cannot be served."""
    for reason in _reasons(config):
        raise ConfigError(f"Model type {config.model_type!r} cannot be served: {reason}", param="model")


def _reasons(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder; only decoder-only language models are supported."
    if getattr(config, "quantization_config", None):
        yield "its weights are quantized; use a checkpoint in float32, bfloat16 or float16."
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        yield "its attention is not causal."
    for key in _EXPERT_KEYS:
        if (getattr(config, key, None) or 0) > 1:
            yield f"it is a mixture of experts ({key} = {getattr(config, key)}); only dense models are supported."
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        yield "it reads images or audio; only text models are supported."
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        yield f"it has layers of type {', '.join(sorted(unknown))}; {', '.join(sorted(_LAYER_TYPES))} are supported."
    names = getattr(config, "architectures", None) or []
    if names and not names[0].endswith(("ForCausalLM", "LMHeadModel")):
        yield f"its architecture is {names[0]}, not one for causal language modelling."


def max_model_len(config: Any, asked: int) -> int:
    """The longest sequence in tokens: what was asked for, or with 0 the model's own limit.

    Raises `ConfigError` when the model has not so many positions, or when its RoPE frequencies would depend on
    the longest sequence of a batch, so that one request changed another's answer.
    """
    limit: int = getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 0) or asked
    if not limit:
        raise ConfigError("The model's config states no longest sequence; set max_model_len.", param="max_model_len")
    why = f"the model has {limit} positions"
    for rope in _ropes(config):
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            original: int = _original_positions(config, rope, limit)
            limit, why = min(limit, original), f"longrope changes its frequencies after {original} tokens"
        elif kind == "dynamic":
            why = f"dynamic RoPE changes its frequencies after {limit} tokens"
        elif kind not in _ROPE_FIXED:
            raise ConfigError(f"RoPE of type {kind!r} is not supported.", param="model")
    if asked > limit:
        raise ConfigError(f"max_model_len is {asked}, but {why}; set it to at most {limit}.", param="max_model_len")
    return asked or limit


def _original_positions(config: Any, rope: Mapping[str, Any], limit: int) -> Any:
    """Positions that a model with scaled RoPE was first trained on."""
    of_config = getattr(config, "original_max_position_embeddings", None)
    return rope.get("original_max_position_embeddings") or of_config or limit


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The RoPE parameters; some models have one set per type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in found or not any(isinstance(value, Mapping) for value in found.values()):
        yield found
    else:
        yield from (value for value in found.values() if isinstance(value, Mapping))
