"""Tensors out of a pickle file, for conversion only, by torch's restricted unpickler.

`punica adapters convert` runs it in a process of its own, of bounded memory, that may fail.
"""

from __future__ import annotations

import resource
import warnings

import torch
from torch import Tensor

from punica_core.adapters.files import SourceFile
from punica_core.adapters.header import ITEM_BYTES, MAX_TENSORS, shorten
from punica_core.errors import AdapterInvalid, AdapterTooLarge, AdapterUnsupported
from punica_core.lora.tensor_reader import DTYPES

MAX_PICKLE_BYTES = 64 * 1024**3
_SPARE_BYTES = 4 * 1024**3
"""Address space besides four times the file: what torch itself takes while it reads."""

_NESTS = ("state_dict", "model_state_dict", "module")
"""Keys under which training frameworks put the tensors."""


def bound_memory(file_bytes: int) -> None:
    """Bound this process for good: a small file must not make it as large as the machine."""
    try:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # not Linux
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + 4 * file_bytes + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


def load_pickle(path: str) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote, by name, on the CPU.

    Raises AdapterUnsupported for anything but tensors, AdapterInvalid for a damaged file, AdapterTooLarge.
    """
    with SourceFile(path) as source:
        if source.size > MAX_PICKLE_BYTES:
            raise AdapterTooLarge(f"{source.name} has {source.size} bytes; at most {MAX_PICKLE_BYTES} are read.")
        name, size = source.name, source.size
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of storages in old files
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # hostile bytes can raise anything in an unpickler
        why = shorten(str(error).strip().partition("\n")[0], 200) or type(error).__name__
        raise AdapterUnsupported(f"{name} cannot be read as a file of tensors (weights_only): {why}") from None
    for key in _NESTS:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    return _checked(loaded, name, size)


def _checked(loaded: object, name: str, file_bytes: int) -> dict[str, Tensor]:
    if not isinstance(loaded, dict) or not loaded:
        raise AdapterInvalid(f"{name} holds a {type(loaded).__name__}; it must be a table of tensors.")
    if len(loaded) > MAX_TENSORS:
        raise AdapterTooLarge(f"{name} has {len(loaded)} tensors; at most {MAX_TENSORS} are read.")
    tensors: dict[str, Tensor] = {}
    total = 0
    for key, value in loaded.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise AdapterUnsupported(f"{name}: {shorten(repr(key))} is a {type(value).__name__}, not a tensor by name.")
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise AdapterUnsupported(f"{name}: {shorten(key)!r} is not a plain tensor.")
        if value.dtype not in DTYPES.values():
            raise AdapterUnsupported(f"{name}: {shorten(key)!r} is {value.dtype}; {', '.join(ITEM_BYTES)} are read.")
        total += value.numel() * value.element_size()
        tensors[key] = value
    if total > 2 * file_bytes + 1_000_000:  # views may share their bytes, but not spread a few over gigabytes
        raise AdapterInvalid(f"{name} has {file_bytes} bytes, its tensors {total}: they repeat what is stored.")
    return tensors
