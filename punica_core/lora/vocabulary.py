"""What a step's adapters make of the input embedding and the output head, in plain torch, segment by segment.

The head sees only the rows that need logits, so it has segments of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from punica_core.lora.layers import LinearGroup, StepLoRA
from punica_core.lora.linear import linear, spaced
from punica_core.lora.plan import Segment
from punica_core.lora.tables import ModuleWeights
from punica_core.lora.weights import TrainedRows, VocabularyWeights


class SegmentedEmbedding:
    """Implements `StepEmbedding`. segments: of the step's rows, with adapters that change the embedding."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._parts = [
            (slice(s.start, s.end), s.adapter.vocabulary) for s in segments if s.adapter.vocabulary is not None
        ]

    def embed(self, token_ids: Tensor, y: Tensor) -> None:
        """See `StepEmbedding.embed`."""
        for rows, vocabulary in self._parts:
            _embed(token_ids[rows], y[rows], vocabulary)


class SegmentedHead:
    """Implements `StepLoRA` for the output head. segments: of the rows that need logits.

    lora: what adds the LoRA and trained biases of the same rows; None if there are none. bias: the head's own, [V].
    """

    def __init__(self, segments: Sequence[Segment], lora: StepLoRA | None, bias: Tensor | None) -> None:
        self._parts = [
            (slice(s.start, s.end), s.adapter.vocabulary) for s in segments if s.adapter.vocabulary is not None
        ]
        self._lora = lora
        self._bias = bias

    def add(self, group: LinearGroup, x: Tensor, y: Tensor) -> None:
        """See `StepLoRA.add`; rows whose adapter has a head of its own get that one's product."""
        for rows, vocabulary in self._parts:
            if vocabulary.head_matrix is not None:
                y[rows] = linear(x[rows], vocabulary.head_matrix.to(x.device), self._bias)
            if vocabulary.head_rows is not None:
                trained = vocabulary.head_rows
                logits = functional.linear(spaced(x[rows]), trained.rows.to(x.device))
                y[rows].index_copy_(1, trained.token_ids.to(x.device), logits)
        if self._lora is not None:
            self._lora.add(group, x, y)


def changes_embedding(vocabulary: VocabularyWeights | None) -> bool:
    """Whether the adapter gives its tokens other embeddings than the base's."""
    return vocabulary is not None and not (
        vocabulary.embedding is None and vocabulary.embedding_matrix is None and vocabulary.embedding_rows is None
    )


def changes_head(vocabulary: VocabularyWeights | None) -> bool:
    """Whether the adapter has head weights of its own, besides LoRA."""
    return vocabulary is not None and not (vocabulary.head_matrix is None and vocabulary.head_rows is None)


def _embed(token_ids: Tensor, y: Tensor, vocabulary: VocabularyWeights) -> None:
    if vocabulary.embedding_matrix is not None:
        y.copy_(functional.embedding(token_ids.to(vocabulary.embedding_matrix.device), vocabulary.embedding_matrix))
    if vocabulary.embedding is not None:
        _add_lora(token_ids, y, vocabulary.embedding)
    if vocabulary.embedding_rows is not None:
        _put_rows(token_ids, y, vocabulary.embedding_rows)


def _add_lora(token_ids: Tensor, y: Tensor, weights: ModuleWeights) -> None:
    """y = gain · (y + scale · A[:, ids]ᵀ · Bᵀ)."""
    v = functional.embedding(token_ids.to(weights.a.device), weights.a.t())
    y.addmm_(spaced(v.to(y.device)), weights.b.t().to(y.device), alpha=weights.scale)
    if weights.row_gain is not None:
        y.mul_(weights.row_gain.to(y.device))


def _put_rows(token_ids: Tensor, y: Tensor, trained: TrainedRows) -> None:
    """Rows of y whose token was trained become that token's row."""
    known, ids = trained.token_ids, token_ids.cpu()
    found = torch.searchsorted(known, ids).clamp_(max=known.numel() - 1)
    places = (known[found] == ids).nonzero().squeeze(1)
    if places.numel():
        y[places.to(y.device)] = trained.rows[found[places]].to(y.device)
