"""Log-probabilities of tokens and of the likeliest alternatives, of raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from punica_core.protocol import TokenLogprobs

LOGPROB_ROWS = 64
"""Rows computed at a time, which bounds the scratch memory of a long prompt."""


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """For each row the log-softmax at its token and the `top` likeliest tokens, by logit, then by id.

    logits: [n, V] fp32, one row a token; -inf gives -inf, never NaN. A token and its entry among the top tokens have
    the same value.
    """
    found: list[TokenLogprobs] = []
    for begin in range(0, len(token_ids), LOGPROB_ROWS):
        end = begin + LOGPROB_ROWS
        found += _chunk_logprobs(logits[begin:end], token_ids[begin:end], min(top, logits.shape[-1]))
    return found


def _chunk_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    largest = logits.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    log_sum = (logits - largest).exp_().sum(dim=-1, keepdim=True).log_()
    ids = torch.cat([torch.tensor(token_ids, device=logits.device).unsqueeze(-1), _top_ids(logits, top)], dim=-1)
    values = (logits.gather(-1, ids) - largest - log_sum).nan_to_num_(
        nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    return [
        TokenLogprobs(row_ids[0], row_values[0], list(zip(row_ids[1:], row_values[1:], strict=True)))
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _top_ids(logits: torch.Tensor, top: int) -> torch.Tensor:
    """Ids int64 [n, top] of the largest logits, largest first, lowest id first among equals.

    `topk` may pick any of the tokens that tie at the end of its list: these are looked up again in order of id.
    """
    if top == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    least = logits.topk(top, dim=-1).values[:, -1:]
    rows = []
    for row, bound in zip(logits, least, strict=True):
        candidates = (row >= bound).nonzero().squeeze(-1)
        order = row[candidates].sort(descending=True, stable=True).indices
        rows.append(candidates[order[:top]])
    return torch.stack(rows)
