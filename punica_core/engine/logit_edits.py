"""What a request adds to or takes from its logits before a token is chosen: penalties, bias, masked stop ids.

In this order: repetition penalty (Keskar et al. 2019, arXiv 1909.05858, over prompt and output), presence and
frequency penalties (OpenAI, over the output), logit_bias, then -inf on stop ids until `min_tokens` are out. All rows
of a step are edited by a fixed number of tensor operations, whose size is the number of touched logits.

`EditCollector` looks at the rows and returns arrays on the host; `apply_edits` takes them as tensors where the scores
are, and does not wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from punica_core.protocol import SamplingParams
from punica_core.scheduler.plan import RowPlan

Array = npt.NDArray[Any]
A = TypeVar("A", Array, torch.Tensor)


def num_generated(row: RowPlan) -> int:
    """Output tokens the sequence has before the one this row samples."""
    return row.start + row.count - row.sequence.num_prompt


class TokenHistory:
    """The distinct tokens of one sequence and how often each was generated: those of the prompt first.

    with_prompt: only the repetition penalty looks at the prompt; without it, its tokens have no entries.
    ids: int64 [n]; generated: float32 [n], 0 for tokens of the prompt alone. `extend` does work for new tokens only.
    No loop goes over a prompt: between two steps there is no time for thousands of turns.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt: int, *, with_prompt: bool = True) -> None:
        prompt = set(token_ids[:num_prompt] if with_prompt else ())
        self.num_seen = num_prompt
        self._prompt = prompt
        self._size = len(prompt)
        self._places: dict[int, int] = {}  # of what was generated
        self._ids = np.zeros(len(prompt) + 64, dtype=np.int64)
        self._ids[: len(prompt)] = np.fromiter(prompt, np.int64, len(prompt))
        self._generated = np.zeros(len(self._ids), dtype=np.float32)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def generated(self) -> npt.NDArray[np.float32]:
        return self._generated[: self._size]

    def extend(self, token_ids: Sequence[int], length: int) -> None:
        """Take in token_ids[num_seen:length], which were generated."""
        new = token_ids[self.num_seen : length]
        if (
            len(new) > 64 and not self._places
        ):  # it was preempted: looking for each of them among the prompt's is slower
            self._places = dict(zip(self.ids.tolist(), range(self._size), strict=True))
        for token_id in new:
            place = self._place(token_id)  # may move the arrays
            self._generated[place] += 1
        self.num_seen = length

    def _place(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is None:
            place = self._prompt_place(token_id) if token_id in self._prompt else self._append(token_id)
            self._places[token_id] = place
        return place

    def _prompt_place(self, token_id: int) -> int:
        return int((self._ids[: len(self._prompt)] == token_id).argmax())

    def _append(self, token_id: int) -> int:
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._generated = np.concatenate([self._generated, np.zeros_like(self._generated)])
        self._ids[self._size] = token_id
        self._size += 1
        return self._size - 1


@dataclass(frozen=True, slots=True)
class PenaltyEntries(Generic[A]):
    """One entry for each (row, token) that is penalised, all [n]: no pair twice.

    at, ids: int64. generated: fp32, how often the row generated the token. The others: the row's parameters, fp32.
    """

    at: A
    ids: A
    generated: A
    repetition: A
    frequency: A
    presence: A

    def arrays(self) -> list[A]:
        return [self.at, self.ids, self.generated, self.repetition, self.frequency, self.presence]


@dataclass(frozen=True, slots=True)
class AddedEntries(Generic[A]):
    """What is added to the logits of (row, token) pairs, all [n]: no pair twice. at, ids: int64. values: fp32."""

    at: A
    ids: A
    values: A

    def arrays(self) -> list[A]:
        return [self.at, self.ids, self.values]


@dataclass(frozen=True, slots=True)
class LogitEdits(Generic[A]):
    """What a step's rows change, in this order."""

    penalties: PenaltyEntries[A] | None
    added: AddedEntries[A] | None

    def arrays(self) -> list[A]:
        return [array for part in (self.penalties, self.added) if part is not None for array in part.arrays()]

    def replaced(self, tensors: Sequence[torch.Tensor]) -> LogitEdits[torch.Tensor]:
        """The same edits with `tensors` in place of `arrays()`."""
        count = 0 if self.penalties is None else len(self.penalties.arrays())
        return LogitEdits(
            None if self.penalties is None else PenaltyEntries(*tensors[:count]),
            None if self.added is None else AddedEntries(*tensors[count:]),
        )

    def on(self: LogitEdits[Array], device: torch.device) -> LogitEdits[torch.Tensor]:
        """The same edits as tensors on `device`; on the CPU they share the arrays' memory."""
        return self.replaced([torch.from_numpy(array).to(device) for array in self.arrays()])


@dataclass(frozen=True, slots=True)
class _Added:
    """What is added to the logits of a sequence in every step in which its stop ids are masked (or are not)."""

    owner: object
    masks: bool
    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class EditCollector:
    """Finds what rows change; keeps the histories of the last step's penalised rows, and of no others, and likewise
    what is added to rows: a request may have a thousand biases, and a step has no time to look at each.

    A history belongs to a Sequence object, whose tokens are only ever appended, so it cannot go stale: a sequence that
    was away for a step (preempted) or that reuses a request_id is read again from its start.
    """

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._histories: dict[int, tuple[object, TokenHistory]] = {}
        self._added: dict[int, _Added] = {}

    @property
    def num_histories(self) -> int:
        return len(self._histories)

    def collect(self, rows: Sequence[RowPlan], vocab_size: int) -> LogitEdits[Array] | None:
        """The step's edits, None if there are none. To be called once for each step, with all of its rows."""
        penalties = self._penalties(rows)
        added = self._added_entries(rows, vocab_size)
        return None if penalties is None and added is None else LogitEdits(penalties, added)

    def _added_entries(self, rows: Sequence[RowPlan], vocab_size: int) -> AddedEntries[Array] | None:
        """Each row's logit_bias, and -inf for its stop ids while it has fewer than `min_tokens` output tokens."""
        before, self._added = self._added, {}
        parts: list[tuple[int, _Added]] = []
        for b, row in enumerate(rows):
            sequence = row.sequence
            sampling, masks = sequence.sampling, num_generated(row) < sequence.sampling.min_tokens
            if not (sampling.logit_bias or masks):
                continue
            added = before.get(sequence.request_id)
            if added is None or added.owner is not sequence or added.masks is not masks:
                masked = stop_ids(sampling, self._eos_token_ids) if masks else ()
                added = _Added(sequence, masks, *_own_entries(sampling, vocab_size, masked=masked))
            self._added[sequence.request_id] = added
            if len(added.ids):
                parts.append((b, added))
        if not parts:
            return None
        return AddedEntries(
            at=np.repeat(np.fromiter((b for b, _ in parts), np.int64), [len(added.ids) for _, added in parts]),
            ids=np.concatenate([added.ids for _, added in parts]),
            values=np.concatenate([added.values for _, added in parts]),
        )

    def _penalties(self, rows: Sequence[RowPlan]) -> PenaltyEntries[Array] | None:
        penalised = [(b, row) for b, row in enumerate(rows) if row.sequence.sampling.has_penalties]
        self._histories = {row.sequence.request_id: (row.sequence, self._history(row)) for _, row in penalised}
        if not penalised:
            return None
        histories = [self._histories[row.sequence.request_id][1] for _, row in penalised]
        params = [row.sequence.sampling for _, row in penalised]
        sizes = [len(history.ids) for history in histories]

        def spread(values: Iterable[float], dtype: type[np.generic]) -> Array:
            return np.repeat(np.fromiter(values, dtype), sizes)

        return PenaltyEntries(
            at=spread((b for b, _ in penalised), np.int64),
            ids=np.concatenate([history.ids for history in histories]),
            generated=np.concatenate([history.generated for history in histories]),
            repetition=spread((p.repetition_penalty for p in params), np.float32),
            frequency=spread((p.frequency_penalty for p in params), np.float32),
            presence=spread((p.presence_penalty for p in params), np.float32),
        )

    def _history(self, row: RowPlan) -> TokenHistory:
        sequence, length = row.sequence, row.start + row.count
        owner, history = self._histories.get(sequence.request_id, (None, None))
        if history is None or owner is not sequence or history.num_seen > length:
            with_prompt = sequence.sampling.repetition_penalty != 1.0
            history = TokenHistory(sequence.token_ids, sequence.num_prompt, with_prompt=with_prompt)
        history.extend(sequence.token_ids, length)
        return history


def _own_entries(
    sampling: SamplingParams, vocab_size: int, *, masked: Collection[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Ids and values of one row's entries. Ids outside the vocabulary have no logit to change."""
    entries = {**sampling.logit_bias, **dict.fromkeys(masked, -np.inf)}
    kept = {token_id: value for token_id, value in entries.items() if 0 <= token_id < vocab_size}
    return np.fromiter(kept, np.int64, len(kept)), np.fromiter(kept.values(), np.float32, len(kept))


def stop_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    """The ids that end a sequence."""
    return set(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids)


def apply_edits(scores: torch.Tensor, edits: LogitEdits[torch.Tensor]) -> None:
    """Edit `scores` [B, V] fp32 in place. NaN and +inf stay what they are, or become NaN."""
    if edits.penalties is not None:
        entries = edits.penalties
        values = scores[entries.at, entries.ids]
        values = torch.where(values > 0, values / entries.repetition, values * entries.repetition)
        lowered = entries.frequency * entries.generated, entries.presence * (entries.generated > 0)
        scores[entries.at, entries.ids] = values - lowered[0] - lowered[1]
    if edits.added is not None:
        scores[edits.added.at, edits.added.ids] += edits.added.values
