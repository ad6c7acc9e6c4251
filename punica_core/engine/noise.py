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
_ROUNDS: Final = 10
_MASK64: Final = (1 << 64) - 1

DOMAIN_SAMPLE: Final = 0
DOMAIN_SEED: Final = 1


def philox4x32(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words for each counter and key; every word is held in a uint64 array, all of one shape."""
    multipliers = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)[:, None]
    key_steps = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)[:, None]
    # Both halves of a round are done as one array: few calls of numpy are what makes this fast for a step's rows.
    even, odd, keys = np.stack(counter[0::2]), np.stack(counter[1::2]), np.stack(key)
    for _ in range(_ROUNDS):
        products = (multipliers * even)[::-1]
        even, odd = (products >> _SHIFT32) ^ odd ^ keys, products & _MASK32
        keys = (keys + key_steps) & _MASK32
    return even[0], odd[0], even[1], odd[1]


def as_words(values: Sequence[int]) -> Words:
    """Integers modulo 2**64."""
    return np.array([value & _MASK64 for value in values], dtype=np.uint64)


def _words(seeds: Words, counters: Words, domain: int) -> tuple[Words, Words, Words, Words]:
    low, high = counters & _MASK32, counters >> _SHIFT32
    return philox4x32((low, high, np.full_like(low, domain), np.zeros_like(low)), (seeds & _MASK32, seeds >> _SHIFT32))


def uniforms(seeds: Sequence[int] | Words, positions: Sequence[int] | Words) -> npt.NDArray[np.float64]:
    """One uniform number in [0, 1) with 53 random bits for each (seed, position); both are taken modulo 2**64."""
    keys, counters = (values if isinstance(values, np.ndarray) else as_words(values) for values in (seeds, positions))
    w0, w1, _, _ = _words(keys, counters, DOMAIN_SAMPLE)
    bits = (w0 >> np.uint64(5)) << np.uint64(26) | (w1 >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def engine_seed(configured: int) -> int:
    """The seed of an engine: the configured one, or for -1 a random one, so that two starts draw different tokens."""
    return configured if configured >= 0 else secrets.randbits(64)


def derive_seeds(engine_seed: int, request_ids: Sequence[int]) -> list[int]:
    """A 64-bit seed for each request that brought none; its domain keeps it apart from the numbers of `uniforms`."""
    w0, w1, _, _ = _words(as_words([engine_seed] * len(request_ids)), as_words(request_ids), DOMAIN_SEED)
    seeds: list[int] = (w0 << _SHIFT32 | w1).tolist()
    return seeds


def resolve_seeds(engine_seed: int, request_ids: Sequence[int], given: Sequence[int | None]) -> list[int]:
    """The seed of each request: the one it brought, or a derived one."""
    derived = derive_seeds(engine_seed, request_ids)
    return [own if seed is None else seed for own, seed in zip(derived, given, strict=True)]
