"""What an adapter is: the account of every tensor in a PEFT folder, as one frozen value.

    manifest = read_manifest(config_file, weights_file)     # headers only, no tensor data
    fit = fit_adapter(manifest, shapes, max_lora_rank=256)  # does it fit this base model? (punica_core.adapters.fit)

The tensors decide what is adapted. Each has a part in the manifest or the adapter is refused by name. This module knows
no torch: the front end and tools may use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from punica_core.adapters.files import CONFIG_NAME, SourceFile
from punica_core.adapters.header import TensorEntry, read_header, shorten
from punica_core.adapters.names import TensorName, TensorRole, method_of, parse_name
from punica_core.adapters.peft_config import MAX_CONFIG_BYTES, LoraSettings, parse_config
from punica_core.adapters.shapes import ModelShapes
from punica_core.errors import AdapterInvalid, AdapterTooLarge, AdapterUnsupported

__all__ = ["AdapterManifest", "LoraModule", "ModelShapes", "TokenRows", "build_manifest", "read_manifest", "samples"]

MAX_PATH_LENGTH = 160
MAX_LOOKUPS = 4_000_000
"""Modules times patterns: a few seconds of a reader thread that holds the GIL."""
MAX_MATCHING_STEPS = 4_000_000_000
"""Of all patterns with all modules, at most about 1 ns each."""
SAMPLES = 3

Entries = Mapping[TensorRole, TensorEntry]


@dataclass(frozen=True, slots=True)
class LoraModule:
    """y += scale · (x · Aᵀ) · Bᵀ for the module at `path`. a: [R, I], b: [O, R] in the file.

    An embedding: I is the vocabulary. magnitude: [O], of DoRA. b_bias: [O], added to x·Aᵀ·Bᵀ before the scale.
    """

    path: str
    scale: float
    a: TensorEntry
    b: TensorEntry
    magnitude: TensorEntry | None = None
    b_bias: TensorEntry | None = None

    @property
    def lora_rank(self) -> int:
        return self.a.shape[0]

    @property
    def in_features(self) -> int:
        return self.a.shape[1]

    @property
    def out_features(self) -> int:
        return self.b.shape[0]

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for entry in (self.a, self.b, self.magnitude, self.b_bias) if entry is not None)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of an embedding (or head) that were trained. rows: [n, H], that of token_ids[i] at i."""

    token_ids: tuple[int, ...]
    rows: TensorEntry


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """An adapter without its numbers; every mapping is by module path, sorted. Something is always adapted.

    modules: LoRA on linears. embeddings: LoRA on embeddings. biases: trained ones, in place of the base's. saved: whole
    matrices in place of the base's. token_rows: single rows in place of the base's; mirrored: ends of module names that
    share them. base_weights: copies of the base's own matrices, which change nothing.
    """

    settings: LoraSettings
    modules: Mapping[str, LoraModule]
    embeddings: Mapping[str, LoraModule] = field(default_factory=dict)
    biases: Mapping[str, TensorEntry] = field(default_factory=dict)
    saved: Mapping[str, TensorEntry] = field(default_factory=dict)
    token_rows: Mapping[str, TokenRows] = field(default_factory=dict)
    mirrored: tuple[str, ...] = ()
    base_weights: Mapping[str, TensorEntry] = field(default_factory=dict)

    @property
    def lora_alpha(self) -> float:
        return self.settings.lora_alpha

    @property
    def use_rslora(self) -> bool:
        return self.settings.use_rslora

    @property
    def max_lora_rank(self) -> int:
        """Over all modules; 0 if none has LoRA."""
        return max((m.lora_rank for m in (*self.modules.values(), *self.embeddings.values())), default=0)

    @property
    def file_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.nbytes for _, _, entry in self.account())

    @property
    def extras(self) -> tuple[str, ...]:
        """What it has besides lora_A and lora_B of linear layers, in words; empty for plain LoRA."""
        modules = [*self.modules.values(), *self.embeddings.values()]
        found = {
            "DoRA": any(m.magnitude for m in modules),
            "biases of lora_B (lora_bias)": any(m.b_bias for m in modules),
            "LoRA on an embedding": self.embeddings,
            "trained biases": self.biases,
            "fully trained matrices (modules_to_save)": self.saved,
            "trained token embeddings (trainable_token_indices)": self.token_rows,
        }
        return tuple(name for name, there in found.items() if there)

    def account(self) -> Iterator[tuple[str, TensorRole, TensorEntry]]:
        """(module path, role, tensor) of every tensor in the file, by part of the adapter and path."""
        embedding = (TensorRole.EMBEDDING_A, TensorRole.EMBEDDING_B)
        for module, (a, b) in (
            *((m, (TensorRole.LORA_A, TensorRole.LORA_B)) for m in self.modules.values()),
            *((m, embedding) for m in self.embeddings.values()),
        ):
            yield module.path, a, module.a
            yield module.path, b, module.b
            if module.magnitude is not None:
                yield module.path, TensorRole.DORA_MAGNITUDE, module.magnitude
            if module.b_bias is not None:
                yield module.path, TensorRole.LORA_BIAS, module.b_bias
        for role, entries in (
            (TensorRole.BIAS, self.biases),
            (TensorRole.FULL_WEIGHT, self.saved),
            (TensorRole.TOKEN_DELTA, {path: rows.rows for path, rows in self.token_rows.items()}),
            (TensorRole.BASE_WEIGHT, self.base_weights),
        ):
            yield from ((path, role, entry) for path, entry in entries.items())


def read_manifest(config_file: SourceFile, weights_file: SourceFile) -> AdapterManifest:
    """Parse an open adapter. Raises an AdapterError that names the fault (see `build_manifest`)."""
    if config_file.size > MAX_CONFIG_BYTES:
        raise AdapterTooLarge(f"{CONFIG_NAME} has {config_file.size} bytes; at most {MAX_CONFIG_BYTES} are read.")
    settings = parse_config(config_file.read(0, config_file.size))
    return build_manifest(settings, read_header(weights_file))


def build_manifest(settings: LoraSettings, tensors: Mapping[str, TensorEntry]) -> AdapterManifest:
    """Give each tensor its part, and each LoRA pair its scale.

    Raises AdapterUnsupported for tensors that are not known, AdapterInvalid for orphan halves, duplicate names, shapes
    that do not multiply, ranks other than the config's (PEFT refuses those too), and tensors that the config does not
    announce or that it announces and are not there.
    """
    by_path = _by_path(tensors)
    lookups = len(by_path) * settings.num_patterns
    if lookups > MAX_LOOKUPS:
        raise AdapterTooLarge(
            f"{len(by_path)} modules and {settings.num_patterns} entries of rank_pattern and alpha_pattern are "
            f"{lookups} comparisons; at most {MAX_LOOKUPS} are made."
        )
    steps = settings.matching_steps(by_path)
    if steps > MAX_MATCHING_STEPS:
        raise AdapterTooLarge(
            f"rank_pattern and alpha_pattern could take {steps} steps to match with {len(by_path)} modules; at most "
            f"{MAX_MATCHING_STEPS} are made. Name the modules there, or use fewer of * + ? and |."
        )
    modules = _pairs(settings, by_path, TensorRole.LORA_A, TensorRole.LORA_B)
    embeddings = _pairs(settings, by_path, TensorRole.EMBEDDING_A, TensorRole.EMBEDDING_B)
    _check_parts_of_pairs(settings, by_path, {**modules, **embeddings})
    saved = _with_role(by_path, TensorRole.FULL_WEIGHT)
    biases = _with_role(by_path, TensorRole.BIAS)
    _check_announced(settings, saved, biases)
    token_rows, mirrored = _token_rows(settings, _with_role(by_path, TensorRole.TOKEN_DELTA))
    if not (modules or embeddings or saved or biases or token_rows):
        raise AdapterInvalid("it adapts no module: its tensors are copies of the base model's weights.")
    return AdapterManifest(
        settings,
        MappingProxyType(modules),
        MappingProxyType(embeddings),
        MappingProxyType(biases),
        MappingProxyType(saved),
        MappingProxyType(token_rows),
        mirrored,
        MappingProxyType(_with_role(by_path, TensorRole.BASE_WEIGHT)),
    )


def samples(names: Iterable[str]) -> str:
    """The first of some names that came from files, quoted, and how many more there are."""
    listed = [repr(shorten(name)) for name in names]
    more = f" and {len(listed) - SAMPLES} more" if len(listed) > SAMPLES else ""
    return ", ".join(listed[:SAMPLES]) + more


def _by_path(tensors: Mapping[str, TensorEntry]) -> dict[str, dict[TensorRole, TensorEntry]]:
    """The tensors by module and role, modules sorted. Refuses unknown ones, duplicates, several adapters in a file."""
    named = {name: parse_name(name) for name in tensors}
    _check_known(named)
    adapters = sorted({parsed.adapter for parsed in named.values()} - {""})
    if len(adapters) > 1:
        raise AdapterInvalid(f"it holds tensors of several adapters: {samples(adapters)}; save each to its own folder.")
    by_path: dict[str, dict[TensorRole, TensorEntry]] = {}
    for name, parsed in sorted(named.items(), key=lambda item: item[1].path):
        if len(parsed.path) > MAX_PATH_LENGTH:
            raise AdapterInvalid(f"{shorten(name)!r} names a module by more than {MAX_PATH_LENGTH} characters.")
        roles = by_path.setdefault(parsed.path, {})
        if parsed.role in roles:
            other = shorten(roles[parsed.role].name)
            raise AdapterInvalid(f"{other!r} and {shorten(name)!r} are both the {parsed.role} of {parsed.path!r}.")
        roles[parsed.role] = tensors[name]
    return by_path


def _check_known(named: Mapping[str, TensorName]) -> None:
    unknown = [name for name, parsed in named.items() if parsed.role is TensorRole.UNKNOWN]
    if not unknown:
        return
    method = next((method for name in unknown if (method := method_of(name))), "")
    raise AdapterUnsupported(
        f"{len(unknown)} of {len(named)} tensors are not known: {samples(unknown)}"
        + (f", as {method} has them; only LoRA is served." if method else " (unknown tensor).")
    )


def _pairs(
    settings: LoraSettings, by_path: Mapping[str, Entries], role_a: TensorRole, role_b: TensorRole
) -> dict[str, LoraModule]:
    orphans = [e.name for roles in by_path.values() if (role_a in roles) != (role_b in roles) for e in roles.values()]
    if orphans:
        total = sum(map(len, by_path.values()))
        raise AdapterInvalid(
            f"{len(orphans)} of {total} tensors lack their other half ({role_a} without {role_b} or the reverse): "
            f"{samples(orphans)}."
        )
    return {path: _module(settings, path, roles, role_a, role_b) for path, roles in by_path.items() if role_a in roles}


def _module(settings: LoraSettings, path: str, roles: Entries, role_a: TensorRole, role_b: TensorRole) -> LoraModule:
    a, b = roles[role_a], roles[role_b]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise AdapterInvalid(
            f"{path!r}: {role_a} is {list(a.shape)} and {role_b} {list(b.shape)}; they must be [r, in] and [out, r]."
        )
    rank = settings.rank_of(path)
    if a.shape[0] != rank:
        raise AdapterInvalid(
            f"{path!r} has rank {a.shape[0]} in its tensors and {rank} in {CONFIG_NAME} (r and rank_pattern). "
            "Take both files from one training run, or set r to what it was trained with."
        )
    magnitude, b_bias = roles.get(TensorRole.DORA_MAGNITUDE), roles.get(TensorRole.LORA_BIAS)
    for entry in (magnitude, b_bias):
        if entry is not None and entry.shape != (b.shape[0],):
            raise AdapterInvalid(
                f"{shorten(entry.name)!r} has the shape {list(entry.shape)}; {role_b} {list(b.shape)} asks for "
                f"[{b.shape[0]}]."
            )
    return LoraModule(path, settings.scale_of(path, rank), a, b, magnitude, b_bias)


def _check_parts_of_pairs(
    settings: LoraSettings, by_path: Mapping[str, Entries], modules: Mapping[str, LoraModule]
) -> None:
    """DoRA magnitudes and biases of lora_B are there for every pair if the config has them, else for none."""
    for role, key, announced in (
        (TensorRole.DORA_MAGNITUDE, "use_dora", settings.use_dora),
        (TensorRole.LORA_BIAS, "lora_bias", settings.lora_bias),
    ):
        found = {path: roles[role] for path, roles in by_path.items() if role in roles}
        if found and not announced:
            raise AdapterInvalid(
                f"it has {len(found)} tensors such as {samples([next(iter(found.values())).name])} ({role}), but {key} "
                f"is not true in {CONFIG_NAME}; set it, or remove them."
            )
        stray = [entry.name for path, entry in found.items() if path not in modules]
        if stray:
            raise AdapterInvalid(f"{len(stray)} tensors ({role}) have no lora_A and lora_B: {samples(stray)}.")
        lacking = [path for path in modules if path not in found]
        if announced and lacking:
            raise AdapterInvalid(
                f"{key} is true in {CONFIG_NAME}, but {len(lacking)} of {len(modules)} modules have no {role}: "
                f"{samples(lacking)}."
            )


def _check_announced(
    settings: LoraSettings, saved: Mapping[str, TensorEntry], biases: Mapping[str, TensorEntry]
) -> None:
    for name in settings.modules_to_save:
        if not any(path.endswith(name) for path in (*saved, *biases)):
            raise AdapterInvalid(f"modules_to_save names {shorten(name)!r}, but {_file_has_no('weight', saved)}.")
    unannounced = [entry.name for path, entry in biases.items() if path not in saved]
    if unannounced and settings.bias == "none":
        raise AdapterInvalid(
            f"it has {len(unannounced)} biases ({samples(unannounced)}), but bias is 'none' in {CONFIG_NAME}; they are "
            f"trained biases with bias='all' or 'lora_only'."
        )


def _token_rows(
    settings: LoraSettings, deltas: Mapping[str, TensorEntry]
) -> tuple[dict[str, TokenRows], tuple[str, ...]]:
    """The trained rows with their token ids, and the announced modules that share them: a tied head has none saved."""
    key = "trainable_token_indices"
    found: dict[str, TokenRows] = {}
    absent: list[tuple[str, tuple[int, ...]]] = []
    for name, token_ids in settings.token_indices:
        paths = [path for path in deltas if path.endswith(name) and path not in found]
        if not paths:
            absent.append((name, token_ids))
            continue
        rows = deltas[paths[0]]
        if len(rows.shape) != 2 or rows.shape[0] != len(token_ids):
            raise AdapterInvalid(
                f"{shorten(rows.name)!r} has the shape {list(rows.shape)}; {key} names {len(token_ids)} tokens, so it "
                f"must be [{len(token_ids)}, width]."
            )
        found[paths[0]] = TokenRows(token_ids, rows)
    for name, token_ids in absent:
        if all(rows.token_ids != token_ids for rows in found.values()):
            lacking = _file_has_no("trainable_tokens_delta", deltas)
            raise AdapterInvalid(f"{key} names {shorten(name) or 'tokens'!r}, but {lacking}.")
    stray = [entry.name for path, entry in deltas.items() if path not in found]
    if stray:
        raise AdapterInvalid(f"{key} does not say which tokens these rows are of: {samples(stray)}.")
    return found, tuple(name for name, _ in absent)


def _file_has_no(what: str, others: Mapping[str, TensorEntry]) -> str:
    return f"the file has no {what} of it" + (f", only of {samples(others)}" if others else "")


def _with_role(by_path: Mapping[str, Entries], role: TensorRole) -> dict[str, TensorEntry]:
    return {path: roles[role] for path, roles in by_path.items() if role in roles}
