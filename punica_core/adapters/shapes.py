"""What adapters must fit: the shape of a base model, without its numbers and without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

FUSED_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
)
"""Names of fused linears → the split ones that their output consists of, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelShapes(Mapping[str, tuple[int, int]]):
    """Module path in the base model (`model.layers.0.self_attn.q_proj`) → (in_features, out_features) of its linears.

    The rest may be left out where no adapter needs it. head: path of the output head, one of the linears. embedding,
    embedding_shape: path and (V, H) of the input embedding. tied: the two share their weight. biased: linears that have
    a bias. parts: for linears that are fused in the base itself, the widths of what FUSED_PARTS calls them.
    """

    linears: Mapping[str, tuple[int, int]]
    head: str | None = None
    embedding: str | None = None
    embedding_shape: tuple[int, int] = (0, 0)
    tied: bool = False
    biased: frozenset[str] = frozenset()
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, int]]) -> ModelShapes:
        """A plain mapping of linears stands for a base of which nothing else is known."""
        return shapes if isinstance(shapes, ModelShapes) else cls(shapes)

    def __getitem__(self, path: str) -> tuple[int, int]:
        return self.linears[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.linears)

    def __len__(self) -> int:
        return len(self.linears)

    def siblings(self, path: str) -> tuple[str, ...]:
        """The base's linears that the fused name at `path` stands for, in order; empty unless all are there."""
        parent, _, leaf = path.rpartition(".")
        paths = tuple(f"{parent}.{name}" for name in FUSED_PARTS.get(leaf, ()))
        return paths if paths and all(sibling in self.linears for sibling in paths) else ()

    def share(self, path: str) -> tuple[str, int, int] | None:
        """(the base's fused linear, first row, rows) of which the split name at `path` is a part; None if of none."""
        parent, _, leaf = path.rpartition(".")
        for fused, names in FUSED_PARTS.items():
            widths = self.parts.get(f"{parent}.{fused}")
            if leaf in names and widths is not None:
                index = names.index(leaf)
                return f"{parent}.{fused}", sum(widths[:index]), widths[index]
        return None
