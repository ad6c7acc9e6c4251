"""The parity table of docs/adapters.md: formats × targets × ranks × dtypes, each against PEFT (fp32, 1e-4 in logprobs).

    PUNICA_WRITE_DOCS=1 python -m pytest tests/adapters/test_parity_table.py     # measures, and writes the table

Without the variable the cells are measured all the same, and the table must have these rows and columns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapter_formats import BASES, Case, errors_against_peft

DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"
BEGIN, END = "<!-- parity table: begin -->\n", "<!-- parity table: end -->\n"
TOLERANCE = 1e-4

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
IMPOSSIBLE = {
    ("lora_bias", "embedding"): "PEFT has no such bias",
    ("saved head", "head"): "either or",
    ("token rows", "embedding"): "either or",
}
RANKS = (1, 3, 8, 33, 64)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDED_COPIES = ("head", "embedding")
"""Targets beside which PEFT saves a copy of the base's weight: rounded to 16 bit, it would change PEFT's own base."""


def settings_of(row: int, column: int, shift: int, target: str) -> tuple[int, str]:
    """Rank and dtype of a cell: neighbours differ in both, and each shift gives a cell another pair."""
    rank = RANKS[(row + 2 * column + shift) % len(RANKS)]
    dtype = "fp32" if target in ROUNDED_COPIES else list(DTYPES)[(row + column + shift) % len(DTYPES)]
    return rank, dtype


def cells(shift: int = 0) -> dict[tuple[str, str], Case]:
    found = {}
    for row, (kind, config) in enumerate(FORMATS.items()):
        for column, (target, modules) in enumerate(TARGETS.items()):
            if (kind, target) in IMPOSSIBLE:
                continue
            rank, dtype = settings_of(row, column, shift, target)
            options = {"r": rank, "lora_alpha": 2 * rank, "target_modules": modules} | config
            found[kind, target] = Case(f"{kind}, {target}: r {rank}, {dtype}", options, DTYPES[dtype])
    return found


def measured(root: Path, shift: int = 0) -> dict[tuple[str, str], float]:
    table = cells(shift)
    errors = errors_against_peft(BASES["qwen2, untied"], list(table.values()), root)
    return {place: errors[case.name] for place, case in table.items()}


def rendered(errors: Mapping[tuple[str, str], float]) -> str:
    head = ["", *TARGETS]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row, kind in enumerate(FORMATS):
        found = []
        for column, target in enumerate(TARGETS):
            error = errors.get((kind, target))
            if error is None:
                found.append(IMPOSSIBLE[kind, target])
            else:
                rank, dtype = settings_of(row, column, 0, target)
                found.append(f"r {rank} {dtype}: {error:.0e}")
        lines.append(f"| {kind} | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"


def without_errors(table: str) -> str:
    return re.sub(r"\d+e[-+]\d+", "…", table)


def test_every_cell_is_pefts_and_the_table_is_up_to_date(tmp_path: Path) -> None:
    errors = measured(tmp_path)
    assert {place: error for place, error in errors.items() if error > TOLERANCE} == {}
    before, rest = DOCS.read_text().split(BEGIN)
    table, after = rest.split(END)
    if os.environ.get("PUNICA_WRITE_DOCS"):
        DOCS.write_text(before + BEGIN + rendered(errors) + END + after)
    else:
        assert without_errors(table) == without_errors(rendered(errors)), "write it anew: see the top of this file"


@pytest.mark.slow
@pytest.mark.parametrize("shift", range(1, len(RANKS) * len(DTYPES)))
def test_every_cell_with_every_rank_and_dtype_is_pefts(tmp_path: Path, shift: int) -> None:
    errors = measured(tmp_path, shift)
    assert {place: error for place, error in errors.items() if error > TOLERANCE} == {}
