"""From a step's plan to the tables that a GPU step reads: packed into one page-locked buffer, sent in one copy.

The place of every table is a function of the step's padded sizes alone, so that what a CUDA graph has captured for them
finds the tables of every later step of these sizes at the same addresses.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from punica_core.engine.step_inputs import LogitsRange, wanted_logits
from punica_core.model.attention import KVRow
from punica_core.model.attention_op import AttentionBatch
from punica_core.model.staging import PinnedRing
from punica_core.scheduler.plan import BASE_SLOT, RowPlan
from punica_core.scheduler.sequence import Sequence

Int32Array = npt.NDArray[np.int32]

MIN_ROWS = 2
"""Least T and n of a step: compiled code would be made anew for a size of 0 or 1."""

_ALIGNMENT = 4  # words: tables start on 16 bytes


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """num_rows: T. num_seqs: B. num_logits: n, of rows that need logits and of those that pad them."""

    num_rows: int
    num_seqs: int
    num_logits: int

    def tables(self) -> dict[str, int]:
        """Words of each table but the last one, `kv_indices`, in order."""
        return {
            "token_ids": self.num_rows,
            "sources": self.num_rows,
            "positions": self.num_rows,
            "kv_slots": self.num_rows,
            "logit_rows": self.num_logits,
            "last_block_len": self.num_seqs,
            "qo_indptr": self.num_seqs + 1,
            "kv_indptr": self.num_seqs + 1,
        }


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step on the device. sources, positions: int32 [T]; logit_rows: int32 [n].

    A row's token is words[source]: one that the host knows, or one that was sampled last. row_slots: int32 [T] on the
    host. logits: whose the logits are, in order.
    """

    sizes: BatchSizes
    words: Tensor
    sources: Tensor
    positions: Tensor
    logit_rows: Tensor
    attention: AttentionBatch
    row_slots: Int32Array
    logits: tuple[LogitsRange, ...]


@dataclass(slots=True)
class _Table:
    """blocks: int32, of which the first `known` are those of the sequence since its last admission."""

    sequence: Sequence
    admissions: int
    blocks: Int32Array
    known: int


class BlockTables:
    """The block tables of running sequences as arrays: a table only grows while its sequence runs."""

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._tables: dict[int, _Table] = {}

    def of(self, row: RowPlan) -> Int32Array:
        """int32 [blocks] of a row: a view, to be read before the next call for its sequence."""
        sequence, blocks = row.sequence, row.block_table
        table = self._tables.get(sequence.request_id)
        if table is None or table.sequence is not sequence or table.admissions != sequence.admissions:
            # A request's id may be used again, and a preempted sequence comes back with other blocks.
            table = self._tables[sequence.request_id] = _Table(sequence, sequence.admissions, _NO_BLOCKS, 0)
        count = len(blocks)
        if count > len(table.blocks):
            grown = np.empty(max(2 * count, 16), np.int32)
            grown[: table.known] = table.blocks[: table.known]
            table.blocks = grown
        if count > table.known:
            table.blocks[table.known : count] = blocks[table.known :]
            table.known = count
        return table.blocks[:count]

    def keep_only(self, rows: Rows[RowPlan]) -> None:
        """Forget sequences that have ended, once many are known; `rows` are those of the step."""
        if len(self._tables) > 4 * self._max_sequences:
            ids = {row.sequence.request_id for row in rows}
            self._tables = {key: value for key, value in self._tables.items() if key in ids}


_NO_BLOCKS: Int32Array = np.zeros(0, np.int32)


class StepPacker:
    """Packs steps for one device.

    max_rows, max_seqs: of the largest step. max_blocks: that all sequences of a step have together, padding included.
    padding_block: a block that no sequence owns, for the sequences that pad a step.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        block_size: int,
        max_rows: int,
        max_seqs: int,
        max_blocks: int,
        padding_block: int,
    ) -> None:
        self._block_size = block_size
        self._padding_block = padding_block
        words = _total(BatchSizes(max_rows, max_seqs, max_rows).tables()) + max_blocks
        self._words = torch.zeros(max_seqs + words, dtype=torch.int32, device=device)
        self.last_tokens = self._words[:max_seqs]
        """int32 [max_seqs]: what the step launched last has sampled; its owner writes it."""
        self._step_words = self._words[max_seqs:]
        self._pinned = PinnedRing(4 * words, device)
        self._blocks = BlockTables(max_seqs)

    def pack(self, rows: Rows[RowPlan], sources: dict[int, int], padded_to: int | None, *, in_graph: bool) -> StepBatch:
        """Send a step's tables to the device without waiting for it.

        sources: by request_id, where the token of a `pending` row is among those sampled last. padded_to: B of a decode
        step, to which sequences are added; None for steps that are not padded.
        """
        self._blocks.keep_only(rows)
        sizes = _sizes(rows, padded_to)
        staging = self._pinned.take().view(torch.int32)
        host = _Views(staging.numpy(), sizes)
        if padded_to is None:
            logits = self._fill_mixed(host, rows, sources)
        else:
            logits = self._fill_decode(host, rows, sources, padded_to)
        used = host.kv_indices_start + self._fill_blocks(host, rows, sizes.num_seqs)
        self._step_words[:used].copy_(staging[:used], non_blocking=True)
        self._pinned.sent()
        return self._batch(host, rows, sizes, used, logits, in_graph)

    def pack_padding(self, num_rows: int) -> StepBatch:
        """A step of one sequence whose rows are all padding; nothing is written to the cache."""
        sizes = BatchSizes(num_rows, 1, MIN_ROWS)
        staging = self._pinned.take().view(torch.int32)
        host = _Views(staging.numpy(), sizes)
        self._point_at_own(host, num_rows)
        for name, value in (("token_ids", 0), ("positions", 0), ("kv_slots", -1), ("logit_rows", 0)):
            host[name][:] = value
        host["last_block_len"][:] = (num_rows - 1) % self._block_size + 1
        host["qo_indptr"][:] = (0, num_rows)
        blocks = -(-num_rows // self._block_size)
        host["kv_indptr"][:] = (0, blocks)
        host.kv_indices(blocks)[:] = self._padding_block
        used = host.kv_indices_start + blocks
        self._step_words[:used].copy_(staging[:used], non_blocking=True)
        self._pinned.sent()
        return self._batch(host, (), sizes, used, (), False)

    def _batch(
        self,
        host: _Views,
        rows: Rows[RowPlan],
        sizes: BatchSizes,
        used: int,
        logits: tuple[LogitsRange, ...],
        in_graph: bool,
    ) -> StepBatch:
        words = self._step_words

        def view(name: str) -> Tensor:
            start, length = host.places[name]
            return words[start : start + length]

        slots = np.full(sizes.num_rows, BASE_SLOT, np.int32)
        counts = [row.count for row in rows]
        filled = sum(counts)
        slots[:filled] = np.repeat(np.array([row.slot for row in rows], np.int32), counts)
        firsts = np.cumsum([0, *counts]).tolist()
        return StepBatch(
            sizes=sizes,
            words=self._words,
            sources=view("sources"),
            positions=view("positions"),
            logit_rows=view("logit_rows"),
            attention=AttentionBatch(
                host_qo_indptr=host["qo_indptr"].copy(),
                host_kv_indptr=host["kv_indptr"].copy(),
                qo_indptr=view("qo_indptr"),
                kv_indptr=view("kv_indptr"),
                # A graph replays with more blocks than it was captured with, so it gets all that there is.
                kv_indices=words[host.kv_indices_start :] if in_graph else words[host.kv_indices_start : used],
                last_block_len=view("last_block_len"),
                kv_slots=view("kv_slots"),
                in_graph=in_graph,
                kv_rows=tuple(
                    KVRow(first, row.start, row.count, row.block_table)
                    for row, first in zip(rows, firsts, strict=False)
                ),
            ),
            row_slots=slots,
            logits=logits,
        )

    def _point_at_own(self, host: _Views, num_rows: int) -> None:
        """Have every row take its token from the host."""
        start = len(self.last_tokens) + host.places["token_ids"][0]
        host["sources"][:] = np.arange(start, start + num_rows, dtype=np.int32)

    def _fill_decode(
        self, host: _Views, rows: Rows[RowPlan], sources: dict[int, int], padded_to: int
    ) -> tuple[LogitsRange, ...]:
        count, size = len(rows), self._block_size
        positions = np.array([row.start for row in rows], np.int32)
        host["token_ids"][:count] = [0 if row.pending else row.sequence.token_ids[row.start] for row in rows]
        self._point_at_own(host, padded_to)
        for index, row in enumerate(rows):
            if row.pending:
                host["sources"][index] = sources[row.sequence.request_id]
        host["positions"][:count] = positions
        last = np.array([row.block_table[row.start // size] for row in rows], np.int32)
        host["kv_slots"][:count] = last * size + positions % size
        host["last_block_len"][:count] = positions % size + 1
        for name, padding in (("token_ids", 0), ("positions", 0), ("kv_slots", -1)):
            host[name][count:] = padding
        host["last_block_len"][count:] = 1
        host["logit_rows"][:] = np.arange(padded_to, dtype=np.int32)
        host["qo_indptr"][:] = np.arange(padded_to + 1, dtype=np.int32)
        return tuple(LogitsRange(row, index, 1) for index, row in enumerate(rows))

    def _fill_mixed(self, host: _Views, rows: Rows[RowPlan], sources: dict[int, int]) -> tuple[LogitsRange, ...]:
        size = self._block_size
        logits: list[LogitsRange] = []
        first = num_logits = 0
        self._point_at_own(host, host.places["sources"][1])
        host["qo_indptr"][0] = 0
        for index, row in enumerate(rows):
            end, to = row.start + row.count, first + row.count
            host["token_ids"][first:to] = 0 if row.pending else row.sequence.token_ids[row.start : end]
            if row.pending:
                host["sources"][first] = sources[row.sequence.request_id]
            positions = np.arange(row.start, end, dtype=np.int32)
            host["positions"][first:to] = positions
            host["kv_slots"][first:to] = self._blocks.of(row)[positions // size] * size + positions % size
            host["last_block_len"][index] = (end - 1) % size + 1
            wanted = wanted_logits(row)
            if wanted:
                logits.append(LogitsRange(row, num_logits, wanted))
                host["logit_rows"][num_logits : num_logits + wanted] = np.arange(to - wanted, to)
                num_logits += wanted
            first = to
            host["qo_indptr"][index + 1] = to
        host["logit_rows"][num_logits:] = 0
        return tuple(logits)

    def _fill_blocks(self, host: _Views, rows: Rows[RowPlan], num_seqs: int) -> int:
        """Fill kv_indptr and kv_indices; returns how many indices there are."""
        size = self._block_size
        tables = [self._blocks.of(row)[: -(-(row.start + row.count) // size)] for row in rows]
        padding = num_seqs - len(rows)
        indptr = host["kv_indptr"]
        indptr[0] = 0
        np.cumsum([*map(len, tables), *([1] * padding)], out=indptr[1:])
        used = int(indptr[len(rows)])
        indices = host.kv_indices(used + padding)
        if tables:
            np.concatenate(tables, out=indices[:used])
        indices[used:] = self._padding_block
        return used + padding


class _Views:
    """The tables of one step in a buffer of int32 words."""

    def __init__(self, words: Int32Array, sizes: BatchSizes) -> None:
        self._words = words
        self.places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, length in sizes.tables().items():
            self.places[name] = (at, length)
            at += -(-length // _ALIGNMENT) * _ALIGNMENT
        self.kv_indices_start = at

    def __getitem__(self, name: str) -> Int32Array:
        start, length = self.places[name]
        return self._words[start : start + length]

    def kv_indices(self, count: int) -> Int32Array:
        return self._words[self.kv_indices_start : self.kv_indices_start + count]


def _total(tables: dict[str, int]) -> int:
    return sum(-(-length // _ALIGNMENT) * _ALIGNMENT for length in tables.values())


def _sizes(rows: Rows[RowPlan], padded_to: int | None) -> BatchSizes:
    if padded_to is not None:
        return BatchSizes(padded_to, padded_to, padded_to)
    return BatchSizes(sum(row.count for row in rows), len(rows), max(sum(map(wanted_logits, rows)), MIN_ROWS))
