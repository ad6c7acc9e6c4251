"""From a report on headers to one on numbers: every byte is read, checked as the server checks it, and hashed."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from punica_core.adapter_tools.base import BaseFolder, CheckpointWeights
from punica_core.adapters.files import WEIGHTS_NAME, SourceFile
from punica_core.adapters.fit import AdapterFit
from punica_core.adapters.format import AdapterManifest
from punica_core.adapters.report import AdapterParts, AdapterReport, inspect, own_shapes
from punica_core.errors import AdapterError, AdapterTooLarge
from punica_core.lora.arena_layout import ModuleShape, lay_out
from punica_core.lora.assembly import kept_shapes, linear_paths
from punica_core.lora.packed import PackedReader, layout_of
from punica_core.lora.tensor_reader import TensorReader
from punica_core.lora.weights import AdapterReader

NO_LIMIT = 2**31
"""As max_lora_rank: the server's is its own matter."""

_ON_LOADING = "DoRA gains and trained biases are computed, and checked, when the server loads it"
_NO_COPIES = "its copies of the base's weights were not compared: the base's folder has no weights"
_NO_MODEL = "give --model to learn its key, and whether it fits: the files do not tell where all of its tensors go"


def examine(path: str, base: BaseFolder | None, dtype: torch.dtype, max_lora_rank: int = NO_LIMIT) -> AdapterReport:
    """The whole report on one adapter; never raises an AdapterError."""
    report, parts = inspect(path, None if base is None else base.shapes, max_lora_rank)
    if parts is None:
        return replace(report, against="" if base is None else base.folder)
    report = replace(
        report,
        checked="numbers",
        against="" if base is None else base.folder,
        dtype=str(dtype).removeprefix("torch."),
    )
    look = _packed if parts.header is not None else _folder
    try:
        return look(report, parts, base, dtype)
    except AdapterError as error:
        return report.refused(error)


def _packed(report: AdapterReport, parts: AdapterParts, base: BaseFolder | None, dtype: torch.dtype) -> AdapterReport:
    header = parts.header
    assert header is not None
    shapes = header.base if base is None else base.shapes
    with PackedReader(parts.ref, shapes, dtype, NO_LIMIT) as reader:
        check_room(reader.nbytes)
        key = reader.read().key
    gpu_bytes = layout_of(header).num_elements * dtype.itemsize
    return replace(report, adapter_key=key, host_bytes=reader.nbytes, gpu_bytes=gpu_bytes)


def _folder(report: AdapterReport, parts: AdapterParts, base: BaseFolder | None, dtype: torch.dtype) -> AdapterReport:
    manifest = parts.manifest
    assert manifest is not None
    check_room(manifest.file_bytes)
    shapes = own_shapes(manifest) if base is None else base.shapes
    if shapes is None:
        _read_all(parts, manifest, dtype)
        return replace(report, notes=(_NO_MODEL,))
    weights = CheckpointWeights(None, shapes) if base is None else base.weights
    with AdapterReader(parts.ref, shapes, dtype, NO_LIMIT, weights) as reader:
        key = reader.check(compare=weights.is_there)
    notes = []
    if manifest.settings.use_dora or manifest.biases:
        notes.append(_ON_LOADING)
    if manifest.base_weights and not weights.is_there:
        notes.append(_NO_COPIES)
    return replace(
        report,
        adapter_key=key,
        host_bytes=reader.nbytes,
        gpu_bytes=_gpu_bytes(reader.fit, dtype),
        notes=tuple(notes),
    )


def _read_all(parts: AdapterParts, manifest: AdapterManifest, dtype: torch.dtype) -> None:
    """Every number once, for its own sake."""
    with SourceFile(os.path.join(parts.ref.path, WEIGHTS_NAME), parts.ref.weights_signature) as file:
        reader = TensorReader(file, lambda: None)
        for _, _, entry in manifest.account():
            reader.read(entry, torch.empty(entry.shape, dtype=dtype if len(entry.shape) > 1 else torch.float32))
        file.check_unchanged()


def _gpu_bytes(fit: AdapterFit, dtype: torch.dtype) -> int | None:
    """What its linears take in the arena; None if it changes more than linears."""
    if fit.embedding or fit.saved or fit.token_rows:
        return None
    kept = kept_shapes(fit)
    modules = {
        path: ModuleShape(
            max(1, sum(share.module.lora_rank for share in fit.linears.get(path, ()))),
            *fit.shapes[path],
            has_gain=(path, "row_gain") in kept,
            has_bias=(path, "bias") in kept,
        )
        for path in linear_paths(fit)
    }
    return lay_out(modules).num_elements * int(dtype.itemsize)


def check_room(nbytes: int) -> None:
    """Raise AdapterTooLarge for what cannot be in memory here: a file may claim any size, and have it as a hole."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > room // 2:
        raise AdapterTooLarge(f"it needs {nbytes} bytes of memory; this machine has {room}.")
