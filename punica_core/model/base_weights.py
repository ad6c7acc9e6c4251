"""The base's numbers, for loading adapters, out of a model whose linears are LoRA-aware by now."""

from __future__ import annotations

from torch import Tensor, nn

from punica_core.lora.layers import LoRAEmbedding


class ModelBaseWeights:
    """Implements `BaseWeights` for a prepared model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def weight(self, path: str) -> Tensor:
        weight: Tensor = self._model.get_submodule(path).weight
        return weight.detach()

    def bias(self, path: str) -> Tensor | None:
        bias: Tensor | None = self._model.get_submodule(path).bias
        return None if bias is None else bias.detach()

    @property
    def embedding_scale(self) -> float:
        embedding = self._model.get_input_embeddings()
        return embedding.scale if isinstance(embedding, LoRAEmbedding) else 1.0
