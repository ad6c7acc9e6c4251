"""An adapter as tensors: read once, hashed while it is read, checked, in the model's dtype.

Nothing is memory-mapped: a file that shrinks under a map kills the process, one that shrinks under a read is an
error. The bytes end up in one buffer of our own per adapter.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, Self

import torch
from blake3 import blake3

from punica_core.adapters.files import CONFIG_NAME, WEIGHTS_NAME, SourceFile
from punica_core.adapters.format import AdapterManifest, LoraModule, ModelShapes, check_against, read_manifest
from punica_core.adapters.header import TensorEntry
from punica_core.errors import AdapterInvalid
from punica_core.lora.tables import ModuleWeights
from punica_core.protocol import AdapterRef

ALIGNMENT_BYTES = 64
CHUNK_BYTES = 4 * 1024 * 1024

_TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter. key: its adapter_key, a digest of mathematics and bytes; nbytes: of its buffer.

    modules: by path; matrices contiguous, of the model's dtype, on the CPU; without row_gain and bias.
    """

    key: str
    modules: Mapping[str, ModuleWeights]
    nbytes: int


class AdapterSource(Protocol):
    """One version of an adapter, opened for one read, as a context manager; opening and reading raise AdapterErrors.

    nbytes: of the buffer that `read` brings, so that room can be found before.
    """

    @property
    def nbytes(self) -> int: ...

    def read(self, progress: Callable[[], None] = lambda: None) -> AdapterWeights:
        """The tensors. `progress` is called now and then; what it raises ends the read."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


OpenAdapter = Callable[[AdapterRef, ModelShapes, torch.dtype, int], AdapterSource]
"""Opens the version a ref names for a base of these shapes and dtype; the last argument is max_lora_rank."""


class AdapterReader:
    """One version of an adapter, opened for one read; use it as a context manager.

    Opening parses and checks the headers (`manifest`); `read` then brings the tensors. Between the two the owner
    can find `nbytes` of room. Both raise an AdapterError; neither lets a byte of another version in.
    """

    def __init__(self, ref: AdapterRef, shapes: ModelShapes, dtype: torch.dtype, max_lora_rank: int) -> None:
        self._dtype = dtype
        with SourceFile(os.path.join(ref.path, CONFIG_NAME), ref.config_signature) as config:
            self._file = SourceFile(os.path.join(ref.path, WEIGHTS_NAME), ref.weights_signature)
            try:
                self.manifest = read_manifest(config, self._file)
                config.check_unchanged()
                check_against(self.manifest, shapes, max_lora_rank)
            except Exception:
                self._file.close()
                raise
        self._offsets, elements = _layout(self.manifest, dtype)
        self._elements = elements
        self.nbytes = elements * dtype.itemsize

    def read(self, progress: Callable[[], None] = lambda: None) -> AdapterWeights:
        """The tensors. `progress` is called after each chunk; what it raises ends the read.

        Raises AdapterChanged, or AdapterInvalid for numbers that are not finite in the model's dtype.
        """
        # Not a cleared buffer: the gaps between aligned matrices are never read.
        buffer = torch.empty(self._elements, dtype=self._dtype)
        digest = blake3()
        modules: dict[str, ModuleWeights] = {}
        for path, module in self.manifest.modules.items():
            digest.update(_fingerprint(module))
            a, b = (
                self._read_tensor(entry, buffer[offset : offset + math.prod(entry.shape)], digest, progress)
                for entry, offset in zip((module.a, module.b), self._offsets[path], strict=True)
            )
            modules[path] = ModuleWeights(a, b, module.scale)
        self._file.check_unchanged()
        return AdapterWeights(digest.hexdigest(), MappingProxyType(modules), self.nbytes)

    def _read_tensor(
        self, entry: TensorEntry, room: torch.Tensor, digest: blake3, progress: Callable[[], None]
    ) -> torch.Tensor:
        stored = _TORCH_DTYPES[entry.dtype]
        source = room if stored == self._dtype else torch.empty(room.numel(), dtype=stored)
        raw = memoryview(source.view(torch.uint8).numpy())
        for start in range(0, entry.nbytes, CHUNK_BYTES):
            chunk = raw[start : start + CHUNK_BYTES]
            self._file.read_into(chunk, entry.start + start)
            digest.update(chunk)
            progress()
        if source is not room:
            room.copy_(source)
        _check_finite(entry, source, room)
        return room.view(entry.shape)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> AdapterReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def load_adapter(ref: AdapterRef, shapes: ModelShapes, dtype: torch.dtype, max_lora_rank: int) -> AdapterWeights:
    """Open, check and read an adapter in one go, on the calling thread. Raises an AdapterError."""
    with AdapterReader(ref, shapes, dtype, max_lora_rank) as reader:
        return reader.read()


def _layout(manifest: AdapterManifest, dtype: torch.dtype) -> tuple[dict[str, tuple[int, int]], int]:
    """Offsets of each module's a and b in the adapter's buffer, and its length; all in elements, aligned."""
    step = ALIGNMENT_BYTES // dtype.itemsize
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for path, module in manifest.modules.items():
        a_end = end + math.ceil(math.prod(module.a.shape) / step) * step
        offsets[path] = (end, a_end)
        end = a_end + math.ceil(math.prod(module.b.shape) / step) * step
    return offsets, end


def _fingerprint(module: LoraModule) -> bytes:
    """What the bytes of a module mean, unambiguously: two adapters of equal digest compute the same."""
    path = module.path.encode()
    sizes = (len(path), *module.a.shape, *module.b.shape)
    dtypes = f"{module.a.dtype:>4}{module.b.dtype:>4}".encode()
    return struct.pack("<5Q", *sizes) + struct.pack("<d", module.scale) + dtypes + path


def _check_finite(entry: TensorEntry, source: torch.Tensor, cast: torch.Tensor) -> None:
    # The extremes carry NaN along and cost a thirtieth of isfinite().all(), which fills a mask.
    low, high = torch.aminmax(cast)
    if math.isfinite(float(low)) and math.isfinite(float(high)):
        return
    finite = torch.isfinite(cast)
    bad = int((~finite).nonzero()[0, 0])
    if math.isfinite(float(source[bad])):
        raise AdapterInvalid(f"{entry.name!r} has the value {float(source[bad])}, too large for {cast.dtype}.")
    raise AdapterInvalid(
        f"{entry.name!r} has {int((~finite).sum())} values that are NaN or infinite (the first is element {bad}: "
        f"{float(source[bad])}). The training diverged or the file is damaged."
    )
