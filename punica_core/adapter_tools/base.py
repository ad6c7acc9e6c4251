"""The base model as tools need it: its shapes without its weights, and single matrices out of its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from punica_core.adapters.shapes import ModelShapes
from punica_core.config import check_model_folder
from punica_core.errors import AdapterUnsupported, ConfigError
from punica_core.lora.tensor_reader import DTYPES
from punica_core.model.checkpoint import StoredTensor, read_headers, read_tensors
from punica_core.model.shapes import model_shapes
from punica_core.model.support import check_supported


@dataclass(frozen=True, slots=True, eq=False)
class BaseFolder:
    """shapes: what adapters must fit. dtype: of the checkpoint, bfloat16 if its config does not say."""

    folder: str
    shapes: ModelShapes
    dtype: torch.dtype
    weights: CheckpointWeights


class CheckpointWeights:
    """Implements `BaseWeights` out of a model folder's files, one matrix at a time, as they are stored.

    Only what tools ask: no biases, no scale of embeddings. stored: None if the folder has no weights.
    """

    def __init__(self, stored: dict[str, StoredTensor] | None, shapes: ModelShapes) -> None:
        self._stored = stored
        self._shapes = shapes

    @property
    def is_there(self) -> bool:
        return self._stored is not None

    def weight(self, path: str) -> Tensor:
        stored = self._stored or {}
        shared = self._shapes.embedding if self._shapes.tied and path == self._shapes.head else None
        name = next((f"{p}.weight" for p in (path, shared) if f"{p}.weight" in stored), None)
        if name is None or stored[name].dtype not in DTYPES.values():
            raise AdapterUnsupported(
                f"it has a copy of the base model's {path!r}, which the model's folder does not have under that name "
                "in a float type: there is nothing to compare it with."
            )
        tensor = torch.empty(stored[name].shape, dtype=stored[name].dtype)
        read_tensors({name: tensor}, {name: stored[name]}, lambda share: None)
        return tensor

    def bias(self, path: str) -> Tensor | None:
        raise AssertionError("tools compute nothing that needs the base's biases")

    @property
    def embedding_scale(self) -> float:
        raise AssertionError("tools compute nothing that needs the base's embeddings")


def read_base(folder: str) -> BaseFolder:
    """Build the model without memory. Raises ConfigError for a folder that is no model, or none that is served."""
    path = Path(folder)
    check_model_folder(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_supported(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{path / 'config.json'} cannot be used: {error}", param="model") from error
    shapes = model_shapes(model)
    dtype = getattr(config, "dtype", None)
    stored = read_headers(path) if any(path.glob("*.safetensors")) else None
    dtype = dtype if dtype in DTYPES.values() else torch.bfloat16
    return BaseFolder(folder, shapes, dtype, CheckpointWeights(stored, shapes))
