"""What another system reached, to print beside our figures.

vLLM 0.26.0, one NVIDIA H200, torch 2.11.0+cu130, bf16, Llama-3.1-8B shapes, adapters of lora_rank 16 on all seven
projections, all resident (max_loras 64); measured 2026-11-29, one run each.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

SYSTEM: Final = "vLLM 0.26.0 on one H200"
MODEL: Final = "llama-3.1-8b"
"""The only shapes that these figures are for."""

DECODE_MS: Final[Mapping[str, Mapping[int, float]]] = MappingProxyType(
    {
        "off": {1: 4.86, 8: 5.00, 32: 5.44, 64: 5.95, 128: 6.97},
        "identical": {1: 7.71, 8: 7.78, 32: 8.23, 64: 9.44, 128: 12.27},
        "identical, tuned": {1: 6.59, 8: 6.45, 32: 6.97, 64: 7.58, 128: 10.44},
        "distinct": {8: 10.31, 32: 19.47, 64: 32.92, 128: 30.03},
        "distinct, tuned": {8: 9.08, 32: 18.87, 64: 32.88, 128: 30.05},
    }
)
"""Median decode step by batch, prompts of 128 tokens; "tuned" is its `specialize_active_lora`."""

THROUGHPUT_TOKENS_PER_SECOND: Final[Mapping[str, float]] = MappingProxyType(
    {"off": 9048, "base": 8654, "identical": 4572, "skewed": 4201, "uniform": 3802, "distinct": 2897}
)
"""Generated tokens a second of the `conversation` workload at once, at most 128 running."""


def figures_for(model: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """`figures` if they are for this model, as plain data with their source; else nothing."""
    if model != MODEL:
        return {}
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in figures.items()}
    return {"system": SYSTEM, "figures": plain}
