"""Adapters of unlike rank, scale and targets for the tiny Llama, as PEFT saves them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.peft_adapters import save_peft_adapter

LORA_INDICES = [2, 0, -1, 1, 0, 3]
"""A batch that uses every adapter, one of them twice and not in neighbouring rows, and the base."""


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Registers the CUDA implementation once per process for tests that are marked ``gpu``."""
    if request.node.get_closest_marker("gpu"):
        from punica_core.ops import cuda

        cuda.load()


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters 0…3 of LORA_INDICES."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        save_peft_adapter(root / "plain", seed=1),
        save_peft_adapter(root / "qv", seed=2, r=3, lora_alpha=7, target_modules=["q_proj", "v_proj"]),
        save_peft_adapter(root / "rslora", seed=3, r=33, use_rslora=True, std=0.1),
        save_peft_adapter(
            root / "patterns",
            seed=4,
            r=4,
            rank_pattern={"down_proj": 16},
            alpha_pattern={"o_proj": 3},
            layers_to_transform=[0, 2],
            dtype=torch.bfloat16,
        ),
    ]
