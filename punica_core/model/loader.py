"""Loads a base model from a Hugging Face folder or hub id, and makes it ready to serve."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig

from punica_core.adapters.shapes import ModelShapes
from punica_core.config import EngineConfig, LoadFormat, check_model_folder, is_model_path
from punica_core.errors import ConfigError
from punica_core.lora.base_weights import BaseWeights
from punica_core.lora.layers import EmbeddingContext, LinearGroup, LoRAContext
from punica_core.model import attention
from punica_core.model.attention import AttentionSpec
from punica_core.model.base_weights import ModelBaseWeights
from punica_core.model.fusing import install_embedding, install_head, install_lora
from punica_core.model.lean import LeanForward, lean_forward
from punica_core.model.norms import fuse_norms
from punica_core.model.probe import probe_attention, reference_logits
from punica_core.model.shapes import KVShape, decoder_layers_path, model_shapes, parameter_bytes
from punica_core.model.support import check_supported, max_model_len
from punica_core.model.threads import limit_threads
from punica_core.model.weights import load_weights

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is (0 to 1)."""

CPU = torch.device("cpu")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOADING = "loading the model's weights"
"""The step of the start in which the weights are read."""
_LOADED = 0.8
"""Share of the loading that is done when the weights are there."""
_WEIGHT_FILES = "*.safetensors"
_HUB_FILES = ["*.json", _WEIGHT_FILES, "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A base model that serves: paged attention, LoRA-aware linears, inference mode.

    forward(input_ids [1, T], position_ids [1, T], paged=StepAttention, logits_to_keep=[n]) → logits [1, n, V].
    num_heads: H. attention_specs: how each layer attends. groups: its LoRA-aware linears; lora: where the step's
    adapters go.
    head: the output head's group, its index behind theirs, None if no adapter may change it. head_lora, embedding_lora:
    where the step's adapters of head and embedding go. module_shapes: what adapters must fit.
    """

    model: nn.Module
    model_dir: Path
    architecture: str
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    kv_shape: KVShape
    num_heads: int
    attention_specs: tuple[AttentionSpec, ...]
    groups: tuple[LinearGroup, ...]
    lora: LoRAContext
    head: LinearGroup | None
    head_lora: LoRAContext
    embedding_lora: EmbeddingContext
    module_shapes: ModelShapes
    base_bytes: int
    lean: LeanForward | None

    @property
    def base_weights(self) -> BaseWeights:
        """The base's numbers, as loading adapters needs them."""
        return ModelBaseWeights(self.model)


def load_model(
    config: EngineConfig,
    on_progress: Progress = lambda what, fraction: None,
    device: torch.device = CPU,
    on_shapes: Callable[[ModelShapes], None] = lambda shapes: None,
) -> LoadedModel:
    """Load `config.model` onto `device`. on_shapes: told what adapters must fit, before the weights are read.

    Raises `ConfigError` if it isn't there or cannot be served correctly.
    """
    if device.type == "cpu":
        logger.info("torch uses %d threads", limit_threads())
    model_dir = resolve_model_dir(config.model, on_progress, with_weights=config.load_format != "dummy")
    hf_config = _read_config(model_dir, config.load_format)
    check_supported(hf_config)
    limit = max_model_len(hf_config, config.max_model_len)
    dtype = resolve_dtype(config, hf_config, device)
    on_progress(LOADING, 0.0)
    model = load_weights(
        model_dir,
        hf_config,
        dtype,
        device,
        lambda fraction: on_progress(LOADING, _LOADED * fraction),
        config.load_format,
        lambda built: on_shapes(model_shapes(built)),
    )
    on_progress("checking the model", _LOADED)
    return prepare(model, model_dir, limit)


def prepare(model: nn.Module, model_dir: Path, limit: int) -> LoadedModel:
    """Turn a `transformers` causal language model into one that serves, in place. `limit`: its max_model_len."""
    model.eval().requires_grad_(False)
    hf_config: Any = model.config
    expected = reference_logits(model)
    attention.register()
    layers_path = decoder_layers_path(model)
    if layers_path is None:
        raise ConfigError(f"{type(model).__name__} cannot be served: it has no list of layers.", param="model")
    shapes = model_shapes(model)
    lora, head_lora, embedding_lora = LoRAContext(), LoRAContext(), EmbeddingContext()
    groups = install_lora(model, layers_path, lora)
    head = install_head(model, len(groups), head_lora)
    install_embedding(model, embedding_lora)
    fuse_norms(model)
    model.set_attn_implementation(attention.ATTENTION_NAME)
    kv_shape, num_heads, attention_specs = probe_attention(model, hf_config, expected)
    return LoadedModel(
        model=model,
        model_dir=model_dir,
        architecture=type(model).__name__,
        device=expected.device,
        dtype=expected.dtype,
        vocab_size=expected.size(-1),
        eos_token_ids=eos_token_ids(model_dir, hf_config),
        max_model_len=limit,
        kv_shape=kv_shape,
        num_heads=num_heads,
        attention_specs=attention_specs,
        groups=groups,
        lora=lora,
        head=head,
        head_lora=head_lora,
        embedding_lora=embedding_lora,
        module_shapes=shapes,
        base_bytes=parameter_bytes(model),
        lean=lean_forward(model, attention_specs, num_heads, limit) if expected.device == CPU else None,
    )


def resolve_dtype(config: EngineConfig, hf_config: Any, device: torch.device) -> torch.dtype:
    """The dtype asked for; "auto" is float32 on the CPU and the checkpoint's on a GPU."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    stored = getattr(hf_config, "dtype", None)
    return stored if stored in (torch.bfloat16, torch.float16) else torch.bfloat16


def resolve_model_dir(
    model: str, on_progress: Progress = lambda what, fraction: None, *, with_weights: bool = True
) -> Path:
    """The folder that `model` names: a local one, or a hub repository that is downloaded into the hub's cache."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if is_model_path(model):
        raise ConfigError(f"model is {model!r}: there is no such folder.", param="model")
    on_progress(f"downloading {model}", 0.0)
    return _download(model, _HUB_FILES if with_weights else [name for name in _HUB_FILES if name != _WEIGHT_FILES])


def _download(repository: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model is {repository!r}: there is no such folder here, and the Hugging Face hub did not deliver it "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Give the path of a model folder, or check the "
            "name and the connection.",
            param="model",
        ) from error


def _read_config(model_dir: Path, load_format: LoadFormat) -> Any:
    check_model_folder(model_dir)
    if load_format != "dummy" and not any(model_dir.glob("*.safetensors")):
        raise ConfigError(
            f"{model_dir} has no *.safetensors file. Pickled weights (*.bin) are not read, since reading them can run "
            "code; convert them with save_pretrained.",
            param="model",
        )
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"{model_dir / 'config.json'} cannot be used: {error}", param="model") from error


def eos_token_ids(model_dir: Path, hf_config: Any) -> tuple[int, ...]:
    """Ids that end a sequence: generation_config.json's, else the config's, sorted; empty if neither has any."""
    found: Any = None
    if (model_dir / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(model_dir).eos_token_id
    if found is None:
        found = hf_config.eos_token_id
    if found is None:
        return ()
    return tuple(sorted({found} if isinstance(found, int) else set(found)))
