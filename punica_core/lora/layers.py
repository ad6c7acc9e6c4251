"""Linear layers that add what the step's adapters add.

Linears that read the same input (q, k and v; gate and up) share one `LoRALinear`: one matrix, one product and one
LoRA call over its slices. The modelling code still calls each of them by name: a `LinearSlice` stands where the
original module stood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from punica_core.lora.linear import linear


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """The base linears behind one `LoRALinear`.

    index: position among the model's groups. paths: module path of each slice, as adapters name it.
    in_features: I. out_features: O of each slice; the fused output is their concatenation, ΣO wide.
    """

    index: int
    paths: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]


class StepLoRA(Protocol):
    """What the adapters of one step add to the groups' outputs."""

    def add(self, group: LinearGroup, x: Tensor, y: Tensor) -> None:
        """y[rows] += scale · (x[rows] · Aᵀ) · Bᵀ for each segment and slice. x: [T, I]; y: [T, ΣO], in place."""


class TableStep(Protocol):
    """What the adapters of one step add, read from tables on the device; may be compiled and captured.

    table: the group's, int64 [slices, N, RECORD_WORDS]; out_features: of its slices; x: [T, I]; weight: [ΣO, I];
    bias: [ΣO] or None.
    """

    def product(
        self, table: Tensor, out_features: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """x · Wᵀ + b, and for rows with adapters what `StepLoRA.add` adds, in whatever order. → [T, ΣO]."""


class StepEmbedding(Protocol):
    """What the adapters of one step make of the token embeddings."""

    def embed(self, token_ids: Tensor, y: Tensor) -> None:
        """Change the embeddings of tokens whose rows have an adapter. token_ids: [T]; y: [T, H], in place."""


class EmbeddingContext:
    """Holds the running step's adapters of the embedding; `step` is None if no row has one."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step: StepEmbedding | None = None


class LoRAContext:
    """Holds the running step's LoRA for all layers of one model: `step` or `table_step`, None if no row has an adapter.

    A `TableStep` serves layers whose `table` is set.
    """

    __slots__ = ("step", "table_step")

    def __init__(self) -> None:
        self.step: StepLoRA | None = None
        self.table_step: TableStep | None = None


class LoRAEmbedding(nn.Module):  # type: ignore[misc]
    """The model's own embedding module, `base`, plus what the step's adapters make of it."""

    def __init__(self, base: nn.Embedding, context: EmbeddingContext) -> None:
        super().__init__()
        self.base = base
        self.context = context

    @property
    def weight(self) -> nn.Parameter:
        """[V, H], before any scale."""
        return self.base.weight

    @property
    def scale(self) -> float:
        """What `base` multiplies its rows by (Gemma's embed_scale), in the weight's dtype; mostly 1."""
        factor = getattr(self.base, "embed_scale", None)
        return 1.0 if factor is None else float(torch.as_tensor(factor).to(self.base.weight.dtype))

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [...] → [..., H]."""
        y: Tensor = self.base(token_ids)
        step = self.context.step
        if step is not None:
            step.embed(token_ids.reshape(-1), y.view(-1, y.size(-1)))
        return y


class LoRALinear(nn.Module):  # type: ignore[misc]
    """One or more base linears of equal input, as one matrix, plus the step's adapters.

    weight: [ΣO, I]; bias: [ΣO] or None; of a single linear its own parameters. Without adapters the output is the base
    linears'. context: where the running step's adapters are found; may be replaced. table: the group's records on the
    device, where adapters are served from tables. product: how x · Wᵀ + b is computed elsewhere;
    may be replaced.
    """

    def __init__(self, group: LinearGroup, linears: Sequence[nn.Linear], context: LoRAContext) -> None:
        super().__init__()
        self.group = group
        self.context = context
        self.table: Tensor | None = None
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear
        self._out_features = list(group.out_features)
        weights = [part.weight for part in linears]
        biases = [part.bias for part in linears if part.bias is not None]
        if biases and len(biases) < len(linears):
            raise ValueError(f"{group.paths}: linears with and without a bias cannot be fused")
        self.weight = _joined(weights)
        self.bias = _joined(biases) if biases else None

    @classmethod
    def from_linear(cls, source: nn.Linear, group: LinearGroup | None = None) -> LoRALinear:
        """A layer in the place of `source`, with its parameters; `BatchLoRA` says which adapter each row uses.

        group: default one of its own, whose only slice has the path "".
        Raises TypeError for anything but a plain nn.Linear (quantized and parametrized ones are subclasses).
        """
        if type(source) is not nn.Linear:
            raise TypeError(f"got a {type(source).__name__}, want a plain torch.nn.Linear")
        own = LinearGroup(0, ("",), source.in_features, (source.out_features,))
        layer = cls(own if group is None else group, [source], LoRAContext())
        layer.train(source.training)
        return layer

    @property
    def in_features(self) -> int:
        return self.group.in_features

    @property
    def out_features(self) -> int:
        return sum(self.group.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., I] → [..., ΣO]."""
        if x.dim() == 2:
            return self._rows(x)
        y = self._rows(x.reshape(-1, x.size(-1)))
        return y.view(*x.shape[:-1], y.size(-1))

    def _rows(self, x: Tensor) -> Tensor:
        """x: [T, I] → [T, ΣO]."""
        table_step, table = self.context.table_step, self.table
        # All that differs between layers of one shape is a tensor: compiled code serves them all.
        if table_step is not None and table is not None:
            y = table_step.product(table, self._out_features, x, self.weight, self.bias)
        else:
            y = self.product(x, self.weight, self.bias)
        step = self.context.step
        if step is not None:
            step.add(self.group, x, y)
        return y


class FusedProjection:
    """Computes a `LoRALinear` once for the slices that are then asked for, in any order, with the same input."""

    def __init__(self, linear: LoRALinear) -> None:
        self.linear = linear
        self._input: Tensor | None = None
        self._slices: list[Tensor | None] = []

    def take(self, index: int, x: Tensor) -> Tensor:
        """Slice `index` of the product with x; every slice is handed out once per product."""
        if x is not self._input or self._slices[index] is None:
            self._input = x
            # forward and split_with_sizes: the wrappers around them would cost as much as a small product.
            product = self.linear.forward(x)
            self._slices = list(product.split_with_sizes(self.linear.group.out_features, dim=-1))
        taken = self._slices[index]
        assert taken is not None
        self._slices[index] = None
        if not any(part is not None for part in self._slices):
            self._input = None  # the activations must not outlive the layer
        return taken


class LinearSlice(nn.Module):  # type: ignore[misc]
    """Stands where one of several fused linears stood: x [..., I] → its slice [..., O], a view."""

    def __init__(self, fused: FusedProjection, index: int, owner: LoRALinear | None) -> None:
        super().__init__()
        self._fused = fused
        self._index = index
        self.fused = owner  # the first slice registers the weights, so that state, dtype and device moves see them once

    @property
    def weight(self) -> Tensor:
        """[O, I], a view of the fused weight."""
        return self._part(self._fused.linear.weight)

    @property
    def bias(self) -> Tensor | None:
        """[O], a view; None if the fused linears have none."""
        bias = self._fused.linear.bias
        return None if bias is None else self._part(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._fused.take(self._index, x)

    def _part(self, whole: Tensor) -> Tensor:
        return whole.split(self._fused.linear.group.out_features)[self._index]


def _joined(parts: Sequence[nn.Parameter]) -> nn.Parameter:
    """One parameter out of several; a single one is taken as it is."""
    if len(parts) == 1:
        return parts[0]
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)
