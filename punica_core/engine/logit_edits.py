"""What a request adds to or takes from its logits before a token is chosen: penalties, bias, masked stop ids.

In this order: repetition penalty (Keskar et al. 2019, arXiv 1909.05858, over prompt and output), presence and
frequency penalties (OpenAI, over the output), logit_bias, then -inf on stop ids until `min_tokens` are out. All rows
of a step are edited by a fixed number of tensor operations, whose size is the number of touched logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from punica_core.protocol import SamplingParams
from punica_core.scheduler.plan import RowPlan


def has_penalties(sampling: SamplingParams) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def num_generated(row: RowPlan) -> int:
    """Output tokens the sequence has before the one this row samples."""
    return row.start + row.count - row.sequence.num_prompt


class TokenHistory:
    """The distinct tokens of one sequence, in order of appearance, and how often each was generated.

    ids: int64 [n]; generated: float32 [n], 0 for tokens of the prompt alone. `extend` does work for new tokens only.
    """

    def __init__(self) -> None:
        self.num_seen = 0
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._generated = np.zeros(64, dtype=np.float32)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: len(self._index)]

    @property
    def generated(self) -> npt.NDArray[np.float32]:
        return self._generated[: len(self._index)]

    def extend(self, token_ids: Sequence[int], length: int, num_prompt: int) -> None:
        """Take in token_ids[num_seen:length], of which those from num_prompt on were generated."""
        for position in range(self.num_seen, length):
            index = self._entry(token_ids[position])
            if position >= num_prompt:
                self._generated[index] += 1
        self.num_seen = length

    def _entry(self, token_id: int) -> int:
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._generated = np.concatenate([self._generated, np.zeros_like(self._generated)])
        self._ids[index] = token_id
        return index


class Penalties:
    """Applies the penalties of a step's rows; keeps the histories of the last step's rows, and of no others.

    A history belongs to a Sequence object, whose tokens are only ever appended, so it cannot go stale: a sequence that
    was away for a step (preempted) or that reuses a request_id is read again from its start.
    """

    def __init__(self) -> None:
        self._histories: dict[int, tuple[object, TokenHistory]] = {}

    @property
    def num_histories(self) -> int:
        return len(self._histories)

    def apply(self, scores: torch.Tensor, rows: Sequence[RowPlan]) -> None:
        """Edit `scores` [B, V] fp32 in place; row b belongs to rows[b]."""
        penalised = [(b, row) for b, row in enumerate(rows) if has_penalties(row.sequence.sampling)]
        self._histories = {row.sequence.request_id: (row.sequence, self._history(row)) for _, row in penalised}
        if not penalised:
            return
        histories = [self._histories[row.sequence.request_id][1] for _, row in penalised]
        params = [row.sequence.sampling for _, row in penalised]
        sizes = [len(history.ids) for history in histories]

        def spread(values: Iterable[float], dtype: type[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.fromiter(values, dtype), sizes)).to(scores.device)

        at = spread((b for b, _ in penalised), np.int64)
        ids = torch.from_numpy(np.concatenate([history.ids for history in histories])).to(scores.device)
        generated = torch.from_numpy(np.concatenate([history.generated for history in histories])).to(scores.device)
        repetition = spread((p.repetition_penalty for p in params), np.float32)
        frequency = spread((p.frequency_penalty for p in params), np.float32)
        presence = spread((p.presence_penalty for p in params), np.float32)
        values = scores[at, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        scores[at, ids] = values - frequency * generated - presence * (generated > 0)

    def _history(self, row: RowPlan) -> TokenHistory:
        sequence, length = row.sequence, row.start + row.count
        owner, history = self._histories.get(sequence.request_id, (None, TokenHistory()))
        if owner is not sequence or history.num_seen > length:
            history = TokenHistory()
        history.extend(sequence.token_ids, length, sequence.num_prompt)
        return history


def apply_bias(scores: torch.Tensor, rows: Sequence[RowPlan]) -> None:
    """Add each row's logit_bias to `scores` [B, V] in place; ids outside the vocabulary have no logit to change."""
    entries = [
        (b, token_id, bias)
        for b, row in enumerate(rows)
        for token_id, bias in row.sequence.sampling.logit_bias.items()
        if 0 <= token_id < scores.shape[-1]
    ]
    if entries:
        at, ids, bias = zip(*entries, strict=True)
        index = torch.tensor([at, ids], device=scores.device)
        scores[index[0], index[1]] += torch.tensor(bias, dtype=scores.dtype, device=scores.device)


def mask_stop_ids(scores: torch.Tensor, rows: Sequence[RowPlan], eos_token_ids: Collection[int]) -> None:
    """Put -inf on the stop ids of rows that have fewer than `min_tokens` output tokens, in place."""
    entries = [
        (b, token_id)
        for b, row in enumerate(rows)
        if num_generated(row) < row.sequence.sampling.min_tokens
        for token_id in stop_ids(row.sequence.sampling, eos_token_ids)
        if 0 <= token_id < scores.shape[-1]
    ]
    if entries:
        index = torch.tensor(entries, device=scores.device)
        scores[index[:, 0], index[:, 1]] = -torch.inf


def stop_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    """The ids that end a sequence."""
    return set(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids)


def edits_logits(row: RowPlan) -> bool:
    """Whether any of the functions above could change the row."""
    sampling = row.sequence.sampling
    return bool(has_penalties(sampling) or sampling.logit_bias or num_generated(row) < sampling.min_tokens)
