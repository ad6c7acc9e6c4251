"""Copies adapters from host memory into the arena, beside the steps that run: on a stream of its own.

    host weights ──numpy──▶ page-locked buffer, in the arena's layout ──one copy a buffer and run──▶ arena
    packed file ──read──▶ landing memory, in the arena's layout ────────────────┘  ──then its records──▶ tables

Belongs to one thread, which waits; the engine's thread never does. Two buffers take turns: one is filled while the
other is sent. An adapter that fits one buffer and one range of the arena is a single copy. On a CPU the same without
streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from punica_core.lora.arena_layout import AdapterLayout, Part, Run, pieces, record_words
from punica_core.lora.tables import AdapterTables, Arena, ModuleWeights, matrices
from punica_core.ops.layout import RECORD_WORDS

BUFFER_BYTES = 32 * 1024 * 1024
"""Page-locked memory of each of the two buffers. A row of any matrix must fit."""

_WORDS = {2: torch.int16, 4: torch.int32}
"""What numpy, which knows no bfloat16, takes elements of so many bytes for."""


class ArenaWriter:
    """Writes into one arena and its tables."""

    def __init__(self, arena: Arena, tables: AdapterTables, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._arena = arena.buffer
        self._tables = tables
        self._dtype = arena.buffer.dtype
        device = arena.buffer.device
        pinned = device.type == "cuda"
        capacity = buffer_bytes // self._dtype.itemsize
        self._buffers = [torch.empty(capacity, dtype=self._dtype, pin_memory=pinned) for _ in range(2)]
        num_modules = tables.records.size(0)
        self._host_rows = torch.zeros(num_modules, RECORD_WORDS, dtype=torch.int64, pin_memory=pinned)
        self._device_rows = torch.zeros_like(self._host_rows, device=device)
        self._stream: torch.cuda.Stream | None = None
        self._sent: list[torch.cuda.Event | None] = [None, None]
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # which clears arena and tables
            self._sent = [torch.cuda.Event(blocking=True) for _ in range(2)]

    def write(
        self,
        slot: int,
        modules: Mapping[int, ModuleWeights],
        layout: AdapterLayout[int],
        runs: Sequence[Run],
        check: Callable[[], None] = lambda: None,
        laid_out: Tensor | None = None,
        *,
        landed: bool = False,
    ) -> None:
        """Copy an adapter to `runs` and then point `slot` at it; returns when the device has both.

        No step that is queued may read the slot or the runs. `check` is called before each buffer is sent; what it
        raises ends the write, and leaves the slot as it was. laid_out: a buffer, 1-D, of which the matrices may be
        views; if they lie in it as in the layout, it is copied as a whole. landed: it is landing memory, and is copied
        from there without a buffer between. (Its owner may have it back when `wait` has returned.)
        """
        usable = laid_out is not None and laid_out.dtype == self._dtype and _is_laid_out(modules, layout, laid_out)
        whole = laid_out if usable else None
        if whole is not None and landed:
            self._send_landed(whole, runs, check)
        else:
            self._send_by_buffers(modules, layout, runs, check, whole)
        rows = self._host_rows.numpy()
        rows.fill(0)
        for index, module in modules.items():
            rows[index] = record_words(layout.places[index], module.scale, runs)
        with self._on_stream():
            self._device_rows.copy_(self._host_rows, non_blocking=True)
            self._tables.records[:, slot].copy_(self._device_rows)
        self.wait()

    def _send_landed(self, elements: Tensor, runs: Sequence[Run], check: Callable[[], None]) -> None:
        step = self._buffers[0].numel()
        for begin in range(0, elements.numel(), step):
            check()
            self._copy(elements[begin : begin + step], begin, runs)

    def _send_by_buffers(
        self,
        modules: Mapping[int, ModuleWeights],
        layout: AdapterLayout[int],
        runs: Sequence[Run],
        check: Callable[[], None],
        whole: Tensor | None,
    ) -> None:
        send = _Sender(self, runs, check)
        if whole is not None:
            send.put_all(_as_words(whole, self._dtype))
        else:
            for index, module in modules.items():
                for part, matrix in zip(layout.places[index].parts, matrices(module), strict=True):
                    send.put(part, _as_words(matrix, self._dtype))
        send.flush()

    def wait(self) -> None:
        """Until all that was sent has arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def fillable(self, index: int) -> npt.NDArray[np.generic]:
        """Buffer `index` as words, once what was sent from it last has left."""
        event = self._sent[index]
        if event is not None:
            event.synchronize()
        words: npt.NDArray[np.generic] = self._buffers[index].view(_WORDS[self._dtype.itemsize]).numpy()
        return words

    def send(self, index: int, begin: int, end: int, runs: Sequence[Run]) -> None:
        """Copy elements [begin, end) of a layout, which lie at the start of buffer `index`, to their runs."""
        self._copy(self._buffers[index][: end - begin], begin, runs)
        event = self._sent[index]
        if event is not None:
            event.record(self._stream)

    def _copy(self, elements: Tensor, begin: int, runs: Sequence[Run]) -> None:
        """Copy elements of a layout, of which the first is its element `begin`, to their runs; does not wait."""
        with self._on_stream():
            for first, last, address in pieces(runs, begin, begin + elements.numel()):
                room = self._arena[address : address + last - first]
                room.copy_(elements[first - begin : last - begin], non_blocking=True)

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context


class _Sender:
    """Fills the writer's buffers with one adapter, from the layout's start to its end."""

    def __init__(self, writer: ArenaWriter, runs: Sequence[Run], check: Callable[[], None]) -> None:
        self._writer = writer
        self._runs = runs
        self._check = check
        self._index = 0
        self._buffer = writer.fillable(0)
        self._begin = 0
        self._filled = 0

    def put_all(self, words: npt.NDArray[np.generic]) -> None:
        """Append the elements of a whole layout."""
        self._put_flat(words)

    def put(self, part: Part, words: npt.NDArray[np.generic]) -> None:
        """Append a matrix [height, width], whose place is `part`, and its padding."""
        assert part.start == self._begin + self._filled
        if part.pitch == part.width:
            self._put_flat(words.reshape(-1))
        else:
            self._put_rows(words, part.pitch)
        self._put_flat(np.zeros(part.size - part.height * part.pitch, words.dtype))

    def flush(self) -> None:
        """Send what is there and go on with the other buffer."""
        if self._filled == 0:
            return
        self._check()
        self._writer.send(self._index, self._begin, self._begin + self._filled, self._runs)
        self._begin += self._filled
        self._filled = 0
        self._index = 1 - self._index
        self._buffer = self._writer.fillable(self._index)

    def _put_flat(self, words: npt.NDArray[np.generic]) -> None:
        while len(words):
            room = self._room(1)
            count = min(len(words), len(room))
            room[:count] = words[:count]
            self._filled += count
            words = words[count:]

    def _put_rows(self, words: npt.NDArray[np.generic], pitch: int) -> None:
        width = words.shape[1]
        while len(words):
            room = self._room(pitch)
            count = min(len(words), len(room) // pitch)
            rows = room[: count * pitch].reshape(count, pitch)
            rows[:, :width] = words[:count]
            rows[:, width:] = 0
            self._filled += count * pitch
            words = words[count:]

    def _room(self, least: int) -> npt.NDArray[np.generic]:
        """What is free of the buffer, at least so many elements."""
        if len(self._buffer) - self._filled < least:
            self.flush()
        assert len(self._buffer) - self._filled >= least, "a row is longer than the buffer"
        return self._buffer[self._filled :]


def _is_laid_out(modules: Mapping[int, ModuleWeights], layout: AdapterLayout[int], buffer: Tensor) -> bool:
    """Whether `buffer` is all of the layout, with each matrix at its place."""
    return buffer.numel() == layout.num_elements and all(
        matrix.data_ptr() == buffer.data_ptr() + part.start * buffer.itemsize
        and (matrix.stride() == (part.pitch, 1) or part.height == 1)
        for index, module in modules.items()
        for part, matrix in zip(layout.places[index].parts, matrices(module), strict=True)
    )


def _as_words(matrix: Tensor, dtype: torch.dtype) -> npt.NDArray[np.generic]:
    words: npt.NDArray[np.generic] = matrix.detach().to(dtype).view(_WORDS[dtype.itemsize]).numpy()
    return words


def device_bytes(num_modules: int, num_slots: int) -> int:
    """Bytes that tables and writer take on the device besides the arena."""
    return num_modules * (num_slots + 1) * RECORD_WORDS * 8
