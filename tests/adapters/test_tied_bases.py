"""Matrices saved without modules_to_save: PEFT loads them into the one that embedding and head share on a tied base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from punica_core.errors import AdapterInvalid
from tests.support.adapter_formats import BASES, Case, errors_against_peft, load_for
from tests.support.driven_runner import DrivenRunner
from tests.support.peft_adapters import edit_config, edit_tensors, save_peft_adapter

TOLERANCE = 1e-4
SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}


def in_place(folder: Path) -> None:
    edit_config(folder, modules_to_save=None)


CASES = [
    Case("its own embedding", SAVED),
    Case("embedding in place", SAVED, prepare=in_place),
    Case("head in place", SAVED | {"modules_to_save": ["lm_head"]}, prepare=in_place),
]


@pytest.mark.parametrize("base", ["llama, tied", "gemma2, tied"])
def test_what_is_saved_in_place_changes_head_and_embedding(base: str, tmp_path: Path) -> None:
    errors = errors_against_peft(BASES[base], CASES, tmp_path)
    assert {case: error for case, error in errors.items() if error > TOLERANCE} == {}


def test_the_same_bytes_saved_in_place_are_another_adapter(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", BASES["llama, tied"](), **SAVED)
    loaded = DrivenRunner(BASES["llama, tied"]()).loaded
    own = load_for(loaded, folder)
    in_place(folder)
    shared = load_for(loaded, folder)
    assert own.vocabulary is not None
    assert shared.vocabulary is not None
    assert own.vocabulary.head_matrix is None
    assert shared.vocabulary.head_matrix is not None
    assert own.key != shared.key


def test_an_embedding_that_the_base_scales_beyond_its_dtype_is_refused(tmp_path: Path) -> None:
    """Gemma multiplies rows of its embedding by √hidden_size."""
    base = BASES["gemma2, tied"]
    folder = save_peft_adapter(tmp_path / "adapter", base(), **SAVED)
    half, single = DrivenRunner(base().half()).loaded, DrivenRunner(base()).loaded
    assert load_for(half, folder).vocabulary is not None
    name = "base_model.model.model.embed_tokens.weight"
    edit_tensors(folder, lambda found: found | {name: found[name].index_fill(0, torch.tensor([7]), 5e4)})
    with pytest.raises(AdapterInvalid, match=r"weight of 'model\.embed_tokens', times the scale .*is inf in row 7"):
        load_for(half, folder)
    assert load_for(single, folder).vocabulary is not None
