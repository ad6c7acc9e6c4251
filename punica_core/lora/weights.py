"""An adapter as tensors: read once, hashed while it is read, checked, in the model's dtype.

Nothing is memory-mapped: a file that shrinks under a map kills the process, one that shrinks under a read is an
error. The bytes end up in one buffer of our own per adapter.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, Self

import torch
from torch import Tensor

from punica_core.adapters.files import CONFIG_NAME, WEIGHTS_NAME, SourceFile
from punica_core.adapters.fit import AdapterFit, fit_adapter
from punica_core.adapters.format import LoraModule, ModelShapes, TokenRows, read_manifest
from punica_core.adapters.header import TensorEntry
from punica_core.adapters.names import TensorRole
from punica_core.errors import AdapterUnsupported
from punica_core.lora.assembly import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from punica_core.lora.assembly import Assembler, Key, Rooms, is_whole, kept_shapes, linear_paths
from punica_core.lora.base_weights import BaseWeights
from punica_core.lora.tables import ModuleWeights
from punica_core.lora.tensor_reader import TensorReader
from punica_core.protocol import AdapterRef


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """Rows that stand in place of the base's. token_ids: int64 [n], ascending, all different; rows: [n, H]."""

    token_ids: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class VocabularyWeights:
    """What an adapter changes of the input embedding and the output head, besides LoRA on the head.

    embedding: LoRA: a [R, V], a transposed view of a contiguous [V, R]; b [H, R]. embedding_matrix [V, H] and
    head_matrix [V, H]: used instead of the base's. embedding_rows, head_rows: the same for single tokens. Embeddings
    hold what the base's embedding module multiplies its rows by.
    """

    embedding: ModuleWeights | None = None
    embedding_matrix: Tensor | None = None
    embedding_rows: TrainedRows | None = None
    head_matrix: Tensor | None = None
    head_rows: TrainedRows | None = None


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter. key: its adapter_key, a digest of mathematics and bytes; nbytes: of all its tensors.

    modules: by path of the base's linears, the head's too; matrices of the model's dtype, on the CPU, with contiguous
    rows. One of which only the bias was trained has a pair of rank 1 that adds nothing.
    vocabulary: None if the adapter leaves embedding and head alone, or has no more than LoRA on the head.
    laid_out: the buffer that all of `modules` are views of, 1-D, if they lie there as `arena_layout` lays them out.
    landed: that buffer is landing memory, which a device copies from by itself.
    """

    key: str
    modules: Mapping[str, ModuleWeights]
    nbytes: int
    vocabulary: VocabularyWeights | None = None
    laid_out: Tensor | None = None
    landed: bool = False


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

    Opening parses and checks the headers (`manifest`, `fit`); `read` then brings the tensors. Between the two the owner
    can find `nbytes` of room. Both raise an AdapterError; neither lets a byte of another version in.
    base: the base's numbers; without them adapters that need some (DoRA, biases, embeddings) are refused.
    """

    def __init__(
        self,
        ref: AdapterRef,
        shapes: Mapping[str, tuple[int, int]],
        dtype: torch.dtype,
        max_lora_rank: int,
        base: BaseWeights | None = None,
    ) -> None:
        self._base = base
        with SourceFile(os.path.join(ref.path, CONFIG_NAME), ref.config_signature) as config:
            self._file = SourceFile(os.path.join(ref.path, WEIGHTS_NAME), ref.weights_signature)
            try:
                self.manifest = read_manifest(config, self._file)
                config.check_unchanged()
                self.fit = fit_adapter(self.manifest, shapes, max_lora_rank)
                if base is None and self.fit.needs_base:
                    raise AdapterUnsupported(
                        f"it has {self.fit.needs_base}, for which the base model's numbers are needed; only the server "
                        "has them. (Copies of the base's weights are left out with save_embedding_layers=False.)"
                    )
            except Exception:
                self._file.close()
                raise
        self._rooms = Rooms(kept_shapes(self.fit), dtype)
        self._dtype = dtype
        token_ids = sum(len(trained.token_ids) for trained in self.fit.token_rows.values())
        self.nbytes = self._rooms.nbytes + token_ids * torch.int64.itemsize

    def read(self, progress: Callable[[], None] = lambda: None) -> AdapterWeights:
        """The tensors. `progress` is called after each chunk; what it raises ends the read.

        Raises AdapterChanged, AdapterInvalid for numbers that are not finite in the model's dtype, AdapterMismatch for
        a copy of the base's weights that differs from them.
        """
        self._rooms.allocate()
        reader = TensorReader(self._file, progress)
        raw = {entry.name: self._read_entry(reader, entry, key) for entry, key in self._destinations(reader)}
        self._compare_copies(reader)
        self._file.check_unchanged()
        assembler = Assembler(self.fit, self._rooms, raw, self._base, progress)
        modules = {path: assembler.linear(path) for path in linear_paths(self.fit)}
        vocabulary = _vocabulary(self.fit, assembler)
        return AdapterWeights(reader.key(), MappingProxyType(modules), self.nbytes, vocabulary)

    def check(self, progress: Callable[[], None] = lambda: None, *, compare: bool = True) -> str:
        """Read and check every number as `read` does, keep none, and return the adapter_key.

        What is computed with the base's numbers is not. compare: copies of the base's weights with the base's.
        """
        reader = TensorReader(self._file, progress)
        for entry, _ in self._destinations(reader):
            self._read_entry(reader, entry, ())
        if compare:
            self._compare_copies(reader)
        self._file.check_unchanged()
        return reader.key()

    def _compare_copies(self, reader: TensorReader) -> None:
        for path, entry in self.fit.base_weights.items():
            assert self._base is not None
            reader.check_equal(entry, self._base.weight(path).detach())

    def _read_entry(self, reader: TensorReader, entry: TensorEntry, keys: tuple[Key, ...]) -> Tensor:
        """Read a tensor into its room, or rooms, or one that lasts until the adapter is complete."""
        rooms = [self._rooms[key] for key in keys if key in self._rooms]
        if not rooms:
            # Vectors that gains and biases are computed from keep their precision until then.
            dtype = self._dtype if len(entry.shape) > 1 else torch.float32
            return reader.read(entry, torch.empty(entry.shape, dtype=dtype))
        read = reader.read(entry, rooms[0])
        for room in rooms[1:]:
            room.copy_(read)
        return read

    def _destinations(self, reader: TensorReader) -> Iterator[tuple[TensorEntry, tuple[Key, ...]]]:
        """Every tensor, in the order in which the key is computed, with where it is kept as it is, if so.

        What the key says of a tensor is said to the reader before its bytes come.
        """
        whole = {self.fit.linears[path][0].module.path for path in self.fit.linears if is_whole(self.fit, path)}
        manifest = self.manifest
        for path, module in manifest.modules.items():
            reader.note(_fingerprint(module))
            yield module.a, ((path, "a"),) if path in whole else ()
            yield module.b, ((path, "b"),) if path in whole else ()
            yield from self._vectors(reader, module)
        for path, module in manifest.embeddings.items():
            reader.note(_label(TensorRole.EMBEDDING_A, path, module.a, scale=module.scale))
            yield module.a, ()
            reader.note(_label(TensorRole.EMBEDDING_B, path, module.b))
            yield module.b, ((path, "b"),)
            yield from self._vectors(reader, module)
        for path, entry in manifest.biases.items():
            reader.note(_label(TensorRole.BIAS, path, entry))
            yield entry, ()
        for path, entry in manifest.saved.items():
            targets = tuple((target, "saved") for target, found in self.fit.saved.items() if found is entry)
            reader.note(_label(TensorRole.FULL_WEIGHT, path, entry, targets=[target for target, _ in targets]))
            yield entry, targets
        for path, trained in manifest.token_rows.items():
            targets = tuple((target, "rows") for target, found in self.fit.token_rows.items() if found is trained)
            reader.note(_label(TensorRole.TOKEN_DELTA, path, trained.rows, token_ids=trained.token_ids))
            yield trained.rows, targets

    def _vectors(self, reader: TensorReader, module: LoraModule) -> Iterator[tuple[TensorEntry, tuple[Key, ...]]]:
        for role, entry in (
            (TensorRole.DORA_MAGNITUDE, module.magnitude),
            (TensorRole.LORA_BIAS, module.b_bias),
        ):
            if entry is not None:
                reader.note(_label(role, module.path, entry))
                yield entry, ()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def load_adapter(
    ref: AdapterRef,
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    max_lora_rank: int,
    base: BaseWeights | None = None,
) -> AdapterWeights:
    """Open, check and read an adapter in one go, on the calling thread. Raises an AdapterError."""
    with AdapterReader(ref, shapes, dtype, max_lora_rank, base) as reader:
        return reader.read()


def _vocabulary(fit: AdapterFit, assembler: Assembler) -> VocabularyWeights | None:
    if not (fit.embedding or fit.saved or fit.token_rows):
        return None
    head, embedding = fit.shapes.head, fit.shapes.embedding
    matrices = {path: assembler.replaced(path, "saved") for path in fit.saved}
    rows = {path: _trained_rows(trained, assembler.replaced(path, "rows")) for path, trained in fit.token_rows.items()}
    return VocabularyWeights(
        embedding=assembler.embedding(),
        embedding_matrix=matrices.get(str(embedding)),
        embedding_rows=rows.get(str(embedding)),
        head_matrix=matrices.get(str(head)),
        head_rows=rows.get(str(head)),
    )


def _trained_rows(trained: TokenRows, rows: Tensor) -> TrainedRows:
    token_ids, order = torch.tensor(trained.token_ids).sort()
    return TrainedRows(token_ids, rows.copy_(rows[order]))


def _fingerprint(module: LoraModule) -> bytes:
    """What the bytes of a module mean, unambiguously: two adapters of equal digest compute the same."""
    path = module.path.encode()
    sizes = (len(path), *module.a.shape, *module.b.shape)
    dtypes = f"{module.a.dtype:>4}{module.b.dtype:>4}".encode()
    return struct.pack("<5Q", *sizes) + struct.pack("<d", module.scale) + dtypes + path


def _label(role: TensorRole, path: str, entry: TensorEntry, **meaning: object) -> bytes:
    """The same for any other tensor. It starts as no `_fingerprint` does."""
    text = json.dumps([role, path, entry.dtype, entry.shape, meaning]).encode()
    return struct.pack("<2Q", 2**64 - 1, len(text)) + text
