"""The parity table of docs/adapters.md: formats × targets × ranks × dtypes, each against PEFT (fp32, 1e-4 in logprobs).

    PUNICA_WRITE_DOCS=1 python -m pytest tests/adapters/test_parity_table.py     # measures, and writes the table

Without the variable the cells are measured all the same, and the table must have these rows and columns.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.adapter_formats import BASES, errors_against_peft
from tests.support.parity_cells import DTYPES, RANKS, Place, cells, rendered

DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"
BEGIN, END = "<!-- parity table: begin -->\n", "<!-- parity table: end -->\n"
TOLERANCE = 1e-4


def measured(root: Path, shift: int = 0) -> dict[Place, float]:
    table = cells(shift)
    errors = errors_against_peft(BASES["qwen2, untied"], list(table.values()), root)
    return {place: errors[case.name] for place, case in table.items()}


def without_errors(table: str) -> str:
    return re.sub(r"\d+e[-+]\d+", "…", table)


def test_every_cell_is_pefts_and_the_table_is_up_to_date(tmp_path: Path) -> None:
    errors = measured(tmp_path)
    assert {place: error for place, error in errors.items() if error > TOLERANCE} == {}
    before, rest = DOCS.read_text().split(BEGIN)
    table, after = rest.split(END)
    found = rendered(lambda place: f"{errors[place]:.0e}")
    if os.environ.get("PUNICA_WRITE_DOCS"):
        DOCS.write_text(before + BEGIN + found + END + after)
    else:
        assert without_errors(table) == without_errors(found), "write it anew: see the top of this file"


@pytest.mark.slow
@pytest.mark.parametrize("shift", range(1, len(RANKS) * len(DTYPES)))
def test_every_cell_with_every_rank_and_dtype_is_pefts(tmp_path: Path, shift: int) -> None:
    errors = measured(tmp_path, shift)
    assert {place: error for place, error in errors.items() if error > TOLERANCE} == {}
