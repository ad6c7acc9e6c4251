"""What loading an adapter may ask of the base model's numbers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class BaseWeights(Protocol):
    """The base model's matrices by module path, as adapters name them; read by the threads that load adapters."""

    def weight(self, path: str) -> Tensor:
        """[O, I] of a linear, [V, H] of the embedding; on the model's device, not to be written."""

    def bias(self, path: str) -> Tensor | None:
        """[O] of a linear, None if it has none."""

    @property
    def embedding_scale(self) -> float:
        """What the model multiplies its embeddings by inside the embedding module, in its dtype; mostly 1."""
