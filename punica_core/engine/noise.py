"""Counter-based sampling noise: a pure function of (seed, position), so of nothing else in the batch.

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11): a keyed bijection of a 128-bit
counter; the seed is the key, the position and a domain are the counter. There is no generator state to keep, copy or
restore: a preempted sequence, another batch order or another device sees the same numbers. The few words a step needs
are computed on the host, before the step's logits exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MASK32: Final = np.uint64(0xFFFFFFFF)
_SHIFT32: Final = np.uint64(32)
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS: Final = 10
_MASK64: Final = (1 << 64) - 1

DOMAIN_SAMPLE: Final = 0
DOMAIN_SEED: Final = 1


def philox4x32(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words for each counter and key; every word is held in a uint64 array, shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT32) ^ c1 ^ k0,
            product1 & _MASK32,
            (product0 >> _SHIFT32) ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3


def _halves(values: Sequence[int]) -> tuple[Words, Words]:
    """Low and high 32-bit words of integers taken modulo 2**64."""
    words = np.array([value & _MASK64 for value in values], dtype=np.uint64)
    return words & _MASK32, words >> _SHIFT32


def _words(seeds: Sequence[int], counters: Sequence[int], domain: int) -> tuple[Words, Words, Words, Words]:
    low, high = _halves(counters)
    return philox4x32((low, high, np.full_like(low, domain), np.zeros_like(low)), _halves(seeds))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One uniform number in [0, 1) with 53 random bits for each (seed, position); both are taken modulo 2**64."""
    w0, w1, _, _ = _words(seeds, positions, DOMAIN_SAMPLE)
    bits = (w0 >> np.uint64(5)) << np.uint64(26) | (w1 >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def engine_seed(configured: int) -> int:
    """The seed of an engine: the configured one, or for -1 a random one, so that two starts draw different tokens."""
    return configured if configured >= 0 else secrets.randbits(64)


def derive_seeds(engine_seed: int, request_ids: Sequence[int]) -> list[int]:
    """A 64-bit seed for each request that brought none; its domain keeps it apart from the numbers of `uniforms`."""
    w0, w1, _, _ = _words([engine_seed] * len(request_ids), request_ids, DOMAIN_SEED)
    seeds: list[int] = (w0 << _SHIFT32 | w1).tolist()
    return seeds


def resolve_seeds(engine_seed: int, request_ids: Sequence[int], given: Sequence[int | None]) -> list[int]:
    """The seed of each request: the one it brought, or a derived one."""
    derived = derive_seeds(engine_seed, request_ids)
    return [own if seed is None else seed for own, seed in zip(derived, given, strict=True)]
