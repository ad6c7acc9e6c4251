"""What each record of the tables is for, and which of an adapter's matrices lie behind it.

The linears of the model's groups come first, in order. Behind them are the records of head and embedding. Kernels read
the first three of these; of the others the host reads the addresses, and the rest of the step is plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from punica_core.errors import AdapterUnsupported
from punica_core.lora.layers import LinearGroup
from punica_core.lora.tables import ModuleWeights
from punica_core.lora.weights import AdapterWeights, TrainedRows, VocabularyWeights


class VocabularyRecord(IntEnum):
    """Records behind those of the groups, in order.

    HEAD: LoRA, gain and bias of the head, as of any linear. EMBEDDING: LoRA for `ops.lora_embed`, A [V, R].
    All others hold one matrix as `ops.segment_gemm` wants it, at the record's B offset. …_MATRIX: [V, H]; …_ROWS:
    [n, H]; …_ROW_IDS: the bytes of int64 [n], the rows' token ids.
    """

    HEAD = 0
    EMBEDDING = 1
    HEAD_MATRIX = 2
    EMBEDDING_MATRIX = 3
    HEAD_ROWS = 4
    HEAD_ROW_IDS = 5
    EMBEDDING_ROWS = 6
    EMBEDDING_ROW_IDS = 7


class TableModules:
    """The modules of one model's tables.

    groups: its LoRA-aware linears. head: the output head's group, None if no adapter may change it. head_bias: the
    base head's own [V], None if it has none; a head of an adapter's own keeps it.
    """

    def __init__(
        self, groups: Sequence[LinearGroup], head: LinearGroup | None = None, head_bias: Tensor | None = None
    ) -> None:
        paths = [path for group in groups for path in group.paths]
        self._index_of = {path: index for index, path in enumerate(paths)}
        self._num_linears = len(paths)
        self._first_of = {group.index: self._index_of[group.paths[0]] for group in groups}
        self._head = head
        self._head_bias = None if head_bias is None else head_bias.detach().cpu()
        if head is not None:
            self._index_of[head.paths[0]] = self._first_of[head.index] = self.index(VocabularyRecord.HEAD)

    @property
    def count(self) -> int:
        """Records that the tables have for each slot."""
        return self._num_linears + len(VocabularyRecord)

    def index(self, record: VocabularyRecord) -> int:
        """Its index among all records of a slot."""
        return self._num_linears + record

    def first_of(self, group: LinearGroup) -> int | None:
        """Index of the record of a group's first slice; None for a group of another model."""
        return self._first_of.get(group.index)

    def arranged(self, weights: AdapterWeights) -> dict[int, ModuleWeights]:
        """All that lies in the arena of an adapter in the model's dtype, by index of its record.

        Raises AdapterUnsupported for what the tables have no place for.
        """
        strange = [path for path in weights.modules if path not in self._index_of]
        if strange:
            raise AdapterUnsupported(f"it adapts {strange[0]!r}, which is not served on a GPU.")
        arranged = {self._index_of[path]: module for path, module in weights.modules.items()}
        if weights.vocabulary is not None:
            if self._head is None and (weights.vocabulary.head_matrix is not None or weights.vocabulary.head_rows):
                raise AdapterUnsupported("it changes the output head, which is not served for this model on a GPU.")
            parts = _vocabulary_modules(weights.vocabulary, self._head_bias)
            arranged.update({self.index(record): module for record, module in parts.items()})
        return arranged


def largest_rank(modules: Mapping[int, ModuleWeights]) -> int:
    """The largest lora_rank of modules with LoRA, at least 1: a slot of rank 0 has no work in a step's plan."""
    return max((module.a.size(0) for module in modules.values() if module.a.size(1)), default=1)


def _vocabulary_modules(
    vocabulary: VocabularyWeights, head_bias: Tensor | None
) -> dict[VocabularyRecord, ModuleWeights]:
    modules: dict[VocabularyRecord, ModuleWeights] = {}
    lora = vocabulary.embedding
    if lora is not None:
        # A lies as [V, R] in the arena; the layout, which knows [R, I], only counts its elements.
        lookup = lora.a.t().reshape(lora.a.shape)
        modules[VocabularyRecord.EMBEDDING] = ModuleWeights(lookup, lora.b, lora.scale, lora.row_gain, lora.bias)
    if vocabulary.head_matrix is not None:
        modules[VocabularyRecord.HEAD_MATRIX] = _whole(vocabulary.head_matrix, head_bias)
    if vocabulary.embedding_matrix is not None:
        modules[VocabularyRecord.EMBEDDING_MATRIX] = _whole(vocabulary.embedding_matrix)
    if vocabulary.head_rows is not None:
        modules[VocabularyRecord.HEAD_ROWS] = _whole(vocabulary.head_rows.rows)
        modules[VocabularyRecord.HEAD_ROW_IDS] = _ids(vocabulary.head_rows)
    if vocabulary.embedding_rows is not None:
        modules[VocabularyRecord.EMBEDDING_ROWS] = _whole(vocabulary.embedding_rows.rows)
        modules[VocabularyRecord.EMBEDDING_ROW_IDS] = _ids(vocabulary.embedding_rows)
    return modules


def _whole(matrix: Tensor, bias: Tensor | None = None) -> ModuleWeights:
    """A full matrix [O, I], in the place of B; the lora_rank of its record is I."""
    return ModuleWeights(torch.empty(matrix.size(1), 0, dtype=matrix.dtype), matrix, 1.0, bias=bias)


def _ids(trained: TrainedRows) -> ModuleWeights:
    """The bytes of the token ids as one row of the arena's dtype, which are copied as they are."""
    return _whole(trained.token_ids.view(trained.rows.dtype)[None])
