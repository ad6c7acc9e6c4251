"""An adapter's tensors under the names that PEFT gives them today, for the base if it is known.

With a base, fused names are split where the base has the parts, and names get the base's outermost prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from punica_core.adapters.fit import AdapterFit, RowShare, fit_adapter
from punica_core.adapters.format import AdapterManifest, LoraModule, build_manifest
from punica_core.adapters.header import TensorEntry
from punica_core.adapters.names import TensorRole
from punica_core.adapters.peft_config import LoraSettings
from punica_core.adapters.shapes import ModelShapes
from punica_core.lora.tensor_reader import DTYPES

NO_LIMIT = 2**31
PREFIX = "base_model.model."

_ENDS: Mapping[TensorRole, str] = {
    TensorRole.LORA_A: "lora_A.weight",
    TensorRole.LORA_B: "lora_B.weight",
    TensorRole.LORA_BIAS: "lora_B.bias",
    TensorRole.EMBEDDING_A: "lora_embedding_A",
    TensorRole.EMBEDDING_B: "lora_embedding_B",
    TensorRole.DORA_MAGNITUDE: "lora_magnitude_vector",
    TensorRole.TOKEN_DELTA: "token_adapter.trainable_tokens_delta",
    TensorRole.FULL_WEIGHT: "weight",
    TensorRole.BASE_WEIGHT: "base_layer.weight",
}

_BY_ROWS = (TensorRole.LORA_B, TensorRole.LORA_BIAS, TensorRole.DORA_MAGNITUDE, TensorRole.BIAS)
"""Roles whose rows are the module's outputs: they are cut where a module is split, the others go to each part."""


@dataclass(frozen=True, slots=True)
class Canonical:
    """tensors: by canonical name. renamed: (before, after). split: fused module → its parts. config: changed keys."""

    tensors: dict[str, Tensor]
    renamed: list[tuple[str, str]] = field(default_factory=list)
    split: dict[str, list[str]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def canonical(settings: LoraSettings, tensors: Mapping[str, Tensor], shapes: ModelShapes | None) -> Canonical:
    """Rename and split. Raises what `build_manifest` and `fit_adapter` raise."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries = {
        name: TensorEntry(name, names[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)
        for name, tensor in tensors.items()
    }
    manifest = build_manifest(settings, entries)
    fit = None if shapes is None else fit_adapter(manifest, shapes, NO_LIMIT)
    result = Canonical({})
    moved: dict[str, list[str]] = {}
    for path, role, entry in manifest.account():
        places = _places(manifest, fit, path, role)
        if len(places) > 1:
            result.split[path] = [target for target, _ in places]
        if [target for target, _ in places] != [path] and role in (TensorRole.LORA_A, TensorRole.EMBEDDING_A):
            moved[path] = [target for target, _ in places]
        for target, rows in places:
            name = _name(manifest, path, target, role)
            tensor = tensors[entry.name]
            cut = rows is not None and role in _BY_ROWS
            result.tensors[name] = tensor[rows.source : rows.source + rows.count] if rows and cut else tensor
        if len(places) == 1 and name != entry.name:
            result.renamed.append((entry.name, name))
    if moved:
        result.config.update(_config(settings, manifest, moved))
    return result


def _places(
    manifest: AdapterManifest, fit: AdapterFit | None, path: str, role: TensorRole
) -> list[tuple[str, RowShare | None]]:
    """Module names that a tensor belongs under, with its rows for each if it is split."""
    if fit is None:
        return [(path, None)]
    module = manifest.modules.get(path)
    found: list[tuple[str, RowShare | None]] = []
    if module is not None and role is not TensorRole.BIAS:
        found = [(target, s.rows) for target, shares in fit.linears.items() for s in shares if s.module is module]
    elif role is TensorRole.BIAS:
        entry = manifest.biases[path]
        found = [(target, s.rows) for target, shares in fit.biases.items() for s in shares if s.entry is entry]
    whole = all(rows is None or rows.count == fit.shapes[target][1] for target, rows in found)
    if found and whole:
        return [(target, rows if len(found) > 1 else None) for target, rows in found]
    return [(_spelled(fit.shapes, path), None)]


def _spelled(shapes: ModelShapes, path: str) -> str:
    """The path with the base's outermost name before it, if the base has it only so."""
    known = {*shapes, *([shapes.embedding] if shapes.embedding else [])}
    return next((name for name in known if name != path and name.partition(".")[2] == path), path)


def _name(manifest: AdapterManifest, path: str, target: str, role: TensorRole) -> str:
    if role is TensorRole.BIAS:
        has_lora = path in manifest.modules
        return f"{PREFIX}{target}.base_layer.bias" if has_lora else f"{PREFIX}{target}.bias"
    return f"{PREFIX}{target}.{_ENDS[role]}"


def _config(settings: LoraSettings, manifest: AdapterManifest, moved: Mapping[str, list[str]]) -> dict[str, Any]:
    """target_modules and patterns for the new names: every module by its full path, with its own rank and scale."""
    modules = list(_renamed(manifest, moved))
    ranks = {target: m.lora_rank for target, m in modules if m.lora_rank != settings.lora_rank}
    alphas = {target: settings.alpha_of(m.path) for target, m in modules}
    return {
        "target_modules": sorted(target for target, _ in modules),
        "rank_pattern": ranks,
        "alpha_pattern": {target: alpha for target, alpha in alphas.items() if alpha != settings.lora_alpha},
    }


def _renamed(manifest: AdapterManifest, moved: Mapping[str, list[str]]) -> Iterator[tuple[str, LoraModule]]:
    for module in (*manifest.modules.values(), *manifest.embeddings.values()):
        for target in moved.get(module.path, [module.path]):
            yield target, module
