"""Chooses the next token of each row of a step where its logits are, without waiting for the device.

Order of operations, noise and draws are `sampler.Sampler`'s, and so are the tokens (between devices exp may differ by
an ulp, which moves a draw only if it lies that near to the border of two tokens). What the host knows of a step goes to
the device in one copy; the token ids are on the device at once, for the next step to read, and on the host later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from punica_core.engine import noise
from punica_core.engine.logit_edits import EditCollector, LogitEdits, apply_edits
from punica_core.engine.logprobs import (
    LOGPROB_ROWS,
    RANKED_ELEMENTS,
    logprob_entries,
    logprob_tensors,
    token_logprobs,
)
from punica_core.engine.transfers import Download, upload
from punica_core.ops.draw import MAX_VOCAB_SIZE, is_greedy
from punica_core.ops.sample import greedy_tokens, pack_rows, rows_words, sample_tokens
from punica_core.protocol import TokenLogprobs
from punica_core.scheduler.plan import RowPlan, SampledToken


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """Tokens being chosen. token_ids: int64 [B] on the device, below V also in rows that turn out unusable.

    copied: token ids, finite, and for rows that want them logprobs: ids and values [n, 1 + top].
    tops: by row (0 to B - 1) the number of alternatives it wants, in the order of these n.
    """

    token_ids: Tensor
    copied: Download
    tops: dict[int, int]

    def result(self) -> list[SampledToken | None]:
        """Waits for the device. None for a row whose logits hold NaN or +inf."""
        ids, finite, *logprobs = self.copied.wait()
        pairs = zip(ids.tolist(), finite.tolist(), strict=True)
        tokens = [SampledToken(token_id) if usable else None for token_id, usable in pairs]
        if logprobs:
            for (b, top), entry in zip(self.tops.items(), logprob_entries(*logprobs), strict=True):
                if tokens[b] is not None:
                    cut = TokenLogprobs(entry.token_id, entry.logprob, entry.top[:top])
                    tokens[b] = SampledToken(entry.token_id, cut)
        return tokens


class DeviceSampler:
    """Samples for one engine. `seed` stands in, with the request_id, for the seed of requests that have none."""

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int], seed: int) -> None:
        assert vocab_size <= MAX_VOCAB_SIZE, f"a vocabulary of {vocab_size} tokens"
        self._edits = EditCollector(eos_token_ids)
        self._records = _RowRecords(seed)

    def launch(self, logits: Tensor, rows: Sequence[RowPlan]) -> PendingSamples:
        """Queue the choice of each row's next token on the current stream.

        logits: [B, V] fp32, bf16 or fp16, not modified, row b of rows[b]; must not change before later work of the
        current stream. rows: each `samples`; the ids of its tokens must be known if it has penalties. The token's
        position is start + count.

        Takes at most `scratch_bytes` while it runs.
        """
        edits = self._edits.collect(rows, logits.size(1))
        records = self._records.pack(rows)
        wanted = {b: row.sequence.sampling.logprobs for b, row in enumerate(rows)}
        tops = {b: top for b, top in wanted.items() if top is not None}
        edit_arrays = [] if edits is None else edits.arrays()
        record_arrays = [] if records is None else [records]
        asked, *tensors = upload([np.fromiter(tops, np.int64), *edit_arrays, *record_arrays], logits.device)
        token_ids, finite = _choose(
            logits,
            None if edits is None else edits.replaced(tensors[: len(edit_arrays)]),
            None if records is None else tensors[-1],
        )
        copied = [token_ids, finite]
        if tops:
            copied += _logprobs(logits, token_ids, finite, asked, max(tops.values()))
        return PendingSamples(token_ids, Download(copied), tops)

    def prompt_logprobs(self, logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens: logits [n, V] fp32, one row a token; `top` alternatives each. Waits."""
        return token_logprobs(logits, token_ids, top)


def scratch_bytes(num_rows: int, vocab_size: int) -> int:
    """Most device memory that a launch of so many rows takes for a while beside its logits, in bytes."""
    edited = 4 * num_rows * vocab_size
    reported = 12 * min(num_rows, LOGPROB_ROWS) * vocab_size + 24 * max(RANKED_ELEMENTS, vocab_size)
    return max(edited, reported)


def _choose(logits: Tensor, edits: LogitEdits[Tensor] | None, records: Tensor | None) -> tuple[Tensor, Tensor]:
    """(token ids int64, finite bool) [B]. records: int64 [B, 4], None if all rows are greedy."""
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    if edits is not None:
        logits = logits.to(torch.float32, copy=True)
        apply_edits(logits, edits)
    if records is None:
        greedy_tokens(token_ids, finite, logits)
    else:
        sample_tokens(token_ids, finite, logits, records)
    return token_ids, finite


def _logprobs(logits: Tensor, token_ids: Tensor, finite: Tensor, asked: Tensor, top: int) -> list[Tensor]:
    """What `logprob_tensors` says of the rows `asked`, int64 [n]; of rows that are not finite, something."""
    parts = []
    for at in asked.split(LOGPROB_ROWS):
        unusable = finite.index_select(0, at).logical_not_().unsqueeze(-1)
        rows = logits.index_select(0, at).float().masked_fill_(unusable, 0.0)
        parts.append(logprob_tensors(rows, token_ids.index_select(0, at), top))
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


class _RowRecords:
    """Packs the parameters of a step's rows. Most steps have the rows of the step before, with new points."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._sequences: list[object] = []
        self._records = pack_rows([])
        self._seeds = noise.as_words([])
        self._draws = False

    def pack(self, rows: Sequence[RowPlan]) -> npt.NDArray[np.int64] | None:
        """Records int64 [B, 4] for `sample_tokens`, valid until the next call; None if all rows are greedy."""
        sequences = [row.sequence for row in rows]
        if sequences != self._sequences:
            self._sequences = list(sequences)
            params = [sequence.sampling for sequence in sequences]
            self._draws = not all(map(is_greedy, params))
            if self._draws:
                ids = [sequence.request_id for sequence in sequences]
                self._records = pack_rows(params)
                self._seeds = noise.as_words(noise.resolve_seeds(self._seed, ids, [p.seed for p in params]))
        if not self._draws:
            return None
        positions = np.fromiter((row.start + row.count for row in rows), np.uint64, len(rows))
        self._records["point"] = noise.uniforms(self._seeds, positions)
        return rows_words(self._records)
