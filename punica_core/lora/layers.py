"""Linear layers that add what the step's adapters add.

Linears that read the same input (q, k and v; gate and up) share one `LoRALinear`: one matrix, one product and one
LoRA call over its slices. The modelling code still calls each of them by name: a `LinearSlice` stands where the
original module stood.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class LoRAContext:
    """Holds the running step's LoRA for all layers of one model; `step` is None if no row has an adapter."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step: StepLoRA | None = None


class BaseLinear(nn.Module):  # type: ignore[misc]
    """A linear layer that no adapter changes. weight: [O, I], shared with whatever it is tied to; bias: [O] or None."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.weight = source.weight
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., I] → [..., O]."""
        return linear(x, self.weight, self.bias)


class LoRALinear(nn.Module):  # type: ignore[misc]
    """One or more base linears of equal input, as one matrix, plus the step's adapters.

    weight: [ΣO, I]; bias: [ΣO] or None. Without adapters the output is the base linears'.
    """

    def __init__(self, group: LinearGroup, linears: Sequence[nn.Linear], context: LoRAContext) -> None:
        super().__init__()
        self.group = group
        self._context = context
        weights = [part.weight.detach() for part in linears]
        biases = [part.bias.detach() for part in linears if part.bias is not None]
        if biases and len(biases) < len(linears):
            raise ValueError(f"{group.paths}: linears with and without a bias cannot be fused")
        self.weight = _joined(weights)
        self.bias = _joined(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., I] → [..., ΣO]."""
        y = linear(x, self.weight, self.bias)
        step = self._context.step
        if step is not None:
            step.add(self.group, x.view(-1, x.size(-1)), y.view(-1, y.size(-1)))
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
            self._slices = list(self.linear(x).split(self.linear.group.out_features, dim=-1))
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

    def forward(self, x: Tensor) -> Tensor:
        return self._fused.take(self._index, x)


def _joined(parts: Sequence[Tensor]) -> nn.Parameter:
    """One parameter out of several; a single part is taken as it is, without a copy."""
    return nn.Parameter(parts[0] if len(parts) == 1 else torch.cat(list(parts)), requires_grad=False)
