"""What a step's adapters make of embedding and head where adapters lie in the arena.

The twin of `vocabulary`, equal to it. LoRA and saved heads go through the ops, all adapters at once; saved embeddings
and single rows are few, and are taken segment by segment from views of the arena. Nothing waits for the device, but the
host must know the segments, so these steps are not captured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from punica_core import ops
from punica_core.lora.arena_layout import AdapterLayout, Run, address_of
from punica_core.lora.linear import linear
from punica_core.lora.segments import Int32Array, SegmentPlan
from punica_core.lora.table_modules import TableModules, VocabularyRecord
from punica_core.lora.table_step import TableLoRA
from punica_core.lora.tables import AdapterTables, Arena
from punica_core.lora.weights import TrainedRows
from punica_core.ops.layout import scratch_elements


@dataclass(frozen=True, slots=True)
class SlotVocabulary:
    """What the adapter in one slot changes of embedding and head.

    records: those that its slot has. embedding_matrix [V, H], embedding_rows, head_rows: views of the arena.
    """

    records: frozenset[VocabularyRecord]
    embedding_matrix: Tensor | None
    embedding_rows: TrainedRows | None
    head_rows: TrainedRows | None


def slot_vocabulary(
    modules: TableModules, layout: AdapterLayout[int], runs: Sequence[Run], arena: Arena
) -> SlotVocabulary | None:
    """Of an adapter whose layout lies in `runs` of the arena; None if it leaves embedding and head alone."""
    records = frozenset(record for record in VocabularyRecord if modules.index(record) in layout.places)
    if not records:
        return None

    def matrix(record: VocabularyRecord) -> Tensor:
        part = layout.places[modules.index(record)].b
        start = address_of(part, runs)
        whole = arena.buffer[start : start + part.height * part.pitch].view(part.height, part.pitch)
        return whole[:, : part.width]

    def rows(values: VocabularyRecord, ids: VocabularyRecord) -> TrainedRows | None:
        return TrainedRows(matrix(ids).view(torch.int64)[0], matrix(values)) if values in records else None

    return SlotVocabulary(
        records,
        matrix(VocabularyRecord.EMBEDDING_MATRIX) if VocabularyRecord.EMBEDDING_MATRIX in records else None,
        rows(VocabularyRecord.EMBEDDING_ROWS, VocabularyRecord.EMBEDDING_ROW_IDS),
        rows(VocabularyRecord.HEAD_ROWS, VocabularyRecord.HEAD_ROW_IDS),
    )


@dataclass(frozen=True, slots=True)
class _Segments:
    """Rows of a step whose adapters change embedding or head. records: those that any of them has."""

    parts: tuple[tuple[slice, SlotVocabulary], ...]
    records: frozenset[VocabularyRecord]


_NOTHING = _Segments((), frozenset())


class VocabularyStep:
    """Implements `StepEmbedding`, and `TableStep` for the head, for one model and all adapters in the tables.

    lora: has the plan of the step's rows, and was begun with them. slots: those whose adapters change embedding or
    head; its owner changes it. max_rows: logits of the largest step. max_segments: runs of equal slots among them,
    those of the base model counted.
    """

    def __init__(
        self,
        lora: TableLoRA,
        tables: AdapterTables,
        arena: Arena,
        modules: TableModules,
        slots: Mapping[int, SlotVocabulary],
        *,
        max_rows: int,
        max_segments: int,
    ) -> None:
        self._arena = arena.buffer
        self._slots = slots
        self._slot_rank = tables.slot_rank
        self._max_rank = lora.max_rank
        self._row_plan = lora.plan
        self._logit_plan = SegmentPlan(
            max_rows, max_rank=lora.max_rank, device=arena.buffer.device, max_segments=max_segments
        )
        self._embedding_table = tables.group(modules.index(VocabularyRecord.EMBEDDING), 1)
        self._matrix_table = tables.group(modules.index(VocabularyRecord.HEAD_MATRIX), 1)
        self._rows = self._logits = _NOTHING

    def concerns(self, slots: Iterable[int]) -> bool:
        """Whether an adapter in any of these slots changes embedding or head."""
        return bool(self._slots) and any(slot in self._slots for slot in slots)

    def begin(self, row_slots: Int32Array, logit_slots: Int32Array) -> None:
        """Describe the next step: the slots of its rows, int32 [T], and of the rows that need logits, int32 [n]."""
        self._rows = self._segments(row_slots)
        self._logits = self._segments(logit_slots)
        self._logit_plan.set_rows(logit_slots, self._slot_rank)

    def embed(self, token_ids: Tensor, y: Tensor) -> None:
        """See `StepEmbedding.embed`."""
        for rows, vocabulary in self._rows.parts:
            if vocabulary.embedding_matrix is not None:
                torch.index_select(vocabulary.embedding_matrix, 0, token_ids[rows], out=y[rows])
        if VocabularyRecord.EMBEDDING in self._rows.records:
            v = torch.empty(y.size(0) * self._max_rank, dtype=torch.float32, device=y.device)
            tables = (self._arena, self._embedding_table, self._row_plan)
            ops.lora_embed(v, token_ids, *tables, self._max_rank)
            ops.lora_expand(y, v, *tables, [y.size(1)], 1, self._max_rank, summed=True)
        for rows, vocabulary in self._rows.parts:
            if vocabulary.embedding_rows is not None:
                _put_rows(token_ids[rows], y[rows], vocabulary.embedding_rows)

    def product(
        self, table: Tensor, out_features: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """See `TableStep.product`; rows whose adapter has a head of its own get that one's product."""
        y = linear(x, weight, bias)
        plan = self._logit_plan.plan
        if VocabularyRecord.HEAD_MATRIX in self._logits.records:
            ops.segment_gemm(y, x, self._arena, self._matrix_table, plan)
        for rows, vocabulary in self._logits.parts:
            trained = vocabulary.head_rows
            if trained is not None:
                y[rows].index_copy_(1, trained.token_ids, x[rows] @ trained.rows.t())
        if VocabularyRecord.HEAD in self._logits.records:
            elements = scratch_elements(x.size(0), 1, self._max_rank)
            v = torch.empty(elements, dtype=torch.float32, device=x.device)
            ops.lora_apply(y, x, v, self._arena, table, plan, out_features, self._max_rank)
        return y

    def _segments(self, slots: Int32Array) -> _Segments:
        bounds = [0, *(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist(), len(slots)]
        runs = ((slice(first, end), int(slots[first])) for first, end in itertools.pairwise(bounds))
        parts = tuple((rows, self._slots[slot]) for rows, slot in runs if slot in self._slots)
        return _Segments(parts, frozenset().union(*(vocabulary.records for _, vocabulary in parts)))


def _put_rows(token_ids: Tensor, y: Tensor, trained: TrainedRows) -> None:
    """Rows of y whose token was trained become that token's row."""
    ids, known = token_ids.long(), trained.token_ids
    found = torch.searchsorted(known, ids).clamp_(max=known.numel() - 1)
    y.copy_(torch.where((known[found] == ids)[:, None], trained.rows[found], y))
