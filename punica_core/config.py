"""The engine's configuration: frozen, validated once, passed down by value.

What a user chose is `EngineConfig`. What the worker computed from it and from the model (number of blocks,
end-of-sequence ids, dtype) is `EngineLayout`, reported back in `protocol.Ready`. Nobody writes into either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from punica_core.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
SgmvBackend = Literal["auto", "cuda", "reference"]
LoadFormat = Literal["auto", "dummy"]
LogLevel = Literal["debug", "info", "warning", "error"]

BLOCK_SIZE = 16
"""Tokens per KV block (P)."""


def is_model_path(model: str) -> bool:
    """Whether `model` can only mean something on this machine's disk: a hub id is "name" or "owner/name"."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or Path(model).exists()


def check_model_folder(folder: Path) -> None:
    """Raises ConfigError for what is no folder, or none that holds a Hugging Face model."""
    if not folder.is_dir():
        raise ConfigError(f"model is {str(folder)!r}; there is no such folder.", param="model")
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"{folder} is an adapter, not a base model; give the model that it was trained on. A server finds "
                "adapters in the folder that --adapters names.",
                param="model",
            )
        raise ConfigError(f"{folder} has no config.json, so it is not a Hugging Face model folder.", param="model")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one worker serves and within which limits.

    model: directory of a Hugging Face model (a hub id is resolved to a directory by the worker).
    adapters: directory whose sub-folders are PEFT adapters, or "" for none; relative paths were made absolute.
    dtype: dtype of weights and activations; "auto" is float32 on the CPU and the checkpoint's on a GPU.
    load_format: "auto" reads the weights from the model's files, "dummy" makes random ones and needs no weight files.
    gpu_memory_fraction: share of the GPU's memory that the worker may use, all of it together.
    kv_tokens: tokens of KV memory; 0 sizes it from free memory.
    max_model_len: longest sequence (prompt + output) in tokens; 0 takes the model's own limit.
    max_num_seqs: most sequences in one step.
    max_num_batched_tokens: token budget of one step; a longer prompt is prefilled in chunks.
    target_step_ms: milliseconds that a step should take at most while others stream: on a GPU prompts are cut to fit
    them; on a CPU any value above 0 has long prompts cut in pieces of a fixed size; 0 turns either off.
    lora: serve adapters; False refuses them and spends no memory or graphs on them.
    max_lora_rank: admission limit; on a GPU the scratch memory of a step is sized by it, else nothing is.
    adapter_host_bytes / adapter_gpu_bytes: byte budgets of the two adapter tiers; 0 sizes them from free memory.
    adapter_load_timeout: seconds after which a read that makes no progress fails its requests.
    prefix_cache: reuse KV blocks of equal prefixes of the same adapter and tenant.
    sgmv: how LoRA is computed: "auto" takes CUDA kernels on a GPU, "reference" plain torch.
    compile / cuda_graphs: on a GPU, compile the model's layers at start, and capture decode steps.
    seed: seeds the noise of requests that bring no seed of their own; -1 takes a new one at each start.
    log_level: least severe log lines that the worker prints.
    """

    model: str
    adapters: str = ""
    device: Device = "auto"
    dtype: DType = "auto"
    load_format: LoadFormat = "auto"
    gpu_memory_fraction: float = 0.9
    kv_tokens: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    target_step_ms: float = 30.0
    lora: bool = True
    max_lora_rank: int = 256
    adapter_host_bytes: int = 0
    adapter_gpu_bytes: int = 0
    adapter_load_timeout: float = 60.0
    prefix_cache: bool = True
    sgmv: SgmvBackend = "auto"
    compile: bool = True
    cuda_graphs: bool = True
    seed: int = -1
    log_level: LogLevel = "info"

    def validate(self) -> None:
        """Raise `ConfigError` for the first value that cannot work."""
        at_least = {
            "kv_tokens": 0,
            "max_model_len": 0,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "target_step_ms": 0,
            "max_lora_rank": 1,
            "adapter_host_bytes": 0,
            "adapter_gpu_bytes": 0,
            "seed": -1,
        }
        for key, low in at_least.items():
            value = getattr(self, key)
            if value < low:
                raise ConfigError(f"{key} is {value}; it must be at least {low}.", param=key)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "a step could not give every running sequence one token. Raise the former or lower the latter.",
                param="max_num_batched_tokens",
            )
        if self.adapters and not self.lora:
            raise ConfigError(f"adapters is {self.adapters!r}, but lora is false: set one of them.", param="lora")
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ConfigError(
                f"gpu_memory_fraction is {self.gpu_memory_fraction}; it must be above 0 and at most 1.",
                param="gpu_memory_fraction",
            )
        if self.adapter_load_timeout <= 0:
            raise ConfigError(f"adapter_load_timeout is {self.adapter_load_timeout}; it must be positive (seconds).")


class EngineLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker computed at start.

    model_dir: directory the base model was loaded from (tokenizer files lie there).
    vocab_size: rows of the output head (V); a token id must be below it.
    eos_token_ids: ids that end a sequence unless `ignore_eos`.
    num_blocks / block_size: KV blocks and tokens per block.
    """

    model_dir: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_blocks: int
    block_size: int = BLOCK_SIZE
    base_bytes: int = 0
    adapter_host_bytes: int = 0
    adapter_gpu_bytes: int = 0
    torch_version: str = ""
    transformers_version: str = ""
