"""Noise: Philox against its published vectors, and the function of (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest

from punica_core.engine import noise

# (counter, key, output) of philox4x32-10 in Random123's kat_vectors.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = noise.philox4x32([np.array([w], np.uint64) for w in counter], [np.array([w], np.uint64) for w in key])
    assert [int(word[0]) for word in words] == expected


def test_noise_of_a_row_ignores_the_other_rows() -> None:
    seeds, positions = [5, -1, 2**63, 5], [0, 7, 2**40, 1]
    together = noise.uniforms(seeds, positions).tolist()
    assert together == [noise.uniforms([seed], [position])[0] for seed, position in zip(seeds, positions, strict=True)]
    assert len(set(together)) == 4


def test_every_part_of_seed_and_position_matters() -> None:
    near = [(0, 0), (1, 0), (0, 1), (2**32, 0), (0, 2**32), (-1, 0), (1, 1)]
    values = noise.uniforms([seed for seed, _ in near], [position for _, position in near])
    assert len(set(values.tolist())) == len(near)


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    values = noise.uniforms([3] * 20_000, range(20_000))
    counts, _ = np.histogram(values, bins=50, range=(0.0, 1.0))
    assert counts.sum() == 20_000
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 4 * (2 * 49) ** 0.5


def test_consecutive_positions_and_seeds_are_uncorrelated() -> None:
    along = noise.uniforms([3] * 20_000, range(20_000))
    across = noise.uniforms(range(20_000), [9] * 20_000)
    for values in (along, across):
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / 20_000**0.5


def test_derived_seeds_depend_on_engine_seed_and_request() -> None:
    assert noise.derive_seeds(0, [1, 2]) == noise.derive_seeds(0, [1]) + noise.derive_seeds(0, [2])
    assert len({*noise.derive_seeds(0, range(100)), *noise.derive_seeds(1, range(100))}) == 200
    assert all(0 <= seed < 2**64 for seed in noise.derive_seeds(0, range(100)))
