from __future__ import annotations

import pytest

from punica_core.bench.popularity import POPULARITIES, request_counts


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_requests", [1, 2, 3, 17, 64, 1000])
def test_counts_add_up_and_fall(popularity: str, num_requests: int) -> None:
    counts = request_counts(popularity, num_requests)
    assert sum(counts) == num_requests
    assert min(counts) >= 1
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("popularity", "want"),
    [
        ("distinct", [1] * 8),
        ("uniform", [3, 3, 2]),
        ("skewed", [3, 2, 1, 1, 1]),
        ("identical", [8]),
    ],
)
def test_eight_requests(popularity: str, want: list[int]) -> None:
    assert request_counts(popularity, 8) == want


def test_an_unknown_popularity_is_named() -> None:
    with pytest.raises(ValueError, match="'zipf'"):
        request_counts("zipf", 8)
    with pytest.raises(ValueError, match="positive"):
        request_counts("uniform", 0)
