"""The header of a packed adapter: one file with the matrices of an adapter as the arena holds them, for one base model.

Layout: MAGIC, 8 bytes little-endian length N, N bytes of JSON, zeros up to a multiple of PAGE_BYTES, then the elements,
all of one dtype, in the layout of `punica_core.lora.arena_layout`: module by module in the header's order. So the data
is read in one go, and copied in one go to wherever matrices lie like this.

Nothing of it is trusted: counts and sizes are bounded and must give the file's exact size, before anything of that size
is made. The file says nothing of its own identity: the key is computed from its bytes. Knows no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from punica_core.adapters.files import LFS_POINTER, SourceFile, lfs_advice
from punica_core.adapters.format import MAX_PATH_LENGTH, samples
from punica_core.adapters.header import ITEM_BYTES, MAX_HEADER_BYTES, TensorEntry, parse_json_object, shorten
from punica_core.adapters.peft_config import MAX_ALPHA
from punica_core.errors import AdapterInvalid, AdapterMismatch, AdapterTooLarge, AdapterUnsupported

SUFFIX = ".punica"
MAGIC = b"PUNICA\x00\x01"
"""The last byte is the version of the format."""
PAGE_BYTES = 4096
MAX_MODULES = 25_000
MAX_SIDE = 2**31

_PREFIX_BYTES = len(MAGIC) + 8
_KEYS = {"dtype", "num_elements", "modules", "base", "config_digest"}
_MODULE_KEYS = {"path", "lora_rank", "scale", "has_bias"}


@dataclass(frozen=True, slots=True)
class PackedModule:
    """A [lora_rank, I] and B [O, lora_rank] of the base's linear at `path`, and if so a bias [O]."""

    path: str
    lora_rank: int
    scale: float
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """dtype: of all elements, a key of ITEM_BYTES. base: (in_features, out_features) of all linears of the base.

    config_digest: of the adapter_config.json that it was made from, for people; nothing is decided by it.
    """

    dtype: str
    num_elements: int
    modules: tuple[PackedModule, ...]
    base: Mapping[str, tuple[int, int]]
    config_digest: str = ""

    @property
    def data_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def max_lora_rank(self) -> int:
        return max(module.lora_rank for module in self.modules)

    def encode(self) -> bytes:
        """All bytes of the file before the elements."""
        table = {
            "dtype": self.dtype,
            "num_elements": self.num_elements,
            "modules": [
                {"path": m.path, "lora_rank": m.lora_rank, "scale": m.scale, "has_bias": m.has_bias}
                for m in self.modules
            ],
            "base": self.base if isinstance(self.base, dict) else dict(self.base),
            "config_digest": self.config_digest,
        }
        raw = json.dumps(table, separators=(",", ":"), allow_nan=False).encode()
        head = MAGIC + len(raw).to_bytes(8, "little") + raw
        return head + bytes(-len(head) % PAGE_BYTES)


def read_packed_header(file: SourceFile) -> tuple[PackedHeader, bytes]:
    """The header and its bytes as they are in the file.

    Raises AdapterUnsupported for another version, AdapterInvalid for anything damaged, AdapterTooLarge beyond the
    bounds of this module.
    """
    head, end = raw_head(file)
    header = _parse(parse_json_object(head[_PREFIX_BYTES:end], file.name), file.name)
    start = len(head)
    if start + header.data_bytes != file.size:
        fault = "is truncated" if start + header.data_bytes > file.size else "has something behind its elements"
        raise AdapterInvalid(
            f"{file.name} {fault}: its elements end at byte {start + header.data_bytes}, the file at {file.size}."
        )
    return header, head


def raw_head(file: SourceFile) -> tuple[bytes, int]:
    """The bytes of a packed file before its elements, unread, and where its header ends in them. Raises what
    `read_packed_header` raises."""
    if file.size < _PREFIX_BYTES:
        raise AdapterInvalid(f"{file.name} is truncated: {file.size} bytes cannot hold the header of a packed adapter.")
    prefix = file.read(0, _PREFIX_BYTES)
    if LFS_POINTER.startswith(prefix) and file.read(0, min(file.size, len(LFS_POINTER))) == LFS_POINTER:
        raise AdapterInvalid(lfs_advice(file.name))
    if prefix[: len(MAGIC) - 1] != MAGIC[:-1]:
        raise AdapterInvalid(
            f"{file.name} is not a packed adapter: it does not begin as `punica adapters pack` writes."
        )
    if prefix[len(MAGIC) - 1] != MAGIC[-1]:
        raise AdapterUnsupported(
            f"{file.name} is a packed adapter of format {prefix[len(MAGIC) - 1]}, this server reads {MAGIC[-1]}; pack "
            "it again."
        )
    length = int.from_bytes(prefix[len(MAGIC) :], "little")
    end = _PREFIX_BYTES + length
    start = end + -end % PAGE_BYTES
    if start > file.size:
        raise AdapterInvalid(
            f"{file.name} is truncated: its header ends at byte {start}, the file at {file.size}. "
            "Is it still being written?"
        )
    if length > MAX_HEADER_BYTES:
        raise AdapterTooLarge(f"{file.name} claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are read.")
    head = file.read(0, start)
    if any(head[end:]):
        raise AdapterInvalid(f"{file.name}: there is something between its header and its elements.")
    return head, end


def elements_of(file_name: str, header: PackedHeader, start: int) -> TensorEntry:
    """All elements as one tensor of the file, from byte `start` on."""
    return TensorEntry(file_name, header.dtype, (header.num_elements,), start, header.data_bytes)


def check_base(header: PackedHeader, shapes: Mapping[str, tuple[int, int]], max_lora_rank: int) -> None:
    """Raise AdapterMismatch unless the base has exactly the linears the adapter was packed for; AdapterTooLarge."""
    if dict(header.base) != dict(shapes):
        advice = "Pack it again from its folder, for the base model that is served."
        lacking = [path for path in header.base if path not in shapes]
        added = [path for path in shapes if path not in header.base]
        if lacking or added:
            raise AdapterMismatch(
                f"it was packed for a base model of {len(header.base)} linears, this one has {len(shapes)}: "
                + (f"it lacks {samples(lacking)}. " if lacking else f"{samples(added)} were not there. ")
                + advice
            )
        path = next(path for path, shape in header.base.items() if shapes[path] != shape)
        raise AdapterMismatch(
            f"it was packed for a base model whose {path!r} maps {header.base[path][0]} → {header.base[path][1]} "
            f"features, this one's maps {shapes[path][0]} → {shapes[path][1]}. {advice}"
        )
    largest = max(header.modules, key=lambda module: module.lora_rank)
    if largest.lora_rank > max_lora_rank:
        raise AdapterTooLarge(
            f"rank {largest.lora_rank} > max {max_lora_rank} (module {largest.path!r}); "
            "serve with a larger --max-lora-rank or train with a smaller r."
        )


def _parse(table: Mapping[str, Any], file_name: str) -> PackedHeader:
    if table.keys() != _KEYS:
        raise AdapterInvalid(f"{file_name}: its header must have exactly {', '.join(sorted(_KEYS))}.")
    dtype, digest = table["dtype"], table["config_digest"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _wrong(file_name, "dtype", dtype, f"one of {', '.join(ITEM_BYTES)}")
    if not isinstance(digest, str) or len(digest) > 128:
        raise _wrong(file_name, "config_digest", digest, "a short text")
    num_elements = _count(file_name, "num_elements", table["num_elements"], 2**60)
    base = _base(table["base"], file_name)
    modules = _modules(table["modules"], base, file_name)
    return PackedHeader(dtype, num_elements, modules, MappingProxyType(base), digest)


def _base(table: Any, file_name: str) -> dict[str, tuple[int, int]]:
    if not isinstance(table, dict) or not 0 < len(table) <= MAX_MODULES:
        raise _wrong(file_name, "base", table, f"an object of 1 to {MAX_MODULES} linears")
    base = {}
    for path, shape in table.items():
        if not path or len(path) > MAX_PATH_LENGTH or not isinstance(shape, list) or len(shape) != 2:
            raise _wrong(file_name, f"base[{shorten(path)!r}]", shape, "[in_features, out_features]")
        base[path] = (
            _count(file_name, f"base[{path!r}][0]", shape[0], MAX_SIDE),
            _count(file_name, f"base[{path!r}][1]", shape[1], MAX_SIDE),
        )
    return base


def _modules(rows: Any, base: Mapping[str, tuple[int, int]], file_name: str) -> tuple[PackedModule, ...]:
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_MODULES:
        raise _wrong(file_name, "modules", rows, f"a list of 1 to {MAX_MODULES} modules")
    modules: dict[str, PackedModule] = {}
    for row in rows:
        if not isinstance(row, dict) or row.keys() != _MODULE_KEYS:
            raise _wrong(file_name, "modules", row, f"objects of {', '.join(sorted(_MODULE_KEYS))}")
        path, scale = row["path"], row["scale"]
        if not isinstance(path, str) or path not in base or path in modules:
            raise _wrong(file_name, "path", path, "a linear of its base, named once")
        if type(scale) not in (int, float) or abs(scale) > MAX_ALPHA or not math.isfinite(scale):
            raise _wrong(file_name, f"scale of {path!r}", scale, f"a number of at most {MAX_ALPHA:g}")
        if not isinstance(row["has_bias"], bool):
            raise _wrong(file_name, f"has_bias of {path!r}", row["has_bias"], "true or false")
        rank = _count(file_name, f"lora_rank of {path!r}", row["lora_rank"], MAX_SIDE)
        modules[path] = PackedModule(path, rank, float(scale), row["has_bias"])
    return tuple(modules.values())


def _count(file_name: str, what: str, value: Any, limit: int) -> int:
    if type(value) is not int or not 1 <= value < limit:
        raise _wrong(file_name, what, value, f"a count from 1 to {limit - 1}")
    return value


def _wrong(file_name: str, what: str, value: Any, wanted: str) -> AdapterInvalid:
    return AdapterInvalid(f"{file_name}: {what} is {shorten(repr(value))}; it must be {wanted}.")
