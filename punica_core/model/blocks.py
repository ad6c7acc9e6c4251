"""Decoder blocks as a GPU step wants them: fewer kernels, the same numbers.

An attention whose queries and keys are rotated and otherwise left as the fused projection made them hands that product
to attention whole, which rotates and appends in one kernel. And layers pass the sum of their branches on unsummed, so
that it is formed by the kernel that normalizes it next. What a modelling file does cannot be told from its names: each
block is tried on numbers, and one that comes out different stays as it was.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from punica_core.lora.layers import LinearSlice, LoRALinear
from punica_core.model.attention import AttentionSpec, layer_of
from punica_core.model.attention_op import split_rotated
from punica_core.model.probe import AttentionProbe, is_rounding, probe_inputs
from punica_core.model.shapes import decoder_layers_path

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Relative error of what rounds at other places."""

_LOUDNESS = (1.0, 16.0)
"""Size of the trials' inputs: what clips, caps or normalizes would show."""

_KERNEL_MULTIPLE = 16
"""Of the elements of a head and of those that rotate, for the kernel."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


def fuse_blocks(model: nn.Module) -> None:
    """Rewrite what can be of a prepared model's attentions and layers; may be called again.

    Layers that were rewritten pass pairs of tensors to each other; the model is called as before.
    """
    path = decoder_layers_path(model)
    assert path is not None, "a loaded model has layers"
    layers = list(model.get_submodule(path))
    attentions = [module for layer in layers for module in layer.modules() if _fused_product(module) is not None]
    if any(_is_rewritten(module) for module in (*attentions, *layers)):
        return
    with torch.inference_mode():
        calls = _calls_of(model, (*attentions, *layers))
        rotating = sum(_try_rotary(module, calls[module]) for module in attentions if module in calls)
        unsummed = _try_unsummed(model, model.get_submodule(path.rpartition(".")[0]), layers, calls)
    logger.info(
        "%d of %d attentions rotate and append in one kernel; %s",
        rotating,
        len(layers),
        "sums are left to the next norm" if unsummed else "each layer forms its own sum",
    )


def _is_rewritten(module: nn.Module) -> bool:
    return hasattr(type(module), "rewritten")


def _calls_of(model: nn.Module, modules: Sequence[nn.Module]) -> dict[nn.Module, Call]:
    """With what the model calls each of `modules`."""
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[module] = (args, kwargs)

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        _logits(model, AttentionProbe())
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _logits(model: nn.Module, paged: AttentionProbe) -> Tensor:
    logits: Tensor = model(**probe_inputs(model), use_cache=False, paged=paged).logits[0]
    return logits


# Attention


def _fused_product(attention: nn.Module) -> LoRALinear | None:
    """What computes queries, keys and values at once, if `attention` has them as slices of one product."""
    query, *others = (getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj"))
    if not isinstance(query, LinearSlice) or not all(isinstance(part, LinearSlice) for part in others):
        return None
    out, head_dim = getattr(attention, "o_proj", None), getattr(attention, "head_dim", None)
    is_known = isinstance(out, LoRALinear) and isinstance(head_dim, int)
    return query.fused if is_known else None


@functools.cache
def _rotary_class(original: type) -> type:
    """The class of an attention that leaves rotating to `paged`, if that can. One for each original class, so that
    compiled code serves all layers."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: Any = None,
        paged: Any = None,
        **others: Any,
    ) -> Any:
        if not hasattr(paged, "attend_rotary"):
            others |= {"position_embeddings": position_embeddings, "paged": paged}
            return original.forward(self, hidden_states, *args, **others)  # type: ignore[attr-defined]
        cos, sin = position_embeddings
        product = self.q_proj.fused
        width = product.group.out_features[0]
        qkv = product(hidden_states)[0]
        out = paged.attend_rotary(layer_of(self, paged), qkv, cos[0], sin[0], width, self.o_proj.weight)
        return self.o_proj(out[None]), None

    return type(f"Rotary{original.__name__}", (original,), {"forward": forward, "rewritten": True})


class _Tap:
    """A `RotaryAttention` that notes what it is to attend to and answers with given numbers."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        self._kv_shape = (kv_heads, head_dim)
        self.seen: tuple[Tensor, ...] = ()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None) -> Tensor:
        self.seen = (query, key, value)
        return _numbers(query, seed=1)

    def attend_rotary(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, width: int, soon: Tensor) -> Tensor:
        return self.attend(layer, *split_rotated(qkv, cos, sin, *self._kv_shape), None).flatten(1)


def _tap_of(attention: nn.Module) -> _Tap:
    product, head_dim = _fused_product(attention), int(attention.head_dim)
    assert product is not None
    return _Tap(product.group.out_features[1] // head_dim, head_dim)


def _numbers(like: Tensor, seed: int) -> Tensor:
    """Normally distributed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


def _try_rotary(attention: nn.Module, call: Call) -> bool:
    """Let `attention` leave rotating to `paged`, unless it then computes something else."""
    original: Any = type(attention)
    embeddings = call[1].get("position_embeddings")
    if not _can_rotate(embeddings, int(attention.head_dim), attention.o_proj.weight.dtype):
        return False
    before = _attended(attention, call)
    attention.__class__ = _rotary_class(original)  # as torch's parametrizations do; keeps paths, weights and hooks
    if _alike(_attended(attention, call), before):
        return True
    attention.__class__ = original
    return False


def _can_rotate(embeddings: Any, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether position embeddings are such as `ops.rotary_append` takes beside a cache of `dtype`: OLMo's are fp32 in
    any model."""
    if not isinstance(embeddings, tuple) or [getattr(part, "ndim", 0) for part in embeddings] != [3, 3]:
        return False
    cos, sin = embeddings
    multiple = _KERNEL_MULTIPLE if cos.is_cuda else 2
    fits = cos.size(-1) <= head_dim and cos.size(-1) % multiple == head_dim % multiple == 0
    return bool(fits and cos.shape == sin.shape and cos.dtype == sin.dtype == dtype)


def _attended(attention: nn.Module, call: Call) -> list[Tensor]:
    """What an attention gives to `paged`, and what it makes of the answer, for numbers of each loudness."""
    args, kwargs = call
    tap, found = _tap_of(attention), []
    embeddings = tuple(_numbers(part, seed) for seed, part in enumerate(kwargs["position_embeddings"], 2))
    kwargs = {**kwargs, "paged": tap, "position_embeddings": embeddings}
    hidden = args[0] if args else kwargs.pop("hidden_states")
    for loudness in _LOUDNESS:
        out = attention(loudness * _numbers(hidden, seed=4), *args[1:], **kwargs)
        found += [*tap.seen, out[0]]
    return found


def _alike(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether all differ by rounding at most; what is not finite is not alike."""
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool((a.float() - b.float()).norm() <= _TOLERANCE[b.dtype] * b.float().norm())
        for a, b in zip(found, wanted, strict=True)
    )


# Layers


@functools.cache
def _unsummed_class(original: type) -> type:
    """The class of a pre-norm layer that takes and returns (what its last branch computed, the stream to add it to)."""

    def call(self: Any, hidden_states: Any, **others: Any) -> Any:
        if isinstance(hidden_states, Tensor):  # the first layer's; compiled code shall not tell it from the others
            hidden_states = hidden_states, torch.zeros_like(hidden_states)
        return original.__call__(self, hidden_states, **others)

    def forward(self: Any, hidden_states: tuple[Tensor, Tensor], **others: Any) -> tuple[Tensor, Tensor]:
        residual = _summed(hidden_states)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(residual), **others)
        residual = residual + attended
        return self.mlp(self.post_attention_layernorm(residual)), residual

    members = {"__call__": call, "forward": forward, "rewritten": True}
    return type(f"Unsummed{original.__name__}", (original,), members)


@functools.cache
def _summing_class(original: type) -> type:
    """The class of a norm that adds up such a pair."""

    def forward(self: Any, hidden_states: Any) -> Any:
        return original.forward(self, _summed(hidden_states))  # type: ignore[attr-defined]

    return type(f"Summing{original.__name__}", (original,), {"forward": forward, "rewritten": True})


def _summed(hidden_states: Any) -> Tensor:
    if isinstance(hidden_states, Tensor):
        return hidden_states
    branch, residual = hidden_states
    return residual + branch


def _try_unsummed(model: nn.Module, body: nn.Module, layers: Sequence[nn.Module], calls: dict[nn.Module, Call]) -> bool:
    """Let all layers pass unsummed pairs on to the model's last norm, unless anything then computes something else."""
    norm = getattr(body, "norm", None)
    if not isinstance(norm, nn.Module) or not all(_is_pre_norm(layer, calls) for layer in layers):
        return False
    before = [_passed_on(layer, calls[layer]) for layer in layers]
    wanted = _logits(model, AttentionProbe())
    originals: dict[nn.Module, Any] = {module: type(module) for module in (norm, *layers)}
    norm.__class__ = _summing_class(originals[norm])
    for layer in layers:
        layer.__class__ = _unsummed_class(originals[layer])
    try:
        after = [_passed_on(layer, calls[layer]) for layer in layers]
        if all(map(_alike, after, before)) and is_rounding(_logits(model, AttentionProbe()), wanted):
            return True
    except (AttributeError, RuntimeError, TypeError, ValueError):
        logger.debug("something else than the next layer reads what a layer passes on", exc_info=True)
    for module, original in originals.items():
        module.__class__ = original
    return False


def _is_pre_norm(layer: nn.Module, calls: dict[nn.Module, Call]) -> bool:
    """Whether a layer has the parts of one, and is called as `_unsummed_class` can be."""
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    has_parts = all(isinstance(getattr(layer, name, None), nn.Module) for name in names)
    is_called = layer in calls and len(calls[layer][0]) == 1
    return has_parts and is_called and _fused_product(layer.self_attn) is not None


def _passed_on(layer: nn.Module, call: Call) -> list[Tensor]:
    """What a layer adds to given numbers."""
    (hidden,), kwargs = call
    branch, residual = _numbers(hidden, seed=5), _numbers(hidden, seed=6)
    given = residual + branch
    kwargs = {**kwargs, "paged": _tap_of(layer.self_attn)}
    out = layer((branch, residual) if _is_rewritten(layer) else given, **kwargs)
    return [_summed(out) - given]
