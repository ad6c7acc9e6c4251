"""The forward pass of common decoders in few calls, for the CPU, where a decode step of one row pays for each of them.

The modelling code of `transformers` stays the definition: a model is taken only if it consists of exactly the parts
that are known here (Llama, Mistral, Qwen 2 and 3 and their kin), and if this pass then gives its logits. The parts
themselves (norms, LoRA-aware linears, rotary embedding, activation) remain the model's own modules.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from punica_core.lora.layers import LinearSlice, LoRALinear
from punica_core.model.attention import AttentionSpec, StepAttention
from punica_core.model.probe import AttentionProbe, is_rounding

logger = logging.getLogger(__name__)

_MODEL = ("lm_head", "model")
_BODY = ("embed_tokens", "layers", "norm", "rotary_emb")
_LAYER = ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")
_MLP = ("act_fn", "down_proj", "gate_proj", "up_proj")
_ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
_ATTENTION_WITH_NORMS = ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj")

_PROBE_TOKENS = 5

_LOUDNESS = 16.0
"""Factor of what norms give out in a second trial: what clips, as OLMo's attention can, would show."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer's parts. qkv: q, k and v as one; norms: of the heads of q and k, or None."""

    spec: AttentionSpec
    input_norm: nn.Module
    qkv: LoRALinear
    head_norms: tuple[nn.Module, nn.Module] | None
    out: LoRALinear
    mlp_norm: nn.Module
    gate_up: LoRALinear
    activation: nn.Module
    down: LoRALinear


class LeanForward:
    """Logits of a step, of the parts of a loaded model. num_heads: H; num_kv_heads: K; head_dim: D."""

    def __init__(self, model: Any, layers: Sequence[_Layer], num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._embedding = model.get_input_embeddings()
        self._rotary = model.model.rotary_emb
        self._norm = model.model.norm
        self._head = model.get_output_embeddings()
        self._layers = tuple(layers)
        self._rotated = num_heads + num_kv_heads
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim

    @property
    def norms(self) -> list[nn.Module]:
        """Those in front of attentions and MLPs."""
        return [norm for layer in self._layers for norm in (layer.input_norm, layer.mlp_norm)]

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor | None, paged: StepAttention
    ) -> Tensor:
        """input_ids, position_ids: [1, T]; logit_rows: [n], None for all → logits [n, V] in the model's dtype."""
        hidden = self._embedding(input_ids)
        cos, sin = self._rotary(hidden, position_ids)
        hidden, cos, sin = hidden[0], cos[0, :, None], _half_negated(sin[0])[:, None]
        for index, layer in enumerate(self._layers):
            hidden = self._layer(index, layer, hidden, cos, sin, paged)
        if logit_rows is not None and not (hidden.size(0) == logit_rows.numel() == 1):
            hidden = hidden.index_select(0, logit_rows)
        logits: Tensor = self._head.forward(self._norm.forward(hidden))
        return logits

    def _layer(
        self, index: int, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor, paged: StepAttention
    ) -> Tensor:
        """hidden: [T, H·D], may be changed; cos, sin: [T, 1, D] → [T, H·D]."""
        tokens, dim, rotated = hidden.size(0), self._head_dim, self._rotated
        heads = layer.qkv.forward(layer.input_norm.forward(hidden)).view(tokens, -1, dim)
        turning, value = heads.split_with_sizes((rotated, self._num_kv_heads), 1)
        if layer.head_norms is not None:
            q_norm, k_norm = layer.head_norms
            q, k = turning.split_with_sizes((self._num_heads, self._num_kv_heads), 1)
            turning = torch.cat((q_norm.forward(q), k_norm.forward(k)), 1)
        turned = (turning * cos).addcmul_(turning.roll(dim // 2, -1), sin)
        query, key = turned.split_with_sizes((self._num_heads, self._num_kv_heads), 1)
        attended = paged.attend(index, query, key, value, layer.spec)
        hidden = layer.out.forward(attended.view(tokens, -1)).add_(hidden)
        gate, up = layer.gate_up.forward(layer.mlp_norm.forward(hidden)).chunk(2, -1)
        return layer.down.forward(layer.activation.forward(gate) * up).add_(hidden)


def lean_forward(model: Any, specs: Sequence[AttentionSpec], num_heads: int, limit: int) -> LeanForward | None:
    """The model's forward pass in few calls; None if it is not of the known parts or gives other logits.

    model: as `prepare` leaves it; specs: how each layer attends; num_heads: H; limit: its max_model_len.
    """
    lean = _assemble(model, specs, num_heads)
    if lean is None:
        return None
    if _gives_its_logits(lean, model, limit):
        return lean
    logger.info("%s runs as transformers wrote it: in few calls it gives other logits", type(model).__name__)
    return None


def _gives_its_logits(lean: LeanForward, model: Any, limit: int) -> bool:
    """Whether both agree on tokens whose positions are far apart: what depends on them in another way would show."""
    embedding = model.get_input_embeddings().weight
    position_ids = torch.linspace(0, limit - 1, _PROBE_TOKENS, device=embedding.device).long()[None]
    input_ids = torch.arange(1, _PROBE_TOKENS + 1, device=embedding.device)[None] * 7919 % embedding.size(0)
    with torch.inference_mode():
        cos, _ = model.model.rotary_emb(embedding[None, :_PROBE_TOKENS], position_ids)
        if cos.dtype != embedding.dtype:  # such a model rotates in another dtype than it attends in
            return False

        def alike(one: AttentionProbe, other: AttentionProbe) -> bool:
            output = model(input_ids=input_ids, position_ids=position_ids, use_cache=False, paged=one)
            return is_rounding(lean(input_ids, position_ids, None, other), output.logits[0])

        if not alike(AttentionProbe(), AttentionProbe()):
            return False
        with _loud(lean.norms):
            tap, lean_tap = _Tap(), _Tap()
            return alike(tap, lean_tap) and all(map(is_rounding, lean_tap.seen, tap.seen))


@dataclass
class _Tap(AttentionProbe):
    """Notes what it is to attend to, and answers with the queries: scores of loud numbers magnify rounding."""

    seen: list[Tensor] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self.seen += [query, key, value]
        return query.contiguous()


@contextlib.contextmanager
def _loud(norms: Sequence[Any]) -> Iterator[None]:
    """What norms give out is `_LOUDNESS` times as large meanwhile."""
    for norm in norms:
        norm.forward = functools.partial(_louder, norm.forward)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def _louder(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return _LOUDNESS * forward(x)


def _assemble(model: Any, specs: Sequence[AttentionSpec], num_heads: int) -> LeanForward | None:
    """The model's parts, if they are all known."""
    head = model.get_output_embeddings()
    if _names(model) != _MODEL or _names(model.model) != _BODY or not isinstance(head, LoRALinear):
        return None
    layers = [_known_layer(layer, spec) for layer, spec in zip(model.model.layers, specs, strict=True)]
    known = [layer for layer in layers if layer is not None]
    widths = {layer.qkv.group.out_features for layer in known}
    if len(known) < len(layers) or len(widths) != 1:
        return None
    q_width, kv_width, _ = widths.pop()
    head_dim = q_width // num_heads
    return LeanForward(model, known, num_heads, kv_width // head_dim, head_dim)


def _known_layer(layer: nn.Module, spec: AttentionSpec) -> _Layer | None:
    if _names(layer) != _LAYER or _names(layer.mlp) != _MLP:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    if _names(attention) not in (_ATTENTION, _ATTENTION_WITH_NORMS):
        return None
    qkv = _fused(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = _fused(mlp.gate_proj, mlp.up_proj)
    if qkv is None or gate_up is None:
        return None
    return _Layer(
        spec=spec,
        input_norm=layer.input_layernorm,
        qkv=qkv,
        head_norms=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None,
        out=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm,
        gate_up=gate_up,
        activation=mlp.act_fn,
        down=mlp.down_proj,
    )


def _fused(*slices: nn.Module) -> LoRALinear | None:
    """The linear behind all of these, in this order."""
    if not all(isinstance(part, LinearSlice) for part in slices):
        return None
    fused: LoRALinear | None = slices[0].fused
    return fused if fused is not None and len(fused.group.paths) == len(slices) else None


def _names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's children, sorted."""
    return tuple(sorted(name for name, _ in module.named_children()))


def _half_negated(sin: Tensor) -> Tensor:
    """sin [T, D] with its first half negated: what a row turned by half a head is multiplied with."""
    half = sin.size(-1) // 2
    return torch.cat((-sin[:, :half], sin[:, half:]), -1)
