"""The cells of the parity tables in docs/adapters.md: formats × targets, each with a rank and a dtype of its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.support.adapter_formats import Case

Place = tuple[str, str]
"""(format, target)."""

FORMATS: Mapping[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 5, "lm_head": 2}, "alpha_pattern": {"(up|v)_proj": 7, "embed_tokens": 9}},
    "DoRA": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "bias all": {"bias": "all"},
    "saved head": {"modules_to_save": ["lm_head"]},
    "token rows": {"trainable_token_indices": [5, 9]},
}
TARGETS: Mapping[str, Any] = {
    "q": ["q_proj"],
    "k": ["k_proj"],
    "gate": ["gate_proj"],
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all linears": "all-linear",
    "head": ["lm_head"],
    "embedding": ["embed_tokens"],
}
IMPOSSIBLE: Mapping[Place, str] = {
    ("lora_bias", "embedding"): "PEFT has no such bias",
    ("saved head", "head"): "either or",
    ("token rows", "embedding"): "either or",
}
RANKS = (1, 3, 8, 33, 64)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDED_COPIES = ("head", "embedding")
"""Targets beside which PEFT saves a copy of the base's weight: rounded to 16 bit, it would change PEFT's own base."""
OF_VOCABULARY = ("saved head", "token rows", *ROUNDED_COPIES)
"""Formats and targets of embedding and head."""


def settings_of(place: Place, shift: int = 0) -> tuple[int, str]:
    """Rank and dtype of a cell: neighbours differ in both, and each shift gives a cell another pair."""
    row, column = list(FORMATS).index(place[0]), list(TARGETS).index(place[1])
    rank = RANKS[(row + 2 * column + shift) % len(RANKS)]
    dtype = "fp32" if place[1] in ROUNDED_COPIES else list(DTYPES)[(row + column + shift) % len(DTYPES)]
    return rank, dtype


def cells(shift: int = 0) -> dict[Place, Case]:
    """An adapter for each cell that there can be."""
    found = {}
    for kind, config in FORMATS.items():
        for target, modules in TARGETS.items():
            if (kind, target) in IMPOSSIBLE:
                continue
            rank, dtype = settings_of((kind, target), shift)
            options = {"r": rank, "lora_alpha": 2 * rank, "target_modules": modules} | config
            found[kind, target] = Case(f"{kind}, {target}: r {rank}, {dtype}", options, DTYPES[dtype])
    return found


def rendered(text_of: Callable[[Place], str]) -> str:
    """The table in Markdown; text_of: what was measured in a cell."""
    head = ["", *TARGETS]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for kind in FORMATS:
        found = []
        for target in TARGETS:
            rank, dtype = settings_of((kind, target))
            found.append(IMPOSSIBLE.get((kind, target)) or f"r {rank} {dtype}: {text_of((kind, target))}")
        lines.append(f"| {kind} | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"
