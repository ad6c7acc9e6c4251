"""Tries a loaded model out before it serves: does it, with our attention and our linears, compute what it should?

A config cannot say all that a modelling file does. So the model runs on a few tokens as `transformers` runs it,
and again through our attention; both must give the same logits. On the way the probe sees what each layer asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from punica_core.errors import ConfigError
from punica_core.model.attention import (
    ATTENTION_NAME,
    AttentionSpec,
    UnsupportedAttention,
    attend_causally,
    causal_mask,
)
from punica_core.model.shapes import KVShape

PROBE_TOKENS = 8
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}


@dataclass
class AttentionProbe:
    """A `StepAttention` without a cache that notes what the layers ask for."""

    kv_shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_heads: set[int] = field(default_factory=set)
    specs: dict[int, AttentionSpec] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        if key.shape != value.shape or query.size(-1) != key.size(-1):
            raise UnsupportedAttention("its queries, keys and values differ in width")
        if layer in self.kv_shapes:
            raise UnsupportedAttention("it has several attentions in one layer")
        self.kv_shapes[layer] = (key.size(1), key.size(2))
        self.num_heads.add(query.size(1))
        self.specs[layer] = spec
        return attend_causally(query, key, value, spec, causal_mask(0, query.size(0), spec.window, query.device))


def probe_inputs(model: nn.Module) -> dict[str, Tensor]:
    """The tokens that both runs see, as keyword arguments of `forward`."""
    embedding = model.get_input_embeddings().weight
    ids = torch.arange(1, PROBE_TOKENS + 1, device=embedding.device) * 7919 % embedding.size(0)
    return {"input_ids": ids[None], "position_ids": torch.arange(PROBE_TOKENS, device=embedding.device)[None]}


def reference_logits(model: nn.Module) -> Tensor:
    """Logits [T, V] of the probe's tokens as `transformers` computes them."""
    with torch.inference_mode():
        logits: Tensor = model(**probe_inputs(model), use_cache=False).logits[0]
    return logits


def probe_attention(model: nn.Module, config: Any, expected: Tensor) -> tuple[KVShape, int, tuple[AttentionSpec, ...]]:
    """Run the model through our attention and compare.

    Returns what its KV cache must hold, its query heads (H), and how each layer attends. The model's attention must
    have been set to `ATTENTION_NAME`. Raises `ConfigError`, by name, with what differs.
    """
    probe = AttentionProbe()
    name = type(model).__name__
    try:
        with torch.inference_mode():
            logits = model(**probe_inputs(model), use_cache=False, paged=probe).logits[0]
    except (UnsupportedAttention, TypeError) as error:
        raise ConfigError(f"{name} cannot be served: {error}.", param="model") from error
    layers = config.num_hidden_layers
    if sorted(probe.kv_shapes) != list(range(layers)):
        raise ConfigError(
            f"{name} cannot be served: {len(probe.kv_shapes)} of its {layers} layers use the {ATTENTION_NAME} "
            "attention; all must.",
            param="model",
        )
    shapes = set(probe.kv_shapes.values())
    if len(shapes) > 1:
        raise ConfigError(f"{name} cannot be served: its layers have KV of different shapes {shapes}.", param="model")
    if len(probe.num_heads) > 1:
        raise ConfigError(f"{name} cannot be served: its layers have {probe.num_heads} query heads.", param="model")
    specs = tuple(probe.specs[layer] for layer in range(layers))
    _check_windows(name, config, [spec.window for spec in specs])
    _check_logits(name, logits, expected)
    return KVShape(layers, *shapes.pop()), probe.num_heads.pop(), specs


def _check_windows(name: str, config: Any, windows: Sequence[int | None]) -> None:
    """A window that a layer only put into its mask would be lost: the config and the calls must agree."""
    types = getattr(config, "layer_types", None)
    if not types:
        return
    for layer, kind in enumerate(types):
        if (kind == "sliding_attention") != (windows[layer] is not None):
            raise ConfigError(
                f"{name} cannot be served: its layer {layer} is of type {kind} but asks for a window of "
                f"{windows[layer]} tokens.",
                param="model",
            )


def is_rounding(got: Tensor, expected: Tensor) -> bool:
    """Whether logits [T, V] differ no more than they may when the same is computed in another order."""
    error, bound = _error_and_bound(got, expected)
    return error <= bound


def _error_and_bound(got: Tensor, expected: Tensor) -> tuple[float, float]:
    error = float((got.float() - expected.float()).abs().max())
    return error, _TOLERANCE[expected.dtype] * max(1.0, float(expected.float().abs().max()))


def _check_logits(name: str, got: Tensor, expected: Tensor) -> None:
    error, bound = _error_and_bound(got, expected)
    if not error <= bound:
        raise ConfigError(
            f"{name} cannot be served: its logits through paged attention differ by {error:.3g} from those of "
            f"transformers; at most {bound:.3g} is rounding.",
            param="model",
        )
