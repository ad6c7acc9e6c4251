"""Makes a plain Hugging Face folder of a Llama-shaped GGUF file, so that everyone reads the same safetensors.

transformers can load GGUF too, but reads the file several times (ten times slower), may keep the weights packed,
and loses how numbers are split before BPE.

Weights are stored as bfloat16. The quantized values are not all representable in it, but the rounding is some thirty
times finer than the quantization steps themselves, the file is half as large as float32 and loads twice as fast, and
a CPU (float32) and a GPU (bfloat16) then compute with identical weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig

from punica_core.errors import ConfigError
from punica_core.extras import how_to_install

MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a layer's tensor -> transformers' name of its module."""

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

CONTROL_TOKEN = 3
"""Token type of special tokens in GGUF."""

Metadata = dict[str, Any]


def convert(gguf: Path, folder: Path) -> None:
    """Write `config.json`, `generation_config.json`, `model.safetensors` (bfloat16), `tokenizer.json` and
    `tokenizer_config.json` (with the chat template) into the existing directory `folder`.

    Raises `ConfigError` when the `gguf` package is not installed or the file is of another shape than Llama's.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(
            f"converting the demo model needs the package gguf; in Punica's checkout: {how_to_install('demo')}"
        ) from error
    reader = GGUFReader(gguf)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama" or metadata["tokenizer.ggml.model"] != "gpt2":
        raise ConfigError(f"{gguf.name} is not a Llama-shaped model with a byte-level BPE tokenizer")
    config = _config(metadata, tied=not any(tensor.name == "output.weight" for tensor in reader.tensors))
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    tensors = dict(_tensor(tensor, config) for tensor in reader.tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file lets only the owner read
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    document = json.dumps(_tokenizer_config(metadata), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(document + "\n", encoding="utf-8")


def _config(metadata: Metadata, tied: bool) -> LlamaConfig:
    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        head_dim=hidden // heads,
        max_position_embeddings=metadata["llama.context_length"],
        # GGUF stores float32, which turns 1e-05 into 9.99999974e-06.
        rms_norm_eps=float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
    )


def _tensor(tensor: Any, config: LlamaConfig) -> tuple[str, torch.Tensor]:
    """Name and bfloat16 value of one tensor, as transformers wants them."""
    from gguf import dequantize

    value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    if tensor.name in OUTER:
        return OUTER[tensor.name], value.to(torch.bfloat16)
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
    if match is None or match[2] not in MODULES:
        raise ConfigError(f"{tensor.name} is not a tensor of a Llama-shaped model")
    if match[2] == "attn_q":
        value = _rotary_halves(value, config.num_attention_heads)
    elif match[2] == "attn_k":
        value = _rotary_halves(value, config.num_key_value_heads)
    return f"model.layers.{match[1]}.{MODULES[match[2]]}.weight", value.to(torch.bfloat16)


def _rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads·D, I] with each head's rotary pairs as neighbours (GGUF) -> with the pairs D/2 apart (transformers)."""
    out_features, in_features = weight.shape
    pairs = weight.reshape(heads, out_features // heads // 2, 2, in_features)
    return pairs.transpose(1, 2).reshape(out_features, in_features).contiguous()


def _tokenizer(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE; special tokens keep the ids that the vocabulary gives them."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges: list[tuple[str, str]] = [
        (left, right) for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])
    ]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
