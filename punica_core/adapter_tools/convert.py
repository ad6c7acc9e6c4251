"""Any spelling of a LoRA adapter → a folder as PEFT saves it today. The source is only read; nothing is overwritten."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from punica_core.adapter_tools.base import BaseFolder
from punica_core.adapter_tools.canonical import Canonical, canonical
from punica_core.adapter_tools.numbers import check_room, examine
from punica_core.adapter_tools.pickle_file import load_pickle
from punica_core.adapters.files import CONFIG_NAME, PICKLE_NAMES, WEIGHTS_NAME, SourceFile
from punica_core.adapters.format import samples
from punica_core.adapters.header import parse_json_object, read_header
from punica_core.adapters.peft_config import MAX_CONFIG_BYTES, parse_config
from punica_core.adapters.report import AdapterReport
from punica_core.errors import AdapterError, AdapterInvalid, AdapterTooLarge, ConfigError
from punica_core.lora.tensor_reader import DTYPES, TensorReader

TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")
"""What else of a folder the server may read."""

_MAX_TEMPLATE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Conversion:
    """report: of the result. changes: what was done, in words."""

    report: AdapterReport
    changes: list[str]


def convert(source: str, target: str, base: BaseFolder | None) -> Conversion:
    """Write the folder `target`, complete or not at all.

    Raises AdapterError if the adapter would be refused all the same, ConfigError if there is something at `target`.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} is there already; nothing is overwritten. Choose another name.")
    raw = _read_config(source)
    settings = parse_config(raw)
    config = parse_json_object(raw, CONFIG_NAME)
    weights_name, tensors = _read_tensors(source)
    result = canonical(settings, tensors, None if base is None else base.shapes)
    parent, name = os.path.split(os.path.abspath(target))
    try:
        partial = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
    except OSError as error:
        raise ConfigError(f"Nothing can be written to {parent}: {error.strerror}.") from None
    try:
        written = {name: tensor.contiguous().clone() for name, tensor in result.tensors.items()}
        save_file(written, os.path.join(partial, WEIGHTS_NAME), metadata={"format": "pt"})
        with open(os.path.join(partial, CONFIG_NAME), "w") as file:
            json.dump(config | result.config, file, indent=2)
        copied = _copy_templates(source, partial)
        report = examine(partial, base, _common_dtype(tensors))
        if not report.is_served:
            raise AdapterInvalid(f"What it would become is refused ({report.code}): {report.reason}")
        os.chmod(partial, 0o755)
        os.rename(partial, target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Conversion(report, _changes(weights_name, result, config, copied))


def _read_config(source: str) -> bytes:
    try:
        with SourceFile(os.path.join(source, CONFIG_NAME)) as file:
            if file.size > MAX_CONFIG_BYTES:
                raise AdapterTooLarge(f"{CONFIG_NAME} has {file.size} bytes; at most {MAX_CONFIG_BYTES} are read.")
            return file.read(0, file.size)
    except AdapterError as error:
        raise AdapterInvalid(f"{source!r}: {error.message}") from None


def _read_tensors(source: str) -> tuple[str, Mapping[str, Tensor]]:
    """The weights file's name and tensors; safetensors go before pickle."""
    path = os.path.join(source, WEIGHTS_NAME)
    if os.path.lexists(path):
        with SourceFile(path) as file:
            entries = read_header(file)
            check_room(2 * file.size)
            reader = TensorReader(file, lambda: None)
            tensors = {
                name: reader.read(entry, torch.empty(entry.shape, dtype=DTYPES[entry.dtype]))
                for name, entry in entries.items()
            }
            file.check_unchanged()
        return WEIGHTS_NAME, tensors
    for name in PICKLE_NAMES:
        if os.path.lexists(os.path.join(source, name)):
            return name, load_pickle(os.path.join(source, name))
    raise AdapterInvalid(f"{source!r} has no weights: neither {WEIGHTS_NAME} nor {', '.join(PICKLE_NAMES)}.")


def _copy_templates(source: str, partial: str) -> list[str]:
    copied = []
    for name in TEMPLATES:
        path = os.path.join(source, name)
        if os.path.isfile(path) and os.path.getsize(path) <= _MAX_TEMPLATE_BYTES:
            shutil.copyfile(path, os.path.join(partial, name))
            copied.append(name)
    return copied


def _common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """What every number of the file fits into, of what models compute in: nothing is served in float64."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    return torch.float32 if len(dtypes) > 1 or torch.float64 in dtypes else dtypes.pop()


def _changes(weights_name: str, result: Canonical, config: Mapping[str, Any], copied: list[str]) -> list[str]:
    changes = []
    if weights_name != WEIGHTS_NAME:
        changes.append(f"{weights_name} became {WEIGHTS_NAME}")
    if result.renamed:
        before, after = result.renamed[0]
        changes.append(
            f"{len(result.renamed)} of {len(result.tensors)} tensors renamed, such as {before!r} to {after!r}"
        )
    for leaf, parts in _by_leaf(result.split).items():
        count = sum(path.rpartition(".")[2] == leaf for path in result.split)
        changes.append(f"{count} {leaf} split into {', '.join(parts)}")
    changes += [f"{key} in {CONFIG_NAME} names {samples(value)}" for key, value in result.config.items() if value]
    changes += [f"{key} in {CONFIG_NAME} emptied" for key, v in result.config.items() if not v and config.get(key)]
    changes += [f"{name} copied" for name in copied]
    return changes or ["nothing: it was canonical"]


def _by_leaf(split: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {path.rpartition(".")[2]: [part.rpartition(".")[2] for part in parts] for path, parts in split.items()}
