"""Adapters in every format in bfloat16, against PEFT in fp32: at most twice as far from it as PEFT in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from punica_core.engine.graphs import GraphSizes
from punica_core.model.loader import prepare
from punica_core.ops import cuda
from punica_core.scheduler.plan import BASE_SLOT
from tests.engine.test_gpu_parity import build, whole_logits
from tests.support.adapter_formats import LAYERS, PROMPT, VOCABULARY, load_for
from tests.support.driven_device_runner import DrivenDeviceRunner
from tests.support.driven_runner import random_prompt
from tests.support.peft_adapters import save_peft_adapter

DTYPE = torch.bfloat16
NEW_TOKENS = 5
ON_HEAD = {name: config for name, config in LAYERS.items() if "lm_head" in config.get("target_modules", ())}
IN_LAYERS = {name: config for name, config in LAYERS.items() if name not in ON_HEAD}
"""Apart, since on a GPU only these are served by captured steps."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        cuda.load()
    return str(request.param)


def prepared(name: str, folders: list[Path], device: str) -> DrivenDeviceRunner:
    loaded = prepare(build(name).to(DTYPE), Path("."), 512)
    adapters = {slot: load_for(loaded, folder) for slot, folder in enumerate(folders)}
    options: dict[str, Any] = (
        {"flashinfer": True, "graphs": GraphSizes((2, 8, 16), (0, 8, 16), (64, 256))} if device == "cuda" else {}
    )
    return DrivenDeviceRunner(build(name).to(device, DTYPE), adapters, **options)


def forced(driven: DrivenDeviceRunner, slots: list[int]) -> list[tuple[list[int], Tensor]]:
    """(tokens, logits of the generated part) of a prompt for each slot, continued with given tokens."""
    sequences = [driven.sequence([*PROMPT, *random_prompt(1 + 4 * i, 512, seed=i)], s) for i, s in enumerate(slots)]
    continuations = [[5, 9, 3, *random_prompt(NEW_TOKENS - 3, 512, seed=100 + i)] for i in range(len(slots))]
    driven.teacher_force(sequences, continuations, budget=24)
    return [(sequence.token_ids[:-1], driven.logits_of(sequence).cpu()) for sequence in sequences]


def distance(logits: Tensor, reference: Tensor) -> float:
    return float((logits - reference).norm() / reference.norm())


@pytest.mark.parametrize("name", ["llama", "llama_mha", "qwen2"])
@pytest.mark.parametrize("configs", [IN_LAYERS, ON_HEAD, VOCABULARY], ids=["layers", "head", "vocabulary"])
def test_every_format_is_as_near_the_reference_as_pefts(
    name: str, configs: Mapping[str, dict[str, Any]], device: str, tmp_path: Path
) -> None:
    folders = [
        save_peft_adapter(tmp_path / str(slot), build(name), seed=slot, std=0.1, **config)
        for slot, config in enumerate(configs.values())
    ]
    driven = prepared(name, folders, device)
    slots = [BASE_SLOT, *range(len(folders))]
    worse = {}
    for case, slot, (token_ids, logits) in zip(["base", *configs], slots, forced(driven, slots), strict=True):
        reference, peft, other = (
            whole_logits(name, folders, which, token_ids, dtype, where)[-len(logits) :]
            for which, dtype, where in (
                (slot, torch.float32, "cpu"),
                (slot, DTYPE, device),
                (0 if slot == BASE_SLOT else BASE_SLOT, torch.float32, "cpu"),
            )
        )
        ours, theirs = distance(logits, reference), distance(peft, reference)
        assert distance(other, reference) > 4 * theirs, f"{case}: the adapter does too little to prove anything"
        if ours > 2 * theirs:
            worse[case] = (ours, theirs)
    assert worse == {}
