"""Chooses the next token of each row of a step, and reports log-probabilities.

Order of operations: logprobs are taken of the raw logits → repetition, presence and frequency penalties → logit_bias
→ stop ids masked (min_tokens) → temperature → top_k → top_p → min_p → draw. It is that of OpenAI's API reference and
of the logits processors of Hugging Face `transformers`. temperature 0 (and top_k 1) take the largest score. Wherever
scores tie, the lowest token id comes first.

A draw is an inverse-CDF look-up in exact integers (`draw`); the noise is one number per row (`noise.uniforms`): a row's
token depends on its own logits, parameters, seed and position alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from punica_core.engine import noise
from punica_core.engine.logit_edits import EditCollector, apply_edits
from punica_core.engine.logprobs import token_logprobs
from punica_core.ops.draw import MAX_VOCAB_SIZE, draw, first_argmax, is_greedy
from punica_core.protocol import TokenLogprobs
from punica_core.scheduler.plan import RowPlan, SampledToken

CACHED_SCORES = 1 << 19
"""Scores drawn from together on a CPU, in whole rows: their intermediate values stay in its caches."""


class Sampler:
    """Samples for one engine. `seed` stands in, with the request_id, for the seed of requests that have none."""

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int], seed: int) -> None:
        assert vocab_size <= MAX_VOCAB_SIZE, f"a vocabulary of {vocab_size} tokens"
        self._edits = EditCollector(eos_token_ids)
        self._seed = seed

    def sample(self, logits: torch.Tensor, rows: Sequence[RowPlan]) -> list[SampledToken]:
        """The next token of each row.

        logits: [B, V] fp32, not modified, row b of rows[b]; -inf is allowed, NaN and +inf are not (the runner fails
        such rows). rows: each `samples`. The token's position is start + count.
        """
        if not rows:
            return []
        scores = self._scores(logits, rows)
        drawn = [b for b, row in enumerate(rows) if not is_greedy(row.sequence.sampling)]
        if len(drawn) == len(rows):
            token_ids = self._draw(scores, rows)
        else:
            token_ids = first_argmax(scores)
            if drawn:
                at = torch.tensor(drawn, device=scores.device)
                token_ids[at] = self._draw(scores[at], [rows[b] for b in drawn])
        return self._report(logits, rows, token_ids.tolist())

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens: logits [n, V] fp32, one row a token; `top` alternatives each."""
        return token_logprobs(logits, token_ids, top)

    def _scores(self, logits: torch.Tensor, rows: Sequence[RowPlan]) -> torch.Tensor:
        """The logits with every row's edits; the very tensor if there are none."""
        edits = self._edits.collect(rows, logits.shape[-1])
        if edits is None:
            return logits
        scores = logits.clone()
        apply_edits(scores, edits.on(scores.device))
        return scores

    def _draw(self, scores: torch.Tensor, rows: Sequence[RowPlan]) -> torch.Tensor:
        """Token ids int64 [B] drawn at each row's temperature and filters."""
        params = [row.sequence.sampling for row in rows]
        ids = [row.sequence.request_id for row in rows]
        seeds = noise.resolve_seeds(self._seed, ids, [p.seed for p in params])
        points = torch.from_numpy(noise.uniforms(seeds, [row.start + row.count for row in rows])).to(scores.device)
        size = len(rows) if scores.is_cuda else max(1, CACHED_SCORES // scores.shape[-1])
        parts = [slice(begin, begin + size) for begin in range(0, len(rows), size)]
        return torch.cat([draw(scores[part], params[part], points[part]) for part in parts])

    def _report(self, logits: torch.Tensor, rows: Sequence[RowPlan], token_ids: Sequence[int]) -> list[SampledToken]:
        sampled = [SampledToken(token_id) for token_id in token_ids]
        asked = [b for b, row in enumerate(rows) if row.sequence.sampling.logprobs is not None]
        if asked:
            tops = [rows[b].sequence.sampling.logprobs or 0 for b in asked]
            entries = token_logprobs(logits[asked], [token_ids[b] for b in asked], max(tops))
            for b, top, entry in zip(asked, tops, entries, strict=True):
                cut = TokenLogprobs(entry.token_id, entry.logprob, entry.top[:top])
                sampled[b] = SampledToken(token_ids[b], cut)
        return sampled
