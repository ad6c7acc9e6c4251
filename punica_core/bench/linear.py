"""Benchmark of the products of a few rows: ``python -m punica_core.bench.linear``.

The projections of eight Llama-3.1-8B layers in a CUDA graph, bf16, with a small kernel in front of each, by torch and
by `ops.linear_few`: microseconds a layer. Floors are the weights over 4.18 TB/s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from punica_core import ops
from punica_core.bench.lora_cases import FLOOR_BYTES_PER_US, LLAMA_8B
from punica_core.bench.model_case import capture, replay_ms
from punica_core.ops import cuda

NUM_LAYERS: Final = 8
ROWS: Final = (1, 2, 4, 8)

Product = Callable[[Tensor, Tensor, Tensor], object]
"""(y, x, weight) → y."""


def by_torch(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """As the engine's compiled code does it."""
    torch.mm(x, weight.t(), out=y)


class Layers:
    """One projection, or all four, of each layer. names: of the groups."""

    def __init__(self, rows: int, weights: dict[str, list[Tensor]], names: list[str]) -> None:
        self._weights = [weights[name] for name in names]
        self._x = [torch.randn(rows, own[0].size(1), dtype=torch.bfloat16, device="cuda") for own in self._weights]
        self._y = [torch.empty(rows, own[0].size(0), dtype=torch.bfloat16, device="cuda") for own in self._weights]

    def run(self, product: Product) -> None:
        """All layers, a small kernel before each product."""
        for layer in range(NUM_LAYERS):
            for own, x, y in zip(self._weights, self._x, self._y, strict=True):
                x.mul_(1.0)
                product(y, x, own[layer])

    def error(self) -> float:
        """‖ours - torch's‖ / ‖torch's‖, the largest of the projections."""
        errors = []
        for own, x, y in zip(self._weights, self._x, self._y, strict=True):
            ops.linear_few(y, x, own[0])
            wanted = functional.linear(x.float(), own[0].float())
            errors.append(float((y.float() - wanted).norm() / wanted.norm()))
        return max(errors)


def main() -> int:
    """Command line of the module."""
    cuda.load()
    torch.manual_seed(0)
    shapes = {group.name: (sum(group.out_features), group.in_features) for group in LLAMA_8B}
    weights = {
        name: [torch.randn(shape, dtype=torch.bfloat16, device="cuda") / 64 for _ in range(NUM_LAYERS)]
        for name, shape in shapes.items()
    }
    print("rows  projection      torch   ours  floor  error")
    for rows in ROWS:
        for names in (*([name] for name in shapes), list(shapes)):
            layers = Layers(rows, weights, names)
            error = layers.error()
            graphs = [capture(partial(layers.run, product)) for product in (by_torch, ops.linear_few)]
            theirs, ours = (1000 * ms / NUM_LAYERS for ms in replay_ms(graphs))
            floor = sum(2 * shapes[name][0] * shapes[name][1] for name in names) / FLOOR_BYTES_PER_US
            label = names[0] if len(names) == 1 else "all"
            print(f"{rows:>4}  {label:<12} {theirs:>8.1f} {ours:>6.1f} {floor:>6.1f}  {error:.2g}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
