"""Makes a plain Hugging Face folder of a GGUF file, once, so that everyone reads the same safetensors.

Weights are stored as bfloat16. The quantized values are not all representable in it, but the rounding is some thirty
times finer than the quantization steps themselves, the file is half as large and loads twice as fast, and a CPU
(float32) and a GPU (bfloat16) then compute with identical weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from punica_core.errors import ConfigError

DIGITS = {"type": "Digits", "individual_digits": True}
"""How the "smollm" family splits numbers before byte-level BPE; the GGUF names the family, transformers drops it."""


def convert(gguf: Path, folder: Path) -> None:
    """Write `config.json`, `generation_config.json`, `model.safetensors` (bfloat16), `tokenizer.json` and
    `tokenizer_config.json` (with the chat template) into the existing directory `folder`.

    Raises `ConfigError` when the packages that read GGUF are not installed.
    """
    try:
        import accelerate  # noqa: F401
        import gguf as _reader  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"converting the demo model needs the package {error.name}: pip install 'punica[demo]'"
        ) from error
    logging.disable_progress_bar()
    max_length = _convert_weights(gguf, folder)
    _convert_tokenizer(gguf, folder, max_length)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner may read


def _convert_weights(gguf: Path, folder: Path) -> int:
    """Write weights and configs; returns the context length."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = loaded.config
    # The mark of a quantized checkpoint would make save_pretrained refuse; the weights are plain by now.
    del config.quantization_config
    config.name_or_path = ""
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # GGUF stores float32: 9.99999974e-06
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    plain.save_pretrained(folder)
    return int(config.max_position_embeddings)


def _convert_tokenizer(gguf: Path, folder: Path, max_length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    _edit(folder / "tokenizer.json", _split_digits)

    def finish(config: dict[str, Any]) -> None:
        config.pop("is_local", None)
        config.pop("local_files_only", None)
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config["model_max_length"] = max_length
        config["clean_up_tokenization_spaces"] = False
        config["chat_template"] = tokenizer.chat_template

    _edit(folder / "tokenizer_config.json", finish)
    (folder / "chat_template.jinja").unlink(missing_ok=True)  # one place for the template is enough


def _split_digits(tokenizer: dict[str, Any]) -> None:
    byte_level = tokenizer["pre_tokenizer"]
    if byte_level["type"] == "ByteLevel":
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [DIGITS, byte_level]}


def _edit(path: Path, change: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
