"""Log-probabilities of tokens and of the likeliest alternatives, of raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from punica_core.protocol import TokenLogprobs

LOGPROB_ROWS = 64
"""Rows computed at a time, which bounds the scratch memory of a long prompt."""

RANKED_ELEMENTS = 1 << 22
"""Logits that `ranked_top_ids` ranks at a time: it takes about 20 bytes for each."""


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """For each row the log-softmax at its token and the `top` likeliest tokens, by logit, then by id.

    logits: [n, V] fp32, one row a token; -inf gives -inf, never NaN. A token and its entry among the top tokens have
    the same value.
    """
    ids, values = logprob_tensors(logits, torch.tensor(token_ids, dtype=torch.int64, device=logits.device), top)
    return logprob_entries(ids, values)


def logprob_tensors(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64, log-probabilities fp32) [n, 1 + top]: of the row's token, then of its `top` likeliest tokens.

    logits: [n, V] fp32. token_ids: int64 [n]. Does not wait for a GPU.
    """
    top = min(top, logits.shape[-1])
    chunks = [
        _chunk_logprobs(logits[begin : begin + LOGPROB_ROWS], token_ids[begin : begin + LOGPROB_ROWS], top)
        for begin in range(0, max(len(token_ids), 1), LOGPROB_ROWS)
    ]
    ids, values = zip(*chunks, strict=True)
    return torch.cat(ids), torch.cat(values)


def logprob_entries(ids: torch.Tensor, values: torch.Tensor) -> list[TokenLogprobs]:
    """What `logprob_tensors` found, one entry a row."""
    return [
        TokenLogprobs(row_ids[0], row_values[0], list(zip(row_ids[1:], row_values[1:], strict=True)))
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _chunk_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    largest = logits.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    log_sum = (logits - largest).exp_().sum(dim=-1, keepdim=True).log_()
    top_ids = ranked_top_ids(logits, top) if logits.is_cuda else _top_ids(logits, top)
    ids = torch.cat([token_ids.unsqueeze(-1), top_ids], dim=-1)
    values = (logits.gather(-1, ids) - largest - log_sum).nan_to_num_(
        nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    return ids, values


def _top_ids(logits: torch.Tensor, top: int) -> torch.Tensor:
    """Ids int64 [n, top] of the largest logits, largest first, lowest id first among equals.

    `topk` may pick any of the tokens that tie at the end of its list: these are looked up again in order of id.
    """
    if top == 0 or len(logits) == 0:
        return torch.empty(len(logits), top, dtype=torch.int64, device=logits.device)
    least = logits.topk(top, dim=-1).values[:, -1:]
    rows = []
    for row, bound in zip(logits, least, strict=True):
        candidates = (row >= bound).nonzero().squeeze(-1)
        order = row[candidates].sort(descending=True, stable=True).indices
        rows.append(candidates[order[:top]])
    return torch.stack(rows)


def ranked_top_ids(logits: torch.Tensor, top: int) -> torch.Tensor:
    """`_top_ids` for a GPU: never waits for it. Ranks by distinct integer keys (logit, -id)."""
    vocab_size = logits.shape[-1]
    bits = (vocab_size - 1).bit_length()
    size = max(1, RANKED_ELEMENTS // vocab_size)
    parts = []
    for rows in logits.split(size):
        raw = (rows + 0.0).view(torch.int32)  # -0 and 0 are equal
        ordered = raw.bitwise_right_shift(31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(raw)
        keys = ordered.to(torch.int64).bitwise_left_shift_(bits).sub_(torch.arange(vocab_size, device=logits.device))
        parts.append(keys.topk(top, dim=-1).values.neg().bitwise_and_((1 << bits) - 1))
    return torch.cat(parts)
