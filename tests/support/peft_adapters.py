"""Tiny Llama bases and real PEFT adapters for them, made on the spot.

    F0   tiny_llama()                 hidden 64, intermediate 176, 3 layers, 4 heads, 2 kv heads, vocab 512, untied
    F0t  tiny_llama(tied=True)        the same with tied embeddings
    F0b  tiny_llama(hidden_size=128)  another base

PEFT changes a base in place: build a fresh one for every reference.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from punica_core.adapters.files import CONFIG_NAME, WEIGHTS_NAME, signature_of
from punica_core.protocol import AdapterRef

ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Tensors = dict[str, torch.Tensor]


def tiny_llama(
    *, seed: int = 0, tied: bool = False, hidden_size: int = 64, num_layers: int = 3, num_kv_heads: int = 2
) -> LlamaForCausalLM:
    """A random fp32 Llama in eval mode; equal arguments give equal weights."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=176,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def linear_shapes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """ModelShapes of a base: its linear layers inside decoder layers."""
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    }


@contextlib.contextmanager
def peft_warnings_ignored() -> Iterator[None]:
    """PEFT's own deprecation warnings are none of our tests' business, which turn warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_peft_adapter(
    folder: Path,
    base: PreTrainedModel | None = None,
    *,
    seed: int = 1,
    std: float = 0.15,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Save a LoRA adapter as PEFT does and return its folder. Without `base`: for F0.

    All of its LoRA matrices are drawn from N(0, std²) by `seed`, B included, so that it changes the output; whatever
    else it trains (magnitudes, biases, saved modules, token rows) is moved off the base's values. Defaults of the
    config: r=8, lora_alpha=16, all seven linears.
    """
    options = {"r": 8, "lora_alpha": 16, "target_modules": list(ALL_LINEARS), "task_type": "CAUSAL_LM"} | config
    with peft_warnings_ignored():
        model = get_peft_model(base if base is not None else tiny_llama(), LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.2 * noise)
            elif "lora_" in name:
                parameter.copy_(noise * std)
            else:
                parameter.add_(noise * std)
    with peft_warnings_ignored():
        model.save_pretrained(folder)
    if dtype != torch.float32:
        edit_tensors(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    return folder


def peft_logits(folder: Path, prompt_ids: list[int], base: PreTrainedModel | None = None) -> torch.Tensor:
    """[T, V] logits of PEFT itself with the adapter in `folder` on `base` (which it changes; default: a fresh F0)."""
    with peft_warnings_ignored(), torch.no_grad():
        model = PeftModel.from_pretrained(base if base is not None else tiny_llama(), folder).eval()
        return model(torch.tensor([prompt_ids])).logits[0]


def adapter_ref(folder: Path, name: str | None = None) -> AdapterRef:
    """The ref of the files as they are now."""
    return AdapterRef(
        name=name or folder.name,
        path=str(folder),
        config_signature=signature_of(os.stat(folder / CONFIG_NAME)),
        weights_signature=signature_of(os.stat(folder / WEIGHTS_NAME)),
    )


def packed_ref(file: Path) -> AdapterRef:
    """The ref of a packed file as it is now."""
    state = signature_of(os.stat(file))
    return AdapterRef(name=file.stem, path=str(file), config_signature=state, weights_signature=state, packed=True)


def read_tensors(folder: Path) -> Tensors:
    return load_file(folder / WEIGHTS_NAME)


def edit_tensors(folder: Path, edit: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> None:
    """Replace an adapter's tensors by what `edit` makes of them."""
    edited = edit(read_tensors(folder))
    save_file({name: tensor.contiguous() for name, tensor in edited.items()}, folder / WEIGHTS_NAME)


def edit_config(folder: Path, *, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Set and remove keys of adapter_config.json."""
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in remove}))
