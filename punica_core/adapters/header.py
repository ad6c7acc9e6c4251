"""The header of a safetensors file, read by hand within bounds.

Layout (the format's own definition): 8 bytes little-endian length N, N bytes of JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}`, then the data. Tensors must cover
the data exactly: no holes, no overlaps, nothing behind the last one.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from punica_core.adapters.files import LFS_POINTER, SourceFile, lfs_advice
from punica_core.errors import AdapterInvalid, AdapterTooLarge, AdapterUnsupported

MAX_HEADER_BYTES = 8 * 1024 * 1024
MAX_TENSORS = 50_000
MAX_DIMS = 8
MAX_NAME_LENGTH = 512
LENGTH_BYTES = 8

ITEM_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Element dtypes a LoRA matrix may have, with their sizes."""

_OTHER_DTYPE = re.compile(r"BOOL|[UI](?:8|16|32|64)|C64|F[468](?:_E\dM\d)?")
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

CONVERT_PICKLE = (
    "Pickle files can run code, and the server opens none. Convert the folder where you trust it: "
    "punica adapters convert FOLDER NEW_FOLDER"
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `nbytes` bytes from byte `start` of the file, row-major, of a dtype in ITEM_BYTES."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(file: SourceFile) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name, in the order of their bytes.

    Raises AdapterInvalid (damaged, truncated, no tensors), AdapterUnsupported (pickle, other element types),
    AdapterTooLarge (header beyond the bounds of this module).
    """
    return parse_header(raw_header(file), file.size, file.name)


def raw_header(file: SourceFile) -> bytes:
    """The JSON of a safetensors file, unread. Raises what `read_header` raises."""
    if file.size == 0:
        raise AdapterInvalid(f"{file.name} has no weights: it is empty (0 bytes). Is it still being written?")
    prefix = file.read(0, min(file.size, len(LFS_POINTER)))
    if prefix == LFS_POINTER:
        raise AdapterInvalid(lfs_advice(file.name))
    if prefix[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{" and prefix.startswith(_PICKLE_STARTS):
        raise AdapterUnsupported(f"{file.name} is a pickle file, not safetensors. {CONVERT_PICKLE}")
    if file.size < LENGTH_BYTES + 2:
        raise AdapterInvalid(f"{file.name} is truncated: {file.size} bytes cannot hold a safetensors header.")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > max(file.size, MAX_HEADER_BYTES):
        raise AdapterInvalid(
            f"{file.name} claims a header of {length} bytes, and has {file.size} in all. Is it safetensors?"
        )
    if LENGTH_BYTES + length > file.size:
        raise AdapterInvalid(
            f"{file.name} is truncated: its header ends at byte {LENGTH_BYTES + length}, the file at {file.size}."
        )
    if length > MAX_HEADER_BYTES:
        raise AdapterTooLarge(f"{file.name} claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are read.")
    return file.read(LENGTH_BYTES, length)


def parse_header(raw: bytes, file_size: int, file_name: str) -> dict[str, TensorEntry]:
    """`read_header` without the file: `raw` is the JSON, `file_size` counts the whole file."""
    table = parse_json_object(raw, file_name)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise AdapterInvalid(f"{file_name}: __metadata__ must be an object of texts.")
    if not table:
        raise AdapterInvalid(f"{file_name} has no weights: it holds no tensors. Was it saved under ZeRO-3?")
    if len(table) > MAX_TENSORS:
        raise AdapterTooLarge(f"{file_name} has {len(table)} tensors; at most {MAX_TENSORS} are read.")
    data_start = LENGTH_BYTES + len(raw)
    entries = [_entry(name, value, data_start, file_name) for name, value in table.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    _check_cover(entries, data_start, file_size, file_name)
    return {entry.name: entry for entry in entries}


def parse_json_object(raw: bytes, file_name: str) -> dict[str, Any]:
    """A strict JSON object: UTF-8, no byte order mark, no repeated keys, no NaN. Raises AdapterInvalid."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            # in one pass: a header may have a million keys
            repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise ValueError(f"the key {shorten(repeated)!r} appears twice")
        return found

    def reject(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON number")

    if raw.startswith(b"\xef\xbb\xbf"):
        raise AdapterInvalid(f"{file_name} starts with a byte order mark; save it as UTF-8 without one.")
    if raw.startswith(LFS_POINTER):
        raise AdapterInvalid(lfs_advice(file_name))
    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=reject)
    except RecursionError:
        raise AdapterInvalid(f"{file_name} is nested too deeply.") from None
    except ValueError as error:
        raise AdapterInvalid(f"{file_name} is not valid JSON: {shorten(str(error), 200)}.") from None
    if not isinstance(value, dict):
        raise AdapterInvalid(f"{file_name} holds a JSON {type(value).__name__}; it must be an object.")
    return value


def shorten(text: str, limit: int = 120) -> str:
    """At most `limit` characters of a text that came from a file or a client."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _entry(name: str, value: Any, data_start: int, file_name: str) -> TensorEntry:
    where = f"{file_name}: tensor {shorten(name)!r}"
    if len(name) > MAX_NAME_LENGTH:
        raise AdapterInvalid(f"{where} has a name of {len(name)} characters; at most {MAX_NAME_LENGTH} are allowed.")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise AdapterInvalid(f"{where} must have exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        raise AdapterInvalid(f"{where} has the shape {shorten(repr(shape))}; it must be at most {MAX_DIMS} counts.")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise AdapterInvalid(f"{where} has the offsets {shorten(repr(offsets))}; they must be [begin, end].")
    if not isinstance(dtype, str) or (dtype not in ITEM_BYTES and not _OTHER_DTYPE.fullmatch(dtype)):
        raise AdapterInvalid(f"{where} has the unknown dtype {shorten(repr(dtype))}.")
    if dtype not in ITEM_BYTES:
        raise AdapterUnsupported(f"{where} has dtype {dtype}; LoRA weights must be one of {', '.join(ITEM_BYTES)}.")
    if 0 in shape:
        raise AdapterInvalid(f"{where} has no weights: its shape is {shape}. Was it saved under ZeRO-3?")
    nbytes = offsets[1] - offsets[0]
    if nbytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise AdapterInvalid(
            f"{where} of shape {shape} and dtype {dtype} needs {math.prod(shape) * ITEM_BYTES[dtype]} bytes, "
            f"but its offsets give it {nbytes}."
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _are_counts(value: Any) -> bool:
    # bool is an int in Python; 2**63 keeps a product of MAX_DIMS of them cheap.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_cover(entries: list[TensorEntry], data_start: int, file_size: int, file_name: str) -> None:
    end = data_start
    for entry in entries:
        if entry.start != end:
            fault = "overlaps another tensor" if entry.start < end else "follows a hole in the data"
            raise AdapterInvalid(f"{file_name}: tensor {shorten(entry.name)!r} {fault}.")
        end += entry.nbytes
    if end > file_size:
        raise AdapterInvalid(
            f"{file_name} is truncated: its tensors end at byte {end}, the file at {file_size}. "
            "Is it still being written?"
        )
    if end < file_size:
        raise AdapterInvalid(f"{file_name} has {file_size - end} bytes behind its last tensor.")
