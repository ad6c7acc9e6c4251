"""Products of a few rows in a GPU step: by `ops.linear_few`, which streams the weight across kernels' borders."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from punica_core import ops
from punica_core.lora.layers import LoRALinear

FEW_ROWS = 0
"""Steps of up to so many rows use it; at most 8. Others leave their products to torch."""

_LIBRARY = torch.library.Library("punica", "FRAGMENT")


def serve_few_rows(model: nn.Module) -> int:
    """Let the base products of `model`'s LoRA-aware linears choose by the step's rows; returns how many linears do."""
    linears = [module for module in model.modules() if isinstance(module, LoRALinear) and _is_taken(module.weight)]
    for linear in linears:
        linear.product = few_rows_product
    return len(linears)


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · Wᵀ + b, as one node of compiled code whatever T is. x: [T, I] → [T, O]."""
    out: Tensor = torch.ops.punica.few_rows_product(x, weight, bias)
    return out


def _is_taken(weight: Tensor) -> bool:
    """Whether the kernel takes a weight [O, I]."""
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    return (is_half or not weight.is_cuda) and weight.is_contiguous() and weight.size(1) % 8 == 0


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.size(0) > FEW_ROWS:
        return functional.linear(x, weight, bias)
    y = torch.empty(x.size(0), weight.size(0), dtype=x.dtype, device=x.device)
    ops.linear_few(y, x.contiguous(), weight, bias)
    return y


def _product_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.size(0), weight.size(0))


_LIBRARY.define("few_rows_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("few_rows_product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("punica::few_rows_product", _product_shape, lib=_LIBRARY)
