"""Packed adapters: an adapter in one file as the arena holds it, read with one pass and no work for each tensor.

What such a file can hold is what is computed without the base's numbers: LoRA on linears and head, with lora_bias.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor

from punica_core.adapters.files import SourceFile
from punica_core.adapters.format import ModelShapes
from punica_core.adapters.header import ITEM_BYTES
from punica_core.adapters.packed_header import (
    PackedHeader,
    PackedModule,
    check_base,
    elements_of,
    read_packed_header,
)
from punica_core.errors import AdapterInvalid, AdapterUnsupported, ConfigError
from punica_core.lora.arena_layout import AdapterLayout, ModuleShape, Part, lay_out
from punica_core.lora.base_weights import BaseWeights
from punica_core.lora.tables import ModuleWeights, matrices, shape_of
from punica_core.lora.tensor_reader import DTYPES, TensorReader
from punica_core.lora.weights import AdapterReader, AdapterSource, AdapterWeights, OpenAdapter
from punica_core.protocol import AdapterRef

_KEY_LABEL = b"packed adapter\0"
_LENGTH = 8


class PackedReader:
    """A packed adapter, opened for one read; implements `AdapterSource`.

    Opening checks the header, the file's size and that the base is the one it was packed for.
    """

    def __init__(
        self, ref: AdapterRef, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, max_lora_rank: int
    ) -> None:
        self._file = SourceFile(ref.path, ref.weights_signature)
        try:
            self.header, self._head = read_packed_header(self._file)
            check_base(self.header, shapes, max_lora_rank)
            self.layout = layout_of(self.header)
            if self.layout.num_elements != self.header.num_elements:
                raise AdapterInvalid(
                    f"{self._file.name} has {self.header.num_elements} elements; its modules take "
                    f"{self.layout.num_elements}."
                )
        except Exception:
            self._file.close()
            raise
        self._dtype = dtype
        self.nbytes = self.layout.num_elements * dtype.itemsize

    @property
    def num_elements(self) -> int:
        """Of the buffer that `read` fills."""
        return self.layout.num_elements

    def read(self, progress: Callable[[], None] = lambda: None, into: Tensor | None = None) -> AdapterWeights:
        """The matrices, as views of one buffer that is laid out as the arena is. into: landing memory for it, 1-D, of
        the model's dtype and `num_elements`; without, it is memory of the adapter's own.

        Each chunk is hashed and checked where it was read to. When this returns, every element of `into` is the file's.
        Raises AdapterChanged, AdapterInvalid for numbers that are not finite in the model's dtype.
        """
        reader = TensorReader(self._file, progress)
        reader.note(_KEY_LABEL + len(self._head).to_bytes(_LENGTH, "little") + self._head)
        flat = torch.empty(self.layout.num_elements, dtype=self._dtype) if into is None else into
        reader.read(elements_of(self._file.name, self.header, len(self._head)), flat)
        self._file.check_unchanged()
        modules = {module.path: self._module(module, flat) for module in self.header.modules}
        landed = into is not None
        return AdapterWeights(reader.key(), MappingProxyType(modules), self.nbytes, laid_out=flat, landed=landed)

    def _module(self, module: PackedModule, flat: Tensor) -> ModuleWeights:
        place = self.layout.places[module.path]
        bias = None if place.bias is None else _view(flat, place.bias)[0]
        return ModuleWeights(_view(flat, place.a), _view(flat, place.b), module.scale, bias=bias)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def opener_for(base: BaseWeights | None) -> OpenAdapter:
    """Opens folders and packed files, for the base whose numbers are given."""

    def open_adapter(ref: AdapterRef, shapes: ModelShapes, dtype: torch.dtype, max_lora_rank: int) -> AdapterSource:
        if ref.packed:
            return PackedReader(ref, shapes, dtype, max_lora_rank)
        return AdapterReader(ref, shapes, dtype, max_lora_rank, base)

    return open_adapter


def layout_of(header: PackedHeader) -> AdapterLayout[str]:
    """Where the matrices lie among the elements."""
    return lay_out(
        {m.path: ModuleShape(m.lora_rank, *header.base[m.path], has_bias=m.has_bias) for m in header.modules}
    )


def write_packed(
    path: str, adapter: AdapterWeights, base: Mapping[str, tuple[int, int]], dtype: torch.dtype, config_digest: str = ""
) -> None:
    """Write an adapter to a new file, complete or not at all. base: shapes of all linears of its base.

    Raises AdapterUnsupported for an adapter that such a file cannot hold, ConfigError if there is something at `path`.
    """
    gains = [name for name, module in adapter.modules.items() if module.row_gain is not None]
    if gains or adapter.vocabulary is not None:
        what = f"DoRA (such as {gains[0]!r})" if gains else "a trained embedding or head"
        raise AdapterUnsupported(f"it has {what}; a packed file holds LoRA on linear layers only. Serve its folder.")
    layout = lay_out({name: shape_of(module) for name, module in adapter.modules.items()})
    flat = torch.zeros(layout.num_elements, dtype=dtype)
    for name, module in adapter.modules.items():
        for part, matrix in zip(layout.places[name].parts, matrices(module), strict=True):
            _view(flat, part).copy_(matrix)
    modules = tuple(
        PackedModule(name, module.a.size(0), module.scale, module.bias is not None)
        for name, module in adapter.modules.items()
    )
    names = {torch_dtype: name for name, torch_dtype in DTYPES.items() if name in ITEM_BYTES}
    header = PackedHeader(names[dtype], layout.num_elements, modules, dict(base), config_digest)
    with _new_file(path) as file:
        os.write(file, header.encode())
        rest = memoryview(flat.view(torch.uint8).numpy())
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[int]:
    """A file to write to, which is at `path` once all went well; never in place of another."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        file, partial = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    except OSError as error:
        raise ConfigError(f"Nothing can be written to {folder}: {error.strerror}.") from None
    try:
        yield file
        os.fchmod(file, 0o644)
        _put_in_place(partial, path)
    except FileExistsError:
        raise ConfigError(f"{path} is there already; nothing is overwritten. Choose another name.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        os.close(file)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def _put_in_place(partial: str, path: str) -> None:
    """Give a complete file its name; raises FileExistsError if there is something of that name."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        os.rename(partial, path)


def _view(flat: Tensor, part: Part) -> Tensor:
    """[height, width] of the elements, rows `pitch` apart."""
    return flat.as_strided((part.height, part.width), (part.pitch, 1), flat.storage_offset() + part.start)
