"""What an adapter is: the account of every tensor in a PEFT folder, as one frozen value.

    manifest = read_manifest(config_file, weights_file)     # headers only, no tensor data
    check_against(manifest, shapes, max_lora_rank=256)      # does it fit this base model?

The tensors decide what is adapted. Each is either half of a (lora_A, lora_B) pair or the adapter is refused by name.
This module knows no torch: the front end and tools may use it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from punica_core.adapters.files import CONFIG_NAME, SourceFile
from punica_core.adapters.header import TensorEntry, read_header, shorten
from punica_core.adapters.peft_config import MAX_CONFIG_BYTES, LoraSettings, parse_config
from punica_core.errors import AdapterInvalid, AdapterMismatch, AdapterTooLarge, AdapterUnsupported

ModelShapes = Mapping[str, tuple[int, int]]
"""Module path in the base model (`model.layers.0.self_attn.q_proj`) → (in_features, out_features)."""

MAX_PATH_LENGTH = 160
MAX_LOOKUPS = 4_000_000
"""Modules times patterns: a few seconds of a reader thread that holds the GIL."""
SAMPLES = 3

_PEFT_PREFIX = "base_model.model."
_ADAPTER_SEGMENT = "default"
_HEAD = "lm_head"


class TensorRole(enum.StrEnum):
    """What a tensor is to its module, told from its name alone."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    LORA_BIAS = "bias of lora_B"
    EMBEDDING = "LoRA on an embedding"
    DORA_MAGNITUDE = "DoRA magnitude"
    TOKEN_DELTA = "trainable_tokens_delta"
    BASE_WEIGHT = "weight of the base model"
    BIAS = "trained bias"
    FULL_WEIGHT = "fully trained weight (modules_to_save)"
    UNKNOWN = "unknown tensor"


@dataclass(frozen=True, slots=True)
class LoraModule:
    """y += scale · (x · Aᵀ) · Bᵀ for the module at `path`. a: [R, I], b: [O, R] in the file."""

    path: str
    scale: float
    a: TensorEntry
    b: TensorEntry

    @property
    def lora_rank(self) -> int:
        return self.a.shape[0]

    @property
    def in_features(self) -> int:
        return self.a.shape[1]

    @property
    def out_features(self) -> int:
        return self.b.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """An adapter without its numbers. modules: by path, sorted by path; never empty."""

    lora_alpha: float
    use_rslora: bool
    modules: Mapping[str, LoraModule]

    @property
    def max_lora_rank(self) -> int:
        return max(module.lora_rank for module in self.modules.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(module.a.nbytes + module.b.nbytes for module in self.modules.values())


def read_manifest(config_file: SourceFile, weights_file: SourceFile) -> AdapterManifest:
    """Parse an open adapter. Raises an AdapterError that names the fault (see `build_manifest`)."""
    if config_file.size > MAX_CONFIG_BYTES:
        raise AdapterTooLarge(f"{CONFIG_NAME} has {config_file.size} bytes; at most {MAX_CONFIG_BYTES} are read.")
    settings = parse_config(config_file.read(0, config_file.size))
    return build_manifest(settings, read_header(weights_file))


def build_manifest(settings: LoraSettings, tensors: Mapping[str, TensorEntry]) -> AdapterManifest:
    """Pair up the tensors and give each pair its scale.

    Raises AdapterUnsupported for tensors that are not plain LoRA, AdapterInvalid for orphan halves, duplicate names,
    shapes that do not multiply, and ranks other than the config's (PEFT refuses those too).
    """
    named = {name: classify(name) for name in tensors}
    _check_served({name: role for name, (_, role) in named.items()})
    halves: dict[str, dict[TensorRole, TensorEntry]] = {}
    for name, (path, role) in named.items():
        entry = tensors[name]
        if len(path) > MAX_PATH_LENGTH:
            raise AdapterInvalid(f"{shorten(name)!r} names a module by more than {MAX_PATH_LENGTH} characters.")
        pair = halves.setdefault(path, {})
        if role in pair:
            raise AdapterInvalid(f"{shorten(pair[role].name)!r} and {shorten(name)!r} are both the {role} of {path!r}.")
        pair[role] = entry
    _check_orphans(halves)
    lookups = len(halves) * settings.num_patterns
    if lookups > MAX_LOOKUPS:
        raise AdapterTooLarge(
            f"{len(halves)} modules and {settings.num_patterns} entries of rank_pattern and alpha_pattern are "
            f"{lookups} comparisons; at most {MAX_LOOKUPS} are made."
        )
    modules = {path: _module(settings, path, halves[path]) for path in sorted(halves)}
    return AdapterManifest(settings.lora_alpha, settings.use_rslora, MappingProxyType(modules))


def classify(name: str) -> tuple[str, TensorRole]:
    """(module path in the base model, role) of a tensor's name.

    Accepted spellings: with and without PEFT's `base_model.model.` prefix, with and without a `.default` segment.
    """
    parts = name.removeprefix(_PEFT_PREFIX).split(".")
    for place in (-2, -1):
        if len(parts) > 1 and parts[place] == _ADAPTER_SEGMENT:
            del parts[place]
    last, owner = parts[-1], parts[-2] if len(parts) > 1 else ""
    if owner in (TensorRole.LORA_A, TensorRole.LORA_B) and last == "weight" and len(parts) > 2:
        return ".".join(parts[:-2]), TensorRole(owner)
    if owner == TensorRole.LORA_B and last == "bias":
        return ".".join(parts[:-2]), TensorRole.LORA_BIAS
    for marker, role in _MARKERS.items():
        if marker in parts:
            return ".".join(parts[: parts.index(marker)]), role
    whole = {"weight": TensorRole.FULL_WEIGHT, "bias": TensorRole.BIAS}
    return ".".join(parts[:-1]), whole.get(last, TensorRole.UNKNOWN)


_MARKERS: Mapping[str, TensorRole] = MappingProxyType(
    {
        "lora_embedding_A": TensorRole.EMBEDDING,
        "lora_embedding_B": TensorRole.EMBEDDING,
        "lora_magnitude_vector": TensorRole.DORA_MAGNITUDE,
        "trainable_tokens_delta": TensorRole.TOKEN_DELTA,
        "base_layer": TensorRole.BASE_WEIGHT,
        "modules_to_save": TensorRole.FULL_WEIGHT,
    }
)


def check_against(manifest: AdapterManifest, shapes: ModelShapes, max_lora_rank: int) -> None:
    """Raise unless every module of the adapter is one of the base's, of its shape, within the rank limit.

    AdapterTooLarge names the module and both ranks; AdapterMismatch gives samples of the names, or both shapes;
    AdapterUnsupported: the base has such a module, but no LoRA on it is served.
    """
    for module in manifest.modules.values():
        if module.lora_rank > max_lora_rank:
            raise AdapterTooLarge(
                f"rank {module.lora_rank} > max {max_lora_rank} (module {module.path!r}); "
                "serve with a larger --max-lora-rank or train with a smaller r."
            )
    unmatched = [path for path in manifest.modules if path not in shapes]
    if _HEAD in unmatched:
        raise AdapterUnsupported(f"it adapts {_HEAD}, which is not served; train without it in target_modules.")
    if unmatched:
        raise AdapterMismatch(
            f"{len(unmatched)} of {len(manifest.modules)} adapted modules are not in the base model: found "
            f"{samples(unmatched)}; expected names like {samples(_likely(unmatched, shapes))}. "
            "Was it trained on another base model, or saved with other names?"
        )
    for module in manifest.modules.values():
        expected = shapes[module.path]
        if (module.in_features, module.out_features) != expected:
            raise AdapterMismatch(
                f"{module.path!r} adapts {module.in_features} → {module.out_features} features (lora_A "
                f"{list(module.a.shape)}, lora_B {list(module.b.shape)}), the base model has {expected[0]} → "
                f"{expected[1]}. Was it trained on another base model?"
            )


def _check_served(roles: Mapping[str, TensorRole]) -> None:
    """Name the most telling of the tensors that are not plain LoRA: the first in TensorRole's order."""
    order = list(TensorRole)
    found = {name: role for name, role in roles.items() if role not in (TensorRole.LORA_A, TensorRole.LORA_B)}
    if not found:
        return
    name = min(found, key=lambda name: order.index(found[name]))
    hint = " of a sequence classifier" if name.endswith("score.weight") else ""
    raise AdapterUnsupported(
        f"the tensor {shorten(name)!r} is not served ({found[name]}{hint}): "
        "only lora_A and lora_B of linear layers are."
    )


def _check_orphans(halves: Mapping[str, Mapping[TensorRole, TensorEntry]]) -> None:
    orphans = [entry.name for pair in halves.values() if len(pair) == 1 for entry in pair.values()]
    if orphans:
        raise AdapterInvalid(
            f"{len(orphans)} tensors lack their other half (lora_A without lora_B or the reverse): {samples(orphans)}."
        )


def _module(settings: LoraSettings, path: str, pair: Mapping[TensorRole, TensorEntry]) -> LoraModule:
    a, b = pair[TensorRole.LORA_A], pair[TensorRole.LORA_B]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise AdapterInvalid(
            f"{path!r}: lora_A is {list(a.shape)} and lora_B {list(b.shape)}; they must be [r, in] and [out, r]."
        )
    rank = settings.rank_of(path)
    if a.shape[0] != rank:
        raise AdapterInvalid(
            f"{path!r} has rank {a.shape[0]} in its tensors and {rank} in {CONFIG_NAME} (r and rank_pattern)."
        )
    return LoraModule(path, settings.scale_of(path), a, b)


def _likely(unmatched: list[str], shapes: ModelShapes) -> Collection[str]:
    """The base's modules that are called like the first unmatched one; all if none are."""
    leaf = unmatched[0].rsplit(".", 1)[-1]
    return [path for path in shapes if path.rsplit(".", 1)[-1] == leaf] or list(shapes)


def samples(names: Iterable[str]) -> str:
    """The first of some names that came from files, quoted, and how many more there are."""
    listed = [repr(shorten(name)) for name in names]
    more = f" and {len(listed) - SAMPLES} more" if len(listed) > SAMPLES else ""
    return ", ".join(listed[:SAMPLES]) + more
