"""The exact integer parts of a draw, against what they mean written out in plain Python."""

from __future__ import annotations

import pytest
import torch

from punica_core.ops.draw import HEAD, filter_weights, inverse_cdf, keep_heaviest
from punica_core.protocol import SamplingParams


def some_weights(size: int, seed: int = 0, *, values: int = 50) -> list[int]:
    """Weights with many ties and zeros, the largest being the unit."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(values, (size,), generator=generator).tolist()
    weights = [0 if value < 5 else value * (1 << 34) for value in found]
    weights[size // 2] = 1 << 40
    return weights


def shortest_list(weights: list[int], measures: list[int], reach: float) -> list[int]:
    kept, total = [0] * len(weights), 0
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        if total >= reach:
            break
        kept[index] = weights[index]
        total += measures[index]
    return kept


@pytest.mark.parametrize("lead", [0, 1, 127, 128, 129, 300])
def test_every_point_falls_on_its_weight(lead: int) -> None:
    weights = torch.tensor([[0] * lead + [3, 0, 0, 2, 0]])
    found = [int(inverse_cdf(weights, torch.tensor([k / 5], dtype=torch.float64))) - lead for k in range(5)]
    assert found == [0, 0, 0, 3, 3]


def test_the_last_point_below_one_stays_inside() -> None:
    weights = torch.tensor([[1 << 40] * 300 + [0] * 10])
    assert int(inverse_cdf(weights, torch.tensor([1 - 2.0**-53], dtype=torch.float64))) == 299


@pytest.mark.parametrize("reach", [1, 2, 7, 64, 199, 200, 201])
def test_keep_heaviest_counts_tokens(reach: int) -> None:
    rows = [some_weights(200, seed) for seed in range(6)]
    kept = keep_heaviest(torch.tensor(rows), torch.ones(1, 200, dtype=torch.int64), torch.full((6,), reach))
    assert kept.tolist() == [shortest_list(row, [1] * 200, reach) for row in rows]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.9999, 1.0])
def test_keep_heaviest_sums_weights(share: float) -> None:
    rows = [some_weights(200, seed, values=values) for seed, values in enumerate([6, 50, 63, 63])]
    reach = [max(1, int(share * sum(row))) for row in rows]
    kept = keep_heaviest(torch.tensor(rows), torch.tensor(rows), torch.tensor(reach))
    assert kept.tolist() == [shortest_list(row, row, bound) for row, bound in zip(rows, reach, strict=True)]


@pytest.mark.parametrize("top_k", [0, 2, HEAD - 1, HEAD, HEAD + 1, 150, 200, 999])
@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.95, 1.0])
def test_short_and_long_lists_are_cut_alike(top_k: int, top_p: float) -> None:
    rows = [some_weights(200, seed) for seed in range(4)]
    params = [SamplingParams(max_tokens=1, temperature=1.0, top_k=top_k, top_p=top_p)] * 4
    expected = []
    for row in rows:
        left = shortest_list(row, [1] * 200, top_k or 200)
        expected.append(left if top_p == 1.0 else shortest_list(left, left, max(top_p * sum(left), 1)))
    assert filter_weights(torch.tensor(rows), params).tolist() == expected
