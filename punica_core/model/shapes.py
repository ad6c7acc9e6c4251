"""What a loaded model looks like from outside: where its layers are, what LoRA may target, the size of its KV."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from punica_core.lora.layers import LinearGroup


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of the keys and values of one token: L layers, K heads, D values each."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block: keys and values of P tokens in all layers."""
        return 2 * self.num_layers * block_size * self.num_kv_heads * self.head_dim * int(dtype.itemsize)


def decoder_layers_path(model: nn.Module) -> str | None:
    """Path of the list of decoder layers: the outermost, longest `nn.ModuleList`; None if there is none."""
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [(path, module) for path, module in lists if not any(path.startswith(f"{other}.") for other, _ in lists)]
    return max(outer, key=lambda item: len(item[1]), default=(None, None))[0]


def module_shapes(groups: Iterable[LinearGroup]) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of every linear that LoRA may target, by the path adapters name it with."""
    return {
        path: (group.in_features, out)
        for group in groups
        for path, out in zip(group.paths, group.out_features, strict=True)
    }


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters and buffers, tied ones counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
