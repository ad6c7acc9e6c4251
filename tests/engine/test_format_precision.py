"""Adapters in every format in 16 bit, against PEFT in fp32: at most twice as far from it as PEFT in 16 bit.

PUNICA_TABLES=folder python -m pytest tests/engine/test_format_precision.py     # writes what was measured there
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from punica_core.lora.weights import AdapterWeights
from punica_core.model.loader import LoadedModel
from punica_core.ops import cuda
from tests.engine.test_gpu_parity import build
from tests.support.adapter_formats import LAYERS, VOCABULARY, Case, load_for
from tests.support.parity_cells import DTYPES, OF_VOCABULARY, RANKS, Place, cells, rendered, settings_of
from tests.support.precision import BATCH, HALF_PRECISION, LIMIT, Precision, assert_precise, measure

ON_HEAD = {name: config for name, config in LAYERS.items() if "lm_head" in config.get("target_modules", ())}
IN_LAYERS = {name: config for name, config in LAYERS.items() if name not in ON_HEAD}
"""Apart, since on a GPU only these are served by captured steps."""
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        cuda.load()
    return str(request.param)


@pytest.mark.parametrize("name", ["llama", "llama_mha", "qwen2"])
@pytest.mark.parametrize("configs", [IN_LAYERS, ON_HEAD, VOCABULARY], ids=["layers", "head", "vocabulary"])
def test_every_format_is_as_near_the_reference_as_pefts(
    name: str, configs: Mapping[str, dict[str, Any]], device: str, tmp_path: Path
) -> None:
    cases = {case: Case(case, config) for case, config in configs.items()}
    assert_precise(measure(lambda: build(name), cases, device, torch.bfloat16, tmp_path))


@pytest.mark.parametrize(("place", "dtype"), HALF_PRECISION, ids=str)
def test_every_cell_of_the_table_is_as_near_the_reference_as_pefts(
    place: str, dtype: torch.dtype, tmp_path: Path, record_property: Any
) -> None:
    """Formats × targets × ranks × dtypes of files, as in fp32."""
    if place == "cuda":
        cuda.load()
    found = measured(place, dtype, tmp_path)
    table = table_of(found, place, dtype)
    record_property("table", json.dumps(table))
    write(table, rendered(lambda cell: f"{found[cell].ratio:.2f}"))
    assert_precise(found)


@pytest.mark.slow
@pytest.mark.parametrize("shift", range(1, len(RANKS) * len(DTYPES)))
def test_every_cell_with_every_rank_and_dtype_is_as_near(device: str, shift: int, tmp_path: Path) -> None:
    assert_precise(measured(device, torch.bfloat16, tmp_path, shift))


def measured(place: str, dtype: torch.dtype, root: Path, shift: int = 0) -> dict[Place, Precision]:
    found: dict[Place, Precision] = {}
    for index, batch in enumerate(batches(cells(shift))):
        found |= measure(lambda: build("qwen2"), batch, place, dtype, root / str(index))
    return found


def test_a_scale_that_is_a_little_off_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(loaded: LoadedModel, folder: Path) -> AdapterWeights:
        weights = load_for(loaded, folder)
        modules = {path: replace(module, scale=1.1 * module.scale) for path, module in weights.modules.items()}
        return replace(weights, modules=modules)

    monkeypatch.setattr("tests.support.precision.load_for", wrong)
    found = measure(lambda: build("qwen2"), next(batches(cells())), "cpu", torch.bfloat16, tmp_path)
    assert all(precision.ratio > LIMIT for precision in found.values())


def batches(table: Mapping[Place, Case]) -> Iterator[dict[Place, Case]]:
    """The cells, those of the layers apart, which on a GPU are served by captured steps."""
    for of_vocabulary in (False, True):
        chosen = [item for item in table.items() if any(part in OF_VOCABULARY for part in item[0]) == of_vocabulary]
        for first in range(0, len(chosen), BATCH):
            yield dict(chosen[first : first + BATCH])


def table_of(found: Mapping[Place, Precision], place: str, dtype: torch.dtype) -> dict[str, Any]:
    """All that was measured, and on what."""
    return {
        "device": torch.cuda.get_device_name() if place == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "torch": str(torch.__version__),
        "largest_ratio": max(precision.ratio for precision in found.values()),
        "cells": [
            {"format": kind, "target": target, "rank": rank, "file": file, "ratio": precision.ratio} | asdict(precision)
            for (kind, target), precision in found.items()
            for rank, file in [settings_of((kind, target))]
        ],
    }


def write(table: Mapping[str, Any], markdown: str) -> None:
    """Into the folder that PUNICA_TABLES names, if it does, and to the test's output."""
    print(
        f"{table['device']}, {table['dtype']}, torch {table['torch']}: at most {table['largest_ratio']:.2f}\n{markdown}"
    )
    folder = os.environ.get("PUNICA_TABLES")
    if folder:
        os.makedirs(folder, exist_ok=True)
        path = Path(folder, f"format-precision-{'cpu' if table['device'] == 'cpu' else 'cuda'}-{table['dtype']}")
        path.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown)
