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
from punica_core.model.attention_op import AttentionBatch, Lane
from punica_core.model.staging import PinnedRing
from punica_core.scheduler.plan import BASE_SLOT, RowPlan
from punica_core.scheduler.sequence import Sequence

Int32Array = npt.NDArray[np.int32]

MIN_ROWS = 2
"""Least T and n of a step: compiled code would be made anew for a size of 0 or 1."""

_ALIGNMENT = 4  # words: tables start on 16 bytes


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """A step's sizes, padding included. Sequences of one row come first: num_decode of them; then the prompts.

    num_prompt_rows: of the num_prompts prompts together. num_prompt_logits: rows of theirs that need logits.
    """

    num_decode: int
    num_prompt_rows: int = 0
    num_prompts: int = 0
    num_prompt_logits: int = 0

    @property
    def num_rows(self) -> int:
        """T."""
        return self.num_decode + self.num_prompt_rows

    @property
    def num_logits(self) -> int:
        """n: every row of a decode sequence needs logits."""
        return self.num_decode + self.num_prompt_logits

    def tables(self) -> dict[str, int]:
        """Words of each table but the last one, `kv_indices`, in order."""
        num_seqs = self.num_decode + self.num_prompts
        return {
            "token_ids": self.num_rows,
            "sources": self.num_rows,
            "positions": self.num_rows,
            "kv_slots": self.num_rows,
            "logit_rows": self.num_logits,
            "last_block_len": num_seqs,
            "decode_indptr": self.num_decode + 1,
            "prompt_indptr": self.num_prompts + 1,
            "kv_indptr": num_seqs + 1,
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

    def logit_slots(self) -> Int32Array:
        """int32 [n]: the slot of each of `logit_rows`; those that pad them have none."""
        slots = np.full(self.sizes.num_logits, BASE_SLOT, np.int32)
        for part in self.logits:
            slots[part.first : part.first + part.count] = part.row.slot
        return slots


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


def split_rows(rows: Rows[RowPlan]) -> tuple[list[RowPlan], list[RowPlan]]:
    """(rows of one token, longer ones), each in the order given."""
    decode = [row for row in rows if row.count == 1]
    return decode, [row for row in rows if row.count > 1] if len(decode) < len(rows) else []


def exact_sizes(decode: Rows[RowPlan], prompts: Rows[RowPlan]) -> BatchSizes:
    """The sizes of a step without padding, but for what the least T and n take."""
    num_prompt_rows = sum(row.count for row in prompts)
    num_decode = len(decode) if prompts else max(len(decode), MIN_ROWS)
    num_logits = max(sum(map(wanted_logits, prompts)), MIN_ROWS - num_decode)
    return BatchSizes(num_decode, num_prompt_rows, len(prompts), num_logits if prompts else 0)


def packer_bytes(largest: BatchSizes, max_blocks: int) -> int:
    """Device memory of a `StepPacker` with these limits."""
    return 4 * (largest.num_decode + largest.num_prompts + _total(largest.tables()) + max_blocks)


class StepPacker:
    """Packs steps for one device.

    largest: sizes that no step's exceed, in any of them. max_blocks: that all sequences of a step have together,
    padding included. padding_block: a block that no sequence owns, for the sequences that pad a step.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        block_size: int,
        largest: BatchSizes,
        max_blocks: int,
        padding_block: int,
    ) -> None:
        self._block_size = block_size
        self._padding_block = padding_block
        max_seqs = largest.num_decode + largest.num_prompts
        self._words = torch.zeros(packer_bytes(largest, max_blocks) // 4, dtype=torch.int32, device=device)
        self.last_tokens = self._words[:max_seqs]
        """int32 [max_seqs]: what the step launched last has sampled; its owner writes it."""
        self._step_words = self._words[max_seqs:]
        self._pinned = PinnedRing(4 * len(self._step_words), device)
        self._blocks = BlockTables(max_seqs)

    def pack(
        self,
        decode: Rows[RowPlan],
        prompts: Rows[RowPlan],
        sources: dict[int, int],
        sizes: BatchSizes,
        *,
        in_graph: bool,
    ) -> StepBatch:
        """Send a step's tables to the device without waiting for it.

        decode, prompts: as `split_rows` gives them. sources: by request_id, where the token of a `pending` row is among
        those sampled last. sizes: at least those that the rows have.
        """
        rows = [*decode, *prompts]
        self._blocks.keep_only(rows)
        staging = self._pinned.take().view(torch.int32)
        host = _Views(staging.numpy(), sizes)
        start = len(self.last_tokens) + host.places["token_ids"][0]
        host["sources"][:] = np.arange(start, start + sizes.num_rows, dtype=np.int32)  # what the host knows
        logits = self._fill_decode(host, decode, sources, sizes)
        logits += self._fill_prompts(host, prompts, sizes)
        used = host.kv_indices_start + self._fill_blocks(host, decode, prompts, sizes)
        return self._send(host, staging, rows, sizes, used, tuple(logits), in_graph)

    def pack_padding(self, num_rows: int) -> StepBatch:
        """A step of one prompt whose rows are all padding; nothing is written to the cache."""
        sizes = BatchSizes(0, num_rows, 1, MIN_ROWS)
        staging = self._pinned.take().view(torch.int32)
        host = _Views(staging.numpy(), sizes)
        start = len(self.last_tokens) + host.places["token_ids"][0]
        host["sources"][:] = np.arange(start, start + num_rows, dtype=np.int32)
        _fill_padding(host, 0, num_rows)
        blocks = -(-num_rows // self._block_size)
        host["logit_rows"][:] = 0
        host["last_block_len"][:] = (num_rows - 1) % self._block_size + 1
        host["decode_indptr"][:] = 0
        host["prompt_indptr"][:] = (0, num_rows)
        host["kv_indptr"][:] = (0, blocks)
        host.kv_indices(blocks)[:] = self._padding_block
        return self._send(host, staging, (), sizes, host.kv_indices_start + blocks, (), False)

    def _send(
        self,
        host: _Views,
        staging: Tensor,
        rows: Rows[RowPlan],
        sizes: BatchSizes,
        used: int,
        logits: tuple[LogitsRange, ...],
        in_graph: bool,
    ) -> StepBatch:
        words = self._step_words
        words[:used].copy_(staging[:used], non_blocking=True)
        self._pinned.sent()

        def view(name: str) -> Tensor:
            start, length = host.places[name]
            return words[start : start + length]

        def lane(first_row: int, num_rows: int, first: int, count: int, indptr: str) -> Lane | None:
            if count == 0:
                return None
            seqs = slice(first, first + count)
            bounds = slice(first, first + count + 1)
            return Lane(
                rows=slice(first_row, first_row + num_rows),
                host_qo_indptr=host[indptr].copy(),
                host_kv_indptr=host["kv_indptr"][bounds].copy(),
                qo_indptr=view(indptr),
                kv_indptr=view("kv_indptr")[bounds],
                last_block_len=view("last_block_len")[seqs],
            )

        d = sizes.num_decode
        places = _kv_rows(rows, d)
        return StepBatch(
            sizes=sizes,
            words=self._words,
            sources=view("sources"),
            positions=view("positions"),
            logit_rows=view("logit_rows"),
            attention=AttentionBatch(
                decode=lane(0, d, 0, d, "decode_indptr"),
                prompts=lane(d, sizes.num_prompt_rows, d, sizes.num_prompts, "prompt_indptr"),
                # A graph replays with more blocks than it was captured with, so it gets all that there is.
                kv_indices=words[host.kv_indices_start :] if in_graph else words[host.kv_indices_start : used],
                kv_slots=view("kv_slots"),
                in_graph=in_graph,
                kv_rows=places,
            ),
            row_slots=_row_slots(rows, places, sizes.num_rows),
            logits=logits,
        )

    def _fill_decode(
        self, host: _Views, rows: Rows[RowPlan], sources: dict[int, int], sizes: BatchSizes
    ) -> list[LogitsRange]:
        count, padded, size = len(rows), sizes.num_decode, self._block_size
        positions = np.array([row.start for row in rows], np.int32)
        host["token_ids"][:count] = [0 if row.pending else row.sequence.token_ids[row.start] for row in rows]
        for index, row in enumerate(rows):
            if row.pending:
                host["sources"][index] = sources[row.sequence.request_id]
        host["positions"][:count] = positions
        last = np.array([row.block_table[row.start // size] for row in rows], np.int32)
        host["kv_slots"][:count] = last * size + positions % size
        _fill_padding(host, count, padded)
        host["last_block_len"][:count] = positions % size + 1
        host["last_block_len"][count:padded] = 1
        host["logit_rows"][:padded] = np.arange(padded, dtype=np.int32)
        host["decode_indptr"][:] = np.arange(padded + 1, dtype=np.int32)
        return [LogitsRange(row, index, 1) for index, row in enumerate(rows)]

    def _fill_prompts(self, host: _Views, rows: Rows[RowPlan], sizes: BatchSizes) -> list[LogitsRange]:
        size, base = self._block_size, sizes.num_decode
        logits: list[LogitsRange] = []
        first, num_logits = base, base
        indptr = host["prompt_indptr"]
        indptr[0] = 0
        for index, row in enumerate(rows):
            end, to = row.start + row.count, first + row.count
            host["token_ids"][first:to] = row.sequence.token_ids[row.start : end]
            positions = np.arange(row.start, end, dtype=np.int32)
            host["positions"][first:to] = positions
            host["kv_slots"][first:to] = self._blocks.of(row)[positions // size] * size + positions % size
            host["last_block_len"][base + index] = (end - 1) % size + 1
            wanted = wanted_logits(row)
            if wanted:
                logits.append(LogitsRange(row, num_logits, wanted))
                host["logit_rows"][num_logits : num_logits + wanted] = np.arange(to - wanted, to)
                num_logits += wanted
            first = to
            indptr[index + 1] = to - base
        _fill_padding(host, first, sizes.num_rows)
        indptr[len(rows) + 1 :] = indptr[len(rows)]  # sequences without rows
        host["last_block_len"][base + len(rows) :] = 1
        host["logit_rows"][num_logits:] = 0
        return logits

    def _fill_blocks(self, host: _Views, decode: Rows[RowPlan], prompts: Rows[RowPlan], sizes: BatchSizes) -> int:
        """Fill kv_indptr and kv_indices; returns how many indices there are.

        Sequences that pad the decode rows have one block, since these rows attend to something; others have none.
        """
        size = self._block_size
        tables = [self._blocks.of(row)[: -(-(row.start + row.count) // size)] for row in decode]
        tables += [self._padding_table] * (sizes.num_decode - len(decode))
        tables += [self._blocks.of(row)[: -(-(row.start + row.count) // size)] for row in prompts]
        lengths = [*map(len, tables), *([0] * (sizes.num_prompts - len(prompts)))]
        indptr = host["kv_indptr"]
        indptr[0] = 0
        np.cumsum(lengths, out=indptr[1:])
        used = int(indptr[-1])
        if used:
            np.concatenate(tables, out=host.kv_indices(used))
        return used

    @property
    def _padding_table(self) -> Int32Array:
        return np.array([self._padding_block], np.int32)


def _fill_padding(host: _Views, first: int, end: int) -> None:
    """Rows that nobody reads and that write nothing to the cache."""
    for name, value in (("token_ids", 0), ("positions", 0), ("kv_slots", -1)):
        host[name][first:end] = value


def _row_slots(rows: Rows[RowPlan], places: Rows[KVRow], num_rows: int) -> Int32Array:
    """int32 [T], of rows that lie at `places`; padding has no adapter."""
    slots = np.full(num_rows, BASE_SLOT, np.int32)
    for row, place in zip(rows, places, strict=True):
        slots[place.first : place.first + place.count] = row.slot
    return slots


def _kv_rows(rows: Rows[RowPlan], num_decode: int) -> tuple[KVRow, ...]:
    """Where the rows lie: those of one token first, which padding may follow, then the longer ones."""
    found = []
    at = 0
    for row in rows:
        if row.count > 1:
            at = max(at, num_decode)
        found.append(KVRow(at, row.start, row.count, row.block_table))
        at += row.count
    return tuple(found)


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
