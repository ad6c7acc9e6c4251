"""Loading adapters in tests: the refusal a folder meets, and a cache asked as the scheduler asks it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from punica_core.adapters.format import ModelShapes
from punica_core.errors import AdapterError, PunicaError
from punica_core.lora.cache import AdapterCache
from punica_core.lora.weights import load_adapter
from punica_core.protocol import AdapterRef
from punica_core.scheduler.plan import AdapterGrant, SkipReason
from tests.support.peft_adapters import adapter_ref

PATIENCE = 30.0
"""Seconds after which a test gives up on a thread; never waited for when all is well."""


def refusal(
    folder: Path, shapes: ModelShapes, *, max_lora_rank: int = 256, dtype: torch.dtype = torch.float32
) -> AdapterError:
    """The error that loading the adapter in `folder` ends with."""
    with pytest.raises(AdapterError) as caught:
        load_adapter(adapter_ref(folder), shapes, dtype, max_lora_rank)
    assert str(folder.parent) not in caught.value.message, "a message must not tell the server's paths"
    return caught.value


def settle(
    cache: AdapterCache, ref: AdapterRef, clock: Callable[[], float] = time.monotonic
) -> AdapterGrant | PunicaError:
    """Ask as the scheduler does, step by step, until there is an answer. clock: the cache's."""
    for _ in range(1000):
        answer = cache.acquire(ref)
        if isinstance(answer, AdapterGrant):
            return answer
        failures = dict(cache.poll(clock()))
        if ref in failures:
            return failures[ref]
        if answer is SkipReason.ADAPTER_LOADING:
            assert cache.wait_for_load(PATIENCE), "the load never ended"
    raise AssertionError(f"no answer for {ref.name}")


def granted(cache: AdapterCache, ref: AdapterRef, clock: Callable[[], float] = time.monotonic) -> AdapterGrant:
    answer = settle(cache, ref, clock)
    assert isinstance(answer, AdapterGrant), answer
    return answer


def refused(cache: AdapterCache, ref: AdapterRef) -> PunicaError:
    answer = settle(cache, ref)
    assert isinstance(answer, PunicaError), answer
    return answer
