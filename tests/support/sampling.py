"""Rows that sample, and the distribution that many draws of one row have."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import torch

from punica_core.engine.sampler import Sampler
from punica_core.protocol import NewSequence, SamplingParams
from punica_core.scheduler.plan import BASE_SLOT, RowPlan
from punica_core.scheduler.sequence import Sequence


def sampling_row(
    request_id: int = 0, prompt: Ids[int] = (1, 2, 3), generated: Ids[int] = (), **sampling: object
) -> RowPlan:
    """The row of a sequence whose next token is to be sampled."""
    params = SamplingParams(max_tokens=1000, **sampling)  # type: ignore[arg-type]
    sequence = Sequence.of(NewSequence(request_id=request_id, prompt_ids=list(prompt), sampling=params), 0.0)
    sequence.token_ids.extend(generated)
    return next_row(sequence)


def next_row(sequence: Sequence) -> RowPlan:
    """The decode row of a sequence as it is now."""
    return RowPlan(sequence, sequence.num_tokens - 1, 1, (), BASE_SLOT, samples=True)


def token_ids(sampler: Sampler, logits: torch.Tensor, rows: Ids[RowPlan]) -> list[int]:
    return [token.token_id for token in sampler.sample(logits, rows)]


def frequencies(sampler: Sampler, logits: torch.Tensor, draws: int, **sampling: object) -> torch.Tensor:
    """How often each token is drawn, int64 [V], from logits [V] with seeds 0, 1, 2, …"""
    rows = [sampling_row(i, seed=i, **sampling) for i in range(draws)]
    drawn = torch.tensor(token_ids(sampler, logits.expand(draws, -1), rows))
    return torch.bincount(drawn, minlength=len(logits))


def chi_square_excess(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's statistic in standard deviations above its mean; infinite if a token of probability 0 was seen."""
    possible = probabilities > 0
    if bool(observed[~possible].any()):
        return float("inf")
    expected = probabilities[possible].double() * observed.sum()
    statistic = ((observed[possible] - expected) ** 2 / expected).sum()
    freedom = int(possible.sum()) - 1
    return float((statistic - freedom) / max(2 * freedom, 1) ** 0.5)
