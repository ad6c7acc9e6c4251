"""Reading one tensor of an adapter's file after the other: in chunks, hashed, cast and checked on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from blake3 import blake3
from torch import Tensor

from punica_core.adapters.files import SourceFile
from punica_core.adapters.header import TensorEntry
from punica_core.errors import AdapterInvalid, AdapterMismatch

CHUNK_BYTES = 4 * 1024 * 1024

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""Names of element types in files."""


class TensorReader:
    """Reads tensors of `file`; `progress` is called after each chunk, and what it raises ends the read."""

    def __init__(self, file: SourceFile, progress: Callable[[], None]) -> None:
        self._file = file
        self._progress = progress
        self._digest = blake3()

    def note(self, label: bytes) -> None:
        """Make the key depend on what the next bytes mean."""
        self._digest.update(label)

    def key(self) -> str:
        """Digest of all labels and bytes so far."""
        return str(self._digest.hexdigest())

    def read(self, entry: TensorEntry, out: Tensor) -> Tensor:
        """Fill `out`, contiguous, of the tensor's size and any float dtype; returns it in the tensor's shape.

        Raises AdapterChanged, or AdapterInvalid for numbers that are not finite in out's dtype.
        """
        assert out.numel() == math.prod(entry.shape), "what is not overwritten could be another adapter's"
        flat = out.view(-1)
        direct = flat if flat.dtype == DTYPES[entry.dtype] else None
        for first, chunk in self._chunks(entry, direct, hashed=True):
            part = flat[first : first + chunk.numel()]
            if direct is None:
                part.copy_(chunk)
            _check_finite(entry, first, chunk, part)
        return out.view(entry.shape)

    def check_equal(self, entry: TensorEntry, base: Tensor) -> None:
        """Raise AdapterMismatch unless the tensor is `base`, as far as the coarser of their dtypes can tell.

        base: contiguous, any device. The bytes change nothing, so the key does not depend on them.
        """
        flat = base.reshape(-1)
        for first, chunk in self._chunks(entry, None, hashed=False):
            part = flat[first : first + chunk.numel()].cpu()
            equal = (chunk.to(part.dtype) == part) | (part.to(chunk.dtype) == chunk)
            if not bool(equal.all()):
                row = (first + int((~equal).nonzero()[0, 0])) // base.size(-1)
                raise AdapterMismatch(
                    f"{entry.name!r} is a copy of the base model's weight, but it differs from the base that is served "
                    f"(first in row {row}). Serve the base it was trained on, or save the adapter without it "
                    "(save_embedding_layers=False) if it is meant for this one."
                )

    def _chunks(self, entry: TensorEntry, into: Tensor | None, *, hashed: bool) -> Iterator[tuple[int, Tensor]]:
        """(first element, elements as stored) of each chunk, in `into` (flat, of the stored dtype) or in a buffer."""
        stored = DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        step = CHUNK_BYTES // stored.itemsize
        buffer = torch.empty(min(count, step), dtype=stored) if into is None else into
        for first in range(0, count, step):
            size = min(step, count - first)
            chunk = buffer[:size] if into is None else buffer[first : first + size]
            raw = memoryview(chunk.view(torch.uint8).numpy())
            self._file.read_into(raw, entry.start + first * stored.itemsize)
            if hashed:
                self._digest.update(raw)
            self._progress()
            yield first, chunk


def check_finite(values: Tensor, what: str) -> None:
    """Raise AdapterInvalid, naming `what`, unless all values are finite."""
    if not bool(torch.isfinite(values).all()):
        bad = (~torch.isfinite(values)).nonzero()[0].tolist()
        raise AdapterInvalid(
            f"{what} is {float(values[tuple(bad)])} in row {bad[0]}: the adapter cannot be computed there."
        )


def _check_finite(entry: TensorEntry, first: int, source: Tensor, cast: Tensor) -> None:
    # The extremes carry NaN along and cost a thirtieth of isfinite().all(), which fills a mask.
    low, high = torch.aminmax(cast)
    if math.isfinite(float(low)) and math.isfinite(float(high)):
        return
    bad = int((~torch.isfinite(cast)).nonzero()[0, 0])
    if math.isfinite(float(source[bad])):
        raise AdapterInvalid(f"{entry.name!r} has the value {float(source[bad])}, too large for {cast.dtype}.")
    raise AdapterInvalid(
        f"{entry.name!r} has values that are NaN or infinite (the first is element {first + bad}: "
        f"{float(source[bad])}). The training diverged or the file is damaged."
    )
