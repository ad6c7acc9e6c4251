"""Reads safetensors checkpoints at disk speed: several threads, large reads, straight into the tensors that stay.

Nothing is memory-mapped: a page fault reads little at a time, and a file that shrinks under a map kills the process.
For a GPU each thread reads into page-locked buffers of its own and copies from there on a stream of its own, so that
disk and bus work at once; a cast happens on the device.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import Tensor

from punica_core.adapters.files import LFS_POINTER, lfs_advice
from punica_core.errors import ConfigError

CHUNK_BYTES = 8 * 1024 * 1024
"""Bytes of one read. A multiple of every element's size."""

NUM_READERS = 8
"""Threads that read. On a GPU each holds two page-locked buffers of CHUNK_BYTES."""

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100 * 1024 * 1024  # the format's own bound
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: nbytes, row-major, from byte `start` of `file`. dtype None: one that torch cannot hold."""

    name: str
    file: Path
    dtype: torch.dtype | None
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_headers(model_dir: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder by name: of model.safetensors, else of the files that its index names.

    Raises ConfigError for a folder that has neither, and for files that are damaged, cut off or named elsewhere.
    """
    if (model_dir / WEIGHTS_NAME).is_file():
        return _read_header(model_dir / WEIGHTS_NAME)
    if not (model_dir / INDEX_NAME).is_file():
        raise ConfigError(f"{model_dir} has neither {WEIGHTS_NAME} nor {INDEX_NAME}.", param="model")
    file_of = _read_index(model_dir / INDEX_NAME)
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(file_of.values())):
        stored |= {name: entry for name, entry in _read_header(model_dir / file).items() if file_of.get(name) == file}
    lacking = sorted(file_of.keys() - stored.keys())
    if lacking:
        raise ConfigError(
            f"{model_dir / INDEX_NAME} names {len(lacking)} tensors that are not in their files, such as "
            f"{', '.join(lacking[:3])}.",
            param="model",
        )
    return stored


def read_tensors(
    targets: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], on_progress: Callable[[float], None]
) -> None:
    """Fill each of `targets` (contiguous, all on one device) with the stored tensor of its name, cast to its dtype.

    on_progress: called on this thread with the share of the bytes that has arrived.
    Raises ConfigError if a file is cut off or is written to meanwhile.
    """
    pieces = sorted(_pieces(targets, stored), key=lambda piece: (piece.stored.file, piece.start))
    if not pieces:
        return
    device = next(iter(targets.values())).device
    total = sum(piece.nbytes for piece in pieces)
    done = 0
    num_readers = min(NUM_READERS, len(pieces))
    with _Files(piece.stored.file for piece in pieces) as files:
        readers: SimpleQueue[_Reader] = SimpleQueue()
        for _ in range(num_readers):
            readers.put(_DeviceReader(files, device) if device.type == "cuda" else _Reader(files))
        with ThreadPoolExecutor(num_readers, thread_name_prefix="weights") as pool:
            futures = [pool.submit(_read_piece, readers, piece) for piece in pieces]
            try:
                for future in as_completed(futures):
                    done += future.result()
                    on_progress(done / total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        while not readers.empty():
            readers.get().finish()
        files.check_unchanged()


@dataclass(frozen=True, slots=True)
class _Piece:
    """nbytes of a stored tensor from byte `start` of its file, and the elements [1-D] that they become."""

    stored: StoredTensor
    dtype: torch.dtype
    start: int
    nbytes: int
    target: Tensor


def _pieces(targets: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> Iterator[_Piece]:
    for name, target in targets.items():
        entry = stored[name]
        if entry.dtype is None:
            raise ConfigError(
                f"{entry.file} holds {name} as {entry.dtype_name}, which is not served; use a checkpoint in float32, "
                "bfloat16 or float16.",
                param="model",
            )
        assert tuple(target.shape) == entry.shape
        assert target.is_contiguous()
        flat, item = target.detach().view(-1), entry.dtype.itemsize
        for offset in range(0, entry.nbytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, entry.nbytes - offset)
            part = flat[offset // item : (offset + nbytes) // item]
            yield _Piece(entry, entry.dtype, entry.start + offset, nbytes, part)


def _read_piece(readers: SimpleQueue[_Reader], piece: _Piece) -> int:
    reader = readers.get()
    try:
        reader.read(piece)
    finally:
        readers.put(reader)
    return piece.nbytes


class _Files:
    """The files of one checkpoint, open for reading; notices when one is written to."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._open: dict[Path, tuple[int, tuple[int, ...]]] = {}
        try:
            for path in dict.fromkeys(paths):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._open[path] = (descriptor, _state(descriptor))
        except OSError as error:
            self.close()
            raise ConfigError(f"{path} cannot be opened: {error.strerror}.", param="model") from error

    def read_into(self, buffer: memoryview, path: Path, start: int) -> None:
        """Fill `buffer` (bytes) from byte `start` of a file; any thread."""
        descriptor = self._open[path][0]
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(descriptor, [buffer[done:]], start + done)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error.strerror}.", param="model") from error
            if count == 0:
                raise ConfigError(f"{path} is cut off at byte {start + done}. Is it still being copied?", param="model")
            done += count

    def check_unchanged(self) -> None:
        for path, (descriptor, state) in self._open.items():
            if _state(descriptor) != state:
                raise ConfigError(f"{path} was written to while it was read; start again.", param="model")

    def close(self) -> None:
        for descriptor, _ in self._open.values():
            os.close(descriptor)

    def __enter__(self) -> _Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _state(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class _Reader:
    """Reads pieces into host memory. Used by one thread at a time."""

    def __init__(self, files: _Files) -> None:
        self._files = files

    def read(self, piece: _Piece) -> None:
        if piece.dtype == piece.target.dtype:
            self._fill(piece.target, piece)
            return
        raw = torch.empty(piece.target.numel(), dtype=piece.dtype)
        self._fill(raw, piece)
        piece.target.copy_(raw)

    def finish(self) -> None:
        """Wait until everything read has arrived."""

    def _fill(self, room: Tensor, piece: _Piece) -> None:
        self._files.read_into(memoryview(room.view(torch.uint8).numpy()), piece.stored.file, piece.start)


class _DeviceReader(_Reader):
    """Reads pieces into a GPU's memory by way of two page-locked buffers: one is filled while the other is copied."""

    def __init__(self, files: _Files, device: torch.device) -> None:
        super().__init__(files)
        self._stream = torch.cuda.Stream(device)
        # The targets' memory may have been another tensor's, whose last kernels are on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event(blocking=True) for _ in range(2)]
        self._next = 0

    def read(self, piece: _Piece) -> None:
        index = self._next
        self._next = 1 - index
        self._copied[index].synchronize()
        staged = self._buffers[index][: piece.nbytes].view(piece.dtype)
        self._fill(staged, piece)
        with torch.cuda.stream(self._stream):
            if piece.dtype == piece.target.dtype:
                piece.target.copy_(staged, non_blocking=True)
            else:
                piece.target.copy_(staged.to(piece.target.device, non_blocking=True))
            self._copied[index].record(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()


def _read_index(path: Path) -> dict[str, str]:
    """File by tensor name, out of a sharded checkpoint's index."""
    try:
        file_of = json.loads(path.read_bytes())["weight_map"]
        names = {str(name): str(file) for name, file in file_of.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not the index of a checkpoint: {error!r}.", param="model") from error
    for file in set(names.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{path} names {file!r}; only *.safetensors files beside it are read.", param="model")
    return names


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(len(LFS_POINTER))
            if prefix == LFS_POINTER:
                raise ConfigError(lfs_advice(str(path)), param="model")
            length = int.from_bytes(prefix[:8], "little")
            if 8 + length > size or length > _MAX_HEADER_BYTES:
                raise _damaged(path, f"its header claims {length} bytes, the file has {size}")
            file.seek(8)
            table = json.loads(file.read(length))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", param="model") from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(table, dict):
        raise _damaged(path, "its header is no object")
    table.pop("__metadata__", None)
    return {name: _entry(path, name, value, 8 + length, size) for name, value in table.items()}


def _entry(path: Path, name: str, value: Any, data_start: int, size: int) -> StoredTensor:
    try:
        dtype_name, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        start, nbytes = data_start + int(begin), int(end) - int(begin)
        dtype = _DTYPES.get(dtype_name)
        count = math.prod(int(width) for width in shape)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"the entry of {name} lacks dtype, shape or data_offsets") from error
    if begin < 0 or nbytes < 0 or any(width < 0 for width in shape):
        raise _damaged(path, f"the entry of {name} has negative numbers")
    if dtype is not None and nbytes != count * dtype.itemsize:
        raise _damaged(path, f"{name} of shape {list(shape)} as {dtype_name} does not have {nbytes} bytes")
    if start + nbytes > size:
        raise ConfigError(
            f"{path} is cut off: {name} ends at byte {start + nbytes}, the file at {size}. Is it still being copied?",
            param="model",
        )
    return StoredTensor(name, path, dtype, str(dtype_name), shape, start, nbytes)


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is no sound safetensors file: {why}.", param="model")
