"""Models that benchmarks know by name: shapes without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoConfig, AutoModelForCausalLM

from punica_core.errors import ConfigError

LinearShapes = Mapping[str, tuple[int, int]]
"""Module path → (in_features, out_features) of linears."""

_LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)

SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-3.1-8b": {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        "llama-2-7b": {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
        },
        "tiny": {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
        },
    }
)


def model_folder(model: str, room: Path) -> Path:
    """The folder of a model: written into `room` if `model` is a name of `SHAPES`, else the folder it is.

    Raises:
        ConfigError: neither a known name nor a folder.
    """
    if model in SHAPES:
        folder = room / model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(_LLAMA) | dict(SHAPES[model]), indent=2) + "\n")
        return folder
    if not Path(model).is_dir():
        raise ConfigError(f"model is {model!r}; it must be a folder or one of {', '.join(SHAPES)}.", param="model")
    return Path(model)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer that encodes any text and decodes every id below `vocab_size` (at least 259): bytes, two special
    tokens, and words that stand for the rest."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    specials = ("<|begin|>", "<|end|>")
    for index in range(len(vocab), vocab_size - len(specials)):
        vocab[f"Ġw{index}"] = index
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def linear_shapes(folder: Path) -> LinearShapes:
    """(in, out) of the linears in the decoder layers of the model in a folder, by path; no weights are made."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {
        path: (module.in_features, module.out_features)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and is_in_a_layer(path)
    }


def is_in_a_layer(path: str) -> bool:
    """Whether a module lies inside a decoder layer (the output head does not)."""
    return ".layers." in path
