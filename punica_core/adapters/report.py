"""What an adapter is and whether it is served, told from its headers: the account of every tensor, ranks, bytes.

    report, parts = inspect(path, shapes)   # shapes: of a base model, or None for what the files alone tell

No numbers are read here, and no torch is needed; `punica_core.adapter_tools.numbers` goes on from `parts`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from punica_core.adapters.files import CONFIG_NAME, WEIGHTS_NAME, SourceFile
from punica_core.adapters.fit import AdapterFit, fit_adapter
from punica_core.adapters.format import AdapterManifest, build_manifest
from punica_core.adapters.header import ITEM_BYTES, TensorEntry, read_header
from punica_core.adapters.locate import ref_of
from punica_core.adapters.names import parse_name
from punica_core.adapters.packed_header import PackedHeader, check_base, read_packed_header
from punica_core.adapters.peft_config import MAX_CONFIG_BYTES, parse_config
from punica_core.adapters.shapes import ModelShapes
from punica_core.errors import AdapterError, AdapterTooLarge, ModelNotFound
from punica_core.protocol import AdapterRef

Shapes = Mapping[str, tuple[int, int]]

NO_BASE = "not checked against a base"
"""The verdict on what is not refused as far as its own files tell."""


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One tensor. module: path in the base as the file has it. targets: the base's modules that it goes to, if known.

    A part of a packed file has no name of its own: its module and role.
    """

    name: str
    module: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """code, reason: of the refusal, "" if it is served as far as was looked.

    ranks: lora_rank by module path. checked: "headers" or "numbers". against: the base, "" if only the files were
    looked at. host_bytes, gpu_bytes: as dtype, None if not known or (GPU) not kept there. adapter_key: None unless
    all of its bytes were read. notes: what is found out only when it is loaded.
    """

    name: str
    path: str
    packed: bool = False
    code: str = ""
    reason: str = ""
    tensors: tuple[TensorLine, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    file_bytes: int = 0
    checked: str = "headers"
    against: str = ""
    dtype: str = ""
    host_bytes: int | None = None
    gpu_bytes: int | None = None
    adapter_key: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_served(self) -> bool:
        return not self.code

    @property
    def verdict(self) -> str:
        """ "served" only if it fits a base; NO_BASE, or "refused"."""
        if not self.is_served:
            return "refused"
        return "served" if self.against else NO_BASE

    @property
    def targets(self) -> dict[str, int]:
        """How many modules of each name (`q_proj`) have LoRA."""
        return dict(sorted(Counter(path.rpartition(".")[2] for path in self.ranks).items()))

    def refused(self, error: AdapterError | ModelNotFound) -> AdapterReport:
        return replace(self, code=error.code, reason=error.message)

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        tensors = [{key: getattr(line, key) for key in line.__dataclass_fields__} for line in self.tensors]
        return values | {
            "verdict": self.verdict,
            "tensors": tensors,
            "targets": self.targets,
            "ranks": dict(self.ranks),
        }


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """What was parsed on the way to a report: of a folder manifest (and fit, with a base), of a packed file header."""

    ref: AdapterRef
    manifest: AdapterManifest | None = None
    fit: AdapterFit | None = None
    header: PackedHeader | None = None


def inspect(path: str, shapes: Shapes | None, max_lora_rank: int) -> tuple[AdapterReport, AdapterParts | None]:
    """The report on headers; parts are None if it is refused."""
    report = AdapterReport(os.path.basename(os.path.abspath(path)), path)
    try:
        ref = ref_of(path)
    except AdapterError as error:
        return report.refused(error), None
    return inspect_ref(ref, shapes, max_lora_rank)


def inspect_ref(
    ref: AdapterRef, shapes: Shapes | None, max_lora_rank: int
) -> tuple[AdapterReport, AdapterParts | None]:
    """The same for an adapter that was found."""
    report = AdapterReport(ref.name, ref.path, ref.packed, file_bytes=ref.weights_signature.size)
    parts: AdapterParts | None = None
    steps = (_look_packed if ref.packed else _look_folder)(report, ref, shapes, max_lora_rank)
    try:
        for step in steps:
            report, parts = step
    except AdapterError as error:
        return report.refused(error), None
    return report, parts


Steps = Iterator[tuple[AdapterReport, AdapterParts]]
"""What is known after each step of the reading: an error ends it, and the last report stands."""


def _look_folder(report: AdapterReport, ref: AdapterRef, shapes: Shapes | None, max_lora_rank: int) -> Steps:
    with (
        SourceFile(os.path.join(ref.path, CONFIG_NAME), ref.config_signature) as config,
        SourceFile(os.path.join(ref.path, WEIGHTS_NAME), ref.weights_signature) as weights,
    ):
        entries = read_header(weights)
        report = replace(report, tensors=tuple(_line_by_name(entry) for entry in entries.values()))
        yield report, AdapterParts(ref)
        if config.size > MAX_CONFIG_BYTES:
            raise AdapterTooLarge(f"{CONFIG_NAME} has {config.size} bytes; at most {MAX_CONFIG_BYTES} are read.")
        settings = parse_config(config.read(0, config.size))
    manifest = build_manifest(settings, entries)
    modules = {**manifest.modules, **manifest.embeddings}
    report = replace(
        report,
        tensors=tuple(_account(manifest, None)),
        ranks={path: module.lora_rank for path, module in modules.items()},
        extras=manifest.extras,
    )
    yield report, AdapterParts(ref, manifest)
    if shapes is not None:
        fit = fit_adapter(manifest, shapes, max_lora_rank)
        yield replace(report, tensors=tuple(_account(manifest, fit))), AdapterParts(ref, manifest, fit)


def _look_packed(report: AdapterReport, ref: AdapterRef, shapes: Shapes | None, max_lora_rank: int) -> Steps:
    with SourceFile(ref.path, ref.weights_signature) as file:
        header, _ = read_packed_header(file)
    report = replace(
        report,
        tensors=tuple(_packed_lines(header)),
        ranks={module.path: module.lora_rank for module in header.modules},
    )
    yield report, AdapterParts(ref, header=header)
    check_base(header, header.base if shapes is None else shapes, max_lora_rank)


def _line_by_name(entry: TensorEntry) -> TensorLine:
    name = parse_name(entry.name)
    return TensorLine(entry.name, name.path, str(name.role), entry.dtype, entry.shape, entry.nbytes)


def _account(manifest: AdapterManifest, fit: AdapterFit | None) -> Iterator[TensorLine]:
    places = {} if fit is None else _places(fit)
    for path, role, entry in manifest.account():
        targets = tuple(places.get(entry.name, ()))
        yield TensorLine(entry.name, path, str(role), entry.dtype, entry.shape, entry.nbytes, targets)


def _places(fit: AdapterFit) -> dict[str, list[str]]:
    """Name of a tensor → the base's modules that it goes to."""
    places: dict[str, list[str]] = {}
    found = [(target, entry) for target, shares in fit.linears.items() for s in shares for entry in s.module.tensors]
    found += [(target, share.entry) for target, shares in fit.biases.items() for share in shares]
    if fit.embedding is not None:
        found += [(str(fit.shapes.embedding), entry) for entry in fit.embedding.tensors]
    found += [*fit.saved.items(), *((target, rows.rows) for target, rows in fit.token_rows.items())]
    found += fit.base_weights.items()
    for target, entry in found:
        places.setdefault(entry.name, []).append(target)
    return places


def _packed_lines(header: PackedHeader) -> Iterator[TensorLine]:
    item = ITEM_BYTES[header.dtype]
    for module in header.modules:
        in_features, out_features = header.base[module.path]
        parts = {"lora_A": (module.lora_rank, in_features), "lora_B": (out_features, module.lora_rank)}
        for role, (rows, width) in parts.items():
            yield TensorLine("", module.path, role, header.dtype, (rows, width), rows * width * item, (module.path,))
        if module.has_bias:
            nbytes = out_features * item
            yield TensorLine("", module.path, "bias", header.dtype, (out_features,), nbytes, (module.path,))


def own_shapes(manifest: AdapterManifest) -> ModelShapes | None:
    """A base that the adapter fits, as far as its files tell; None if they do not tell where all of it goes."""
    if manifest.biases or manifest.saved or manifest.token_rows or manifest.base_weights:
        return None
    embeddings = list(manifest.embeddings.values())
    if len(embeddings) > 1:
        return None
    linears = {path: (module.in_features, module.out_features) for path, module in manifest.modules.items()}
    if not embeddings:
        return ModelShapes(linears)
    only = embeddings[0]
    return ModelShapes(linears, embedding=only.path, embedding_shape=(only.in_features, only.out_features))
