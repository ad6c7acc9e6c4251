"""A folder → one packed file for one base model."""

from __future__ import annotations

import os

import torch
from blake3 import blake3

from punica_core.adapter_tools.base import BaseFolder
from punica_core.adapter_tools.numbers import NO_LIMIT, check_room, examine
from punica_core.adapters.files import CONFIG_NAME, SourceFile
from punica_core.adapters.locate import ref_of
from punica_core.adapters.packed_header import SUFFIX
from punica_core.adapters.report import AdapterReport
from punica_core.errors import AdapterUnsupported, ConfigError
from punica_core.lora.packed import write_packed
from punica_core.lora.weights import AdapterReader


def pack(source: str, target: str, base: BaseFolder, dtype: torch.dtype) -> AdapterReport:
    """Write `target`, complete or not at all; the report is on what was written.

    Raises AdapterError if the adapter is refused or cannot be packed, ConfigError for a target of another suffix, or
    one that is there.
    """
    if not target.endswith(SUFFIX):
        raise ConfigError(f"{target} must end with {SUFFIX}: the server knows packed adapters by it.")
    if os.path.lexists(target):
        raise ConfigError(f"{target} is there already; nothing is overwritten. Choose another name.")
    ref = ref_of(source)
    if ref.packed:
        raise AdapterUnsupported(f"{source!r} is packed already; pack the folder it was made from.")
    with AdapterReader(ref, base.shapes, dtype, NO_LIMIT, base.weights) as reader:
        needed = reader.fit.needs_base
        if needed not in ("", "copies of the base model's weights"):
            raise AdapterUnsupported(
                f"it has {needed}, which is computed with the base model's numbers when it is loaded; a packed file "
                "holds LoRA on linear layers only. Serve its folder."
            )
        check_room(2 * reader.nbytes)
        weights = reader.read()
    with SourceFile(os.path.join(source, CONFIG_NAME), ref.config_signature) as config:
        digest = str(blake3(config.read(0, config.size)).hexdigest())
    write_packed(target, weights, base.shapes, dtype, digest)
    return examine(target, base, dtype)
