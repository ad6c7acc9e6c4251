"""Puts LoRA-aware linears into a loaded model, fusing those that share an input. One copy of the weights remains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from punica_core.lora.layers import (
    EmbeddingContext,
    FusedProjection,
    LinearGroup,
    LinearSlice,
    LoRAContext,
    LoRAEmbedding,
    LoRALinear,
)

SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling linears that the modelling code feeds with one tensor."""


def install_lora(model: nn.Module, layers_path: str, context: LoRAContext) -> tuple[LinearGroup, ...]:
    """Replace every `nn.Linear` below `layers_path` (the decoder layers) by a LoRA-aware one; returns the groups.

    Weights move into the new modules one group at a time, so the model never exists twice.
    """
    groups: list[LinearGroup] = []
    layers = model.get_submodule(layers_path)
    for path, parent in list(layers.named_modules(prefix=layers_path)):
        for names in _groups_of(parent):
            linears = [parent.get_submodule(name) for name in names]
            group = _group(len(groups), path, names, linears)
            _replace(parent, names, LoRALinear(group, linears, context))
            groups.append(group)
    return tuple(groups)


def install_head(model: nn.Module, index: int, context: LoRAContext) -> LinearGroup | None:
    """Put a LoRA-aware linear in the place of the output head, tied or not; returns its group, of the given index.

    None, and nothing done, if the head is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return None
    group = LinearGroup(index, (path_of(model, head),), head.in_features, (head.out_features,))
    model.set_output_embeddings(LoRALinear(group, [head], context))
    return group


def install_embedding(model: nn.Module, context: EmbeddingContext) -> LoRAEmbedding | None:
    """Put a LoRA-aware module around the input embedding; None, and nothing done, if it is not an `nn.Embedding`."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        return None
    layer = LoRAEmbedding(embedding, context)
    model.set_input_embeddings(layer)
    return layer


def path_of(model: nn.Module, module: nn.Module) -> str:
    """The module's name in the model."""
    paths: dict[int, str] = {id(found): path for path, found in model.named_modules()}
    return paths[id(module)]


def _groups_of(parent: nn.Module) -> Iterator[tuple[str, ...]]:
    """The names of `parent`'s own linears, those that can be fused together."""
    linears = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
    for names in SHARED_INPUTS:
        if all(name in linears for name in names) and _can_fuse([linears[name] for name in names]):
            yield names
            for name in names:
                del linears[name]
    yield from ((name,) for name in linears)


def _can_fuse(linears: Sequence[nn.Linear]) -> bool:
    return len({(linear.in_features, linear.bias is None) for linear in linears}) == 1


def _group(index: int, path: str, names: Sequence[str], linears: Sequence[nn.Module]) -> LinearGroup:
    return LinearGroup(
        index=index,
        paths=tuple(f"{path}.{name}" for name in names),
        in_features=int(linears[0].in_features),
        out_features=tuple(int(linear.out_features) for linear in linears),
    )


def _replace(parent: nn.Module, names: Sequence[str], linear: LoRALinear) -> None:
    if len(names) == 1:
        setattr(parent, names[0], linear)
        return
    fused = FusedProjection(linear)
    for index, name in enumerate(names):
        setattr(parent, name, LinearSlice(fused, index, linear if index == 0 else None))
