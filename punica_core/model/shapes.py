"""What a loaded model looks like from outside: where its layers are, what LoRA may target, the size of its KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from punica_core.adapters.shapes import ModelShapes


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


def model_shapes(model: nn.Module) -> ModelShapes:
    """What adapters must fit, out of a `transformers` causal language model as it is built (on meta too)."""
    layers_path = f"{decoder_layers_path(model)}."
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    plain = {
        path: module
        for path, module in model.named_modules()
        if type(module) is nn.Linear and (module is head or path.startswith(layers_path))
    }
    names = {id(module): path for path, module in model.named_modules()}
    is_embedding = isinstance(embedding, nn.Embedding)
    return ModelShapes(
        linears={path: (int(linear.in_features), int(linear.out_features)) for path, linear in plain.items()},
        head=names[id(head)] if type(head) is nn.Linear else None,
        embedding=names[id(embedding)] if is_embedding else None,
        embedding_shape=(embedding.num_embeddings, embedding.embedding_dim) if is_embedding else (0, 0),
        tied=head is not None and head.weight is embedding.weight,
        biased=frozenset(path for path, linear in plain.items() if linear.bias is not None),
        parts={path: widths for path, linear in plain.items() if (widths := _parts(model.config, path, linear))},
    )


def _parts(config: Any, path: str, linear: nn.Linear) -> tuple[int, ...]:
    """Widths of the parts of a linear that the base itself has fused; empty if it is none, or not as expected."""
    leaf = path.rpartition(".")[2]
    widths: tuple[int, ...] = ()
    if leaf == "gate_up_proj":
        widths = (linear.out_features // 2,) * 2
    elif leaf == "qkv_proj":
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_width = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
        widths = (heads * head_dim, kv_width, kv_width)
    return widths if sum(widths) == linear.out_features else ()


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters and buffers, tied ones counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
