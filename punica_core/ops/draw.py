"""Draws from a categorical distribution, and narrows it, in exact integers.

Weights are exp(score - max) as fixed-point int64. Their sums are exact: they do not depend on the order of addition, so
neither on the batch's shape, nor on how the vocabulary is cut into pieces, nor on how a device adds. That makes a draw
a function of its row alone. (Between devices exp may differ by an ulp.) The op `sample_tokens` does the same in one
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from punica_core.protocol import SamplingParams

WEIGHT_BITS = 40
"""Fixed-point bits of a weight: tokens below 2**-40 times the likeliest are never drawn."""

MAX_VOCAB_SIZE = 1 << (62 - WEIGHT_BITS)
"""Tokens whose weights, and whose rank keys, still fit an int64."""

HEAD = 64
"""Likeliest tokens that are put in order for top_k and top_p; a longer list takes the slower `keep_heaviest`."""

BUCKET_SHIFT = 20
"""Of the 32 bits of a float32 weight, those that the histogram of `keep_heaviest` leaves out (3 mantissa bits stay)."""

BLOCK = 128
"""Columns that are reduced together first: reductions that carry an index are slow over a whole vocabulary."""


SMALLEST_TEMPERATURE = 2.0**-149
"""Temperatures below are 0 in float32, and greedy."""


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the largest score is taken, so that nothing is drawn."""
    return sampling.temperature < SMALLEST_TEMPERATURE or sampling.top_k == 1


def draw(scores: torch.Tensor, params: Sequence[SamplingParams], points: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [B] drawn from scores fp32 [B, V]: temperature, top_k, top_p, min_p, then the point's token.

    params: of each row, none of them greedy. points: fp64 [B] in [0, 1).
    """
    weights = fixed_point_weights(scores, [p.temperature for p in params])
    return inverse_cdf(filter_weights(weights, params), points)


def fixed_point_weights(scores: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """exp((score - max) / temperature) in units of 2**-WEIGHT_BITS: int64 [B, V]; a row's largest is 2**WEIGHT_BITS.

    A row of -inf alone gets zeros, from which `inverse_cdf` takes id 0.
    """
    # The division is done after the subtraction, so that a tiny temperature cannot overflow.
    largest = scores.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = scores - largest
    if any(temperature != 1.0 for temperature in temperatures):
        weights /= torch.tensor(temperatures, dtype=scores.dtype, device=scores.device).unsqueeze(-1)
    return weights.exp_().mul_(float(1 << WEIGHT_BITS)).to(torch.int64)


def filter_weights(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The weights [B, V] with 0 in place of those that top_k, top_p or min_p rule out; may overwrite them."""
    ranked = [b for b, p in enumerate(params) if 0 < p.top_k < weights.shape[-1] or p.top_p < 1.0]
    if len(ranked) == len(params):
        weights = filter_ranked(weights, params)
    elif ranked:
        weights[ranked] = filter_ranked(weights[ranked], [params[b] for b in ranked])
    if any(p.min_p for p in params):
        min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=weights.device)
        least = (min_p * float(1 << WEIGHT_BITS)).ceil().to(torch.int64)
        weights.masked_fill_(weights < least.unsqueeze(-1), 0)
    return weights


def filter_ranked(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The weights [B, V] with 0 outside of top_k, and then of the top_p nucleus of what top_k left.

    Tokens are ranked by weight, then by id. The nucleus is the shortest list of first tokens whose weights reach top_p
    of the sum. Rows whose lists end within the first HEAD tokens are done by looking at these alone.
    """
    vocab_size, device = weights.shape[-1], weights.device
    top_k = torch.tensor([p.top_k or vocab_size for p in params], device=device).clamp_(max=vocab_size)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    size = min(HEAD, vocab_size)
    ids, head = ranked_head(weights, size)
    head *= torch.arange(size, device=device) < top_k.unsqueeze(-1)
    reach = nucleus_reach(torch.where(top_k <= size, head.sum(dim=-1), weights.sum(dim=-1)), top_p)
    sums = head.cumsum(dim=-1)
    kept = head * (sums - head < reach.unsqueeze(-1))
    filtered = torch.zeros_like(weights).scatter_(-1, ids, kept)
    done = (top_k <= size) | ((top_k == vocab_size) & (sums[:, -1] >= reach))
    long = (~done).nonzero().squeeze(-1)
    if len(long):
        rest = weights[long]
        if bool((top_k[long] < vocab_size).any()):
            rest = keep_heaviest(rest, torch.ones_like(weights[:1]), top_k[long])
        filtered[long] = keep_heaviest(rest, rest, nucleus_reach(rest.sum(dim=-1), top_p[long]))
    return filtered


def nucleus_reach(mass: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Weight int64 [B] that a nucleus of `mass` int64 [B] has to reach; at least 1, so that one token is kept."""
    return torch.where(top_p < 1.0, (top_p * mass).ceil().to(torch.int64), mass).clamp_(min=1)


def ranked_head(weights: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights) int64 [B, size] of the first tokens in rank order, by distinct keys (weight, -id)."""
    vocab_size = weights.shape[-1]
    bits = (vocab_size - 1).bit_length()
    keys = (weights << bits).sub_(torch.arange(vocab_size, device=weights.device))
    top = keys.topk(size, dim=-1).values
    ids = top.neg().bitwise_and_((1 << bits) - 1)
    return ids, (top + ids).bitwise_right_shift_(bits)


def keep_heaviest(weights: torch.Tensor, measure: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """`weights` [B, V] with 0 outside the shortest list of heaviest tokens whose measures sum to at least `reach` [B].

    Tokens are listed by weight, then by id. measure: int64 [B or 1, V], >= 0. All are kept if the sum never gets
    there. Nothing as long as the vocabulary is sorted: one histogram over the leading bits of the weights finds the
    bucket in which the list ends, and only the tokens of that bucket are put in order.
    """
    measure = measure.expand_as(weights)
    bucket = weights.to(torch.float32).view(torch.int32).bitwise_right_shift_(BUCKET_SHIFT).to(torch.int64)
    sums = weights.new_zeros(len(weights), bucket_of(1 << WEIGHT_BITS) + 2).scatter_add_(-1, bucket, measure)
    below = sums.cumsum(dim=-1) - sums
    from_bucket = sums.sum(dim=-1, keepdim=True) - below
    last = (from_bucket >= reach.unsqueeze(-1)).sum(dim=-1, keepdim=True) - 1
    inside = bucket > last
    row, token = (bucket == last).nonzero(as_tuple=True)
    order = weights[row, token].sort(descending=True, stable=True).indices
    order = order[row[order].sort(stable=True).indices]
    row, token = row[order], token[order]
    before = measure[row, token].cumsum(dim=0) - measure[row, token]
    before -= before[torch.searchsorted(row, row)]
    heavier = from_bucket.gather(-1, last + 1).squeeze(-1)
    kept = before + heavier[row] < reach[row]
    inside[row[kept], token[kept]] = True
    return weights.masked_fill(inside.logical_not_(), 0)


def bucket_of(weight: int) -> int:
    """Histogram bucket of one weight: the leading bits of its float32 form, which order as the weights do."""
    return int(torch.tensor(float(weight)).view(torch.int32)) >> BUCKET_SHIFT


def first_argmax(scores: torch.Tensor) -> torch.Tensor:
    """Index int64 [B] of each row's largest score, the lowest such index on a tie."""
    largest = torch.cat([part.amax(dim=-1) for part in blocks(scores)], dim=-1)
    block = largest.argmax(dim=-1, keepdim=True)
    columns, _ = block_columns(block, scores.shape[-1])
    return (block * BLOCK + scores.gather(-1, columns).argmax(dim=-1, keepdim=True)).squeeze(-1)


def inverse_cdf(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Index int64 [B] of the weight in which the point falls: weights int64 [B, n] >= 0, points fp64 [B] in [0, 1).

    An index of weight 0 is never taken unless the whole row is 0, which gives 0.
    """
    sums = torch.cat([part.sum(dim=-1) for part in blocks(weights)], dim=-1)
    total = sums.sum(dim=-1)
    # The product may round up to the total itself, which lies outside.
    target = torch.minimum((points * total).to(torch.int64), total - 1).clamp_(min=0).unsqueeze(-1)
    block, before = find_weight(sums, target)
    columns, inside = block_columns(block, weights.shape[-1])
    column, _ = find_weight(weights.gather(-1, columns) * inside, target - before)
    return torch.where(total > 0, (block * BLOCK + column).squeeze(-1), 0)


def find_weight(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, sum of the weights before it), int64 [B, 1], of the first weight at which the running sum of
    `weights` [B, n] exceeds `target` [B, 1]; the last index if none does."""
    cumulative = weights.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[-1] - 1)
    return index, cumulative.gather(-1, index) - weights.gather(-1, index)


def blocks(rows: torch.Tensor) -> list[torch.Tensor]:
    """Views [B, n // BLOCK, BLOCK] and [B, 1, n % BLOCK] of `rows` [B, n], without empty ones."""
    whole = rows.shape[-1] // BLOCK * BLOCK
    parts = (rows[:, :whole].unflatten(-1, (-1, BLOCK)) if whole else None, rows[:, whole:].unsqueeze(1))
    return [part for part in parts if part is not None and part.shape[-1]]


def block_columns(block: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(columns, whether they exist) [B, BLOCK] of block numbers [B, 1] in rows of `size`; others repeat the last."""
    columns = block * BLOCK + torch.arange(BLOCK, device=block.device)
    return columns.clamp(max=size - 1), columns < size
