"""How many requests each adapter gets: the four distributions of the Punica paper (arXiv 2310.18547, §7)."""

from __future__ import annotations

import math
from typing import Final

POPULARITIES: Final = ("distinct", "uniform", "skewed", "identical")


def request_counts(popularity: str, num_requests: int) -> list[int]:
    """Requests of each adapter, most popular first; they add up to ``num_requests``.

    distinct: an adapter each. uniform: ⌈√n⌉ adapters, spread evenly. skewed: ⌊1.5^k⌋ for k = 0, 1, … while they fit,
    the rest one adapter more. identical: one adapter.

    Raises:
        ValueError: an unknown popularity, or fewer than one request.
    """
    if num_requests < 1:
        raise ValueError(f"num_requests must be positive, got {num_requests}")
    if popularity == "distinct":
        return [1] * num_requests
    if popularity == "identical":
        return [num_requests]
    if popularity == "uniform":
        num_adapters = math.ceil(math.sqrt(num_requests))
        each, left = divmod(num_requests, num_adapters)
        return [each + 1] * left + [each] * (num_adapters - left)
    if popularity == "skewed":
        return _skewed(num_requests)
    raise ValueError(f"unknown popularity {popularity!r}: want one of {', '.join(POPULARITIES)}")


def _skewed(num_requests: int) -> list[int]:
    counts: list[int] = []
    left = num_requests
    while left and (count := int(1.5 ** len(counts))) < left:
        counts.append(count)
        left -= count
    return sorted([*counts, left], reverse=True)
