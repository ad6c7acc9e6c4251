"""Adapters of `qkv_proj` and `gate_up_proj` on bases that have the parts, and of the parts on bases that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from punica_core.adapters.files import CONFIG_NAME
from punica_core.adapters.shapes import FUSED_PARTS
from punica_core.errors import AdapterInvalid, AdapterMismatch, AdapterTooLarge
from punica_core.lora.weights import load_adapter
from tests.support.adapter_formats import BASES, Case, errors_against_peft, load_for, tiny_phi3
from tests.support.driven_runner import DrivenRunner
from tests.support.peft_adapters import (
    Tensors,
    adapter_ref,
    edit_config,
    edit_tensors,
    save_peft_adapter,
    tiny_llama,
)

TOLERANCE = 1e-4
SPLIT = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
WIDTHS = {"q_proj": 48, "k_proj": 16, "v_proj": 16, "gate_proj": 80, "up_proj": 80}
RANK = 4
PHI3_JOINT = {"r": 3 * RANK, "lora_alpha": 6 * RANK, "target_modules": ["qkv_proj"]}

TensorEdit = Callable[[Tensors], Tensors]


def edit(change: TensorEdit) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def owners(found: Tensors, leaf: str) -> list[str]:
    """Prefixes of the modules called `leaf` that have a lora_A."""
    return [name.removesuffix(f"{leaf}.lora_A.weight") for name in found if name.endswith(f".{leaf}.lora_A.weight")]


def share_a(found: Tensors) -> Tensors:
    """Give the parts of each group the A of the first."""
    for names in FUSED_PARTS.values():
        for owner in owners(found, names[0]):
            for name in names[1:]:
                found[f"{owner}{name}.lora_A.weight"] = found[f"{owner}{names[0]}.lora_A.weight"].clone()
    return found


def fuse(found: Tensors) -> Tensors:
    """Write adapters of parts that share their A under the fused names."""
    for fused, names in FUSED_PARTS.items():
        for owner in owners(found, names[0]):
            for end in ("lora_B.weight", "lora_B.bias", "lora_magnitude_vector", "base_layer.bias"):
                if f"{owner}{names[0]}.{end}" in found:
                    found[f"{owner}{fused}.{end}"] = torch.cat([found.pop(f"{owner}{name}.{end}") for name in names])
            parts = [found.pop(f"{owner}{name}.lora_A.weight") for name in names]
            found[f"{owner}{fused}.lora_A.weight"] = parts[0]
    return found


def block_diagonal(found: Tensors, without: tuple[str, ...] = ()) -> Tensors:
    """Make the B of each qkv_proj [80, 12] one of blocks: a rank for each part, 0 for those left out.

    DoRA magnitudes of these are those that change nothing.
    """
    names = FUSED_PARTS["qkv_proj"]
    base = dict(tiny_phi3().named_parameters())
    for owner in owners(found, "qkv_proj"):
        b = found[f"{owner}qkv_proj.lora_B.weight"]
        blocks = torch.zeros_like(b)
        magnitude = found.get(f"{owner}qkv_proj.lora_magnitude_vector")
        weight = base[f"{owner.removeprefix('base_model.model.')}qkv_proj.weight"]
        row = 0
        for index, name in enumerate(names):
            rows, columns = slice(row, row + WIDTHS[name]), slice(index * RANK, (index + 1) * RANK)
            row = rows.stop
            if name not in without:
                blocks[rows, columns] = b[rows, columns]
            elif magnitude is not None:
                magnitude[rows] = torch.linalg.vector_norm(weight[rows], dim=1)
        found[f"{owner}qkv_proj.lora_B.weight"] = blocks
    return found


def split_qkv(folder: Path, without: tuple[str, ...] = (), doubled: str = "") -> None:
    """Write the blocks under the names of the parts; `doubled` has twice the alpha and half the B."""

    def split(found: Tensors) -> Tensors:
        names = FUSED_PARTS["qkv_proj"]
        for owner in owners(found, "qkv_proj"):
            a, b = (found.pop(f"{owner}qkv_proj.lora_{half}.weight") for half in "AB")
            magnitude = found.pop(f"{owner}qkv_proj.lora_magnitude_vector", None)
            row = 0
            for index, name in enumerate(names):
                rows, columns = slice(row, row + WIDTHS[name]), slice(index * RANK, (index + 1) * RANK)
                row = rows.stop
                if name in without:
                    continue
                found[f"{owner}{name}.lora_A.weight"] = a[columns]
                found[f"{owner}{name}.lora_B.weight"] = b[rows, columns] / (2 if name == doubled else 1)
                if magnitude is not None:
                    found[f"{owner}{name}.lora_magnitude_vector"] = magnitude[rows]
        return found

    edit_tensors(folder, split)
    alphas = {doubled: 4 * RANK} if doubled else {}
    edit_config(folder, r=RANK, lora_alpha=2 * RANK, alpha_pattern=alphas, target_modules=["q_proj"])


ON_SPLIT_BASES = [
    Case("LoRA", {"target_modules": SPLIT, "r": 3}, prepare=edit(share_a), edit=edit(fuse)),
    Case("DoRA", {"target_modules": SPLIT, "use_dora": True}, prepare=edit(share_a), edit=edit(fuse)),
    Case("lora_bias", {"target_modules": SPLIT, "lora_bias": True}, prepare=edit(share_a), edit=edit(fuse)),
    Case("bias", {"target_modules": SPLIT, "bias": "lora_only"}, prepare=edit(share_a), edit=edit(fuse)),
]
ON_FUSED_BASES = [
    Case("LoRA", PHI3_JOINT, prepare=edit(block_diagonal), edit=split_qkv),
    Case("unlike scales", PHI3_JOINT, prepare=edit(block_diagonal), edit=lambda f: split_qkv(f, doubled="k_proj")),
    Case("DoRA", {**PHI3_JOINT, "use_dora": True}, prepare=edit(block_diagonal), edit=split_qkv),
    Case(
        "q and v only",
        PHI3_JOINT,
        prepare=edit(lambda found: block_diagonal(found, without=("k_proj",))),
        edit=lambda folder: split_qkv(folder, without=("k_proj",)),
    ),
    Case(
        "DoRA on k only",
        {**PHI3_JOINT, "use_dora": True},
        prepare=edit(lambda found: block_diagonal(found, without=("q_proj", "v_proj"))),
        edit=lambda folder: split_qkv(folder, without=("q_proj", "v_proj")),
    ),
]


@pytest.mark.parametrize("base", ["llama", "qwen2, tied"])
def test_fused_names_on_a_split_base_are_pefts(base: str, tmp_path: Path) -> None:
    errors = errors_against_peft(BASES[base], ON_SPLIT_BASES, tmp_path)
    assert {case: error for case, error in errors.items() if error > TOLERANCE} == {}


def test_split_names_on_a_fused_base_are_pefts(tmp_path: Path) -> None:
    errors = errors_against_peft(tiny_phi3, ON_FUSED_BASES, tmp_path)
    assert {case: error for case, error in errors.items() if error > TOLERANCE} == {}


def test_parts_of_a_fused_adapter_share_its_bytes(tmp_path: Path) -> None:
    loaded = DrivenRunner(tiny_llama()).loaded
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["q_proj", "k_proj", "v_proj"])
    split = load_for(loaded, folder).nbytes
    edit_tensors(folder, lambda found: fuse(share_a(found)))
    weights = load_for(loaded, folder)
    q, k = (weights.modules[f"model.layers.0.self_attn.{name}_proj"] for name in "qk")
    assert q.a.data_ptr() == k.a.data_ptr()
    assert weights.nbytes == split - 3 * 2 * 8 * 64 * 4


def fused_llama_adapter(folder: Path) -> Path:
    save_peft_adapter(folder, target_modules=["q_proj", "k_proj", "v_proj"])
    edit_tensors(folder, lambda found: fuse(share_a(found)))
    return folder


def test_a_fused_adapter_of_other_widths_is_refused_with_both(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    save_peft_adapter(folder, tiny_llama(num_kv_heads=4), target_modules=["q_proj", "k_proj", "v_proj"])
    edit_tensors(folder, lambda found: fuse(share_a(found)))
    with pytest.raises(AdapterMismatch, match=r"adapts 64 → 192 features.* the base model has 64 → 128"):
        load_for(DrivenRunner(tiny_llama()).loaded, folder)


def test_a_part_of_other_width_is_refused_with_both(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", tiny_llama(), target_modules=["k_proj"])
    edit_tensors(
        folder, lambda found: {name: tensor[:, :48] if "_A" in name else tensor for name, tensor in found.items()}
    )
    with pytest.raises(AdapterMismatch, match=r"adapts 48 → 32 features.* the base model has 48 → 16"):
        load_for(DrivenRunner(tiny_phi3()).loaded, folder)


def test_a_fused_name_and_one_of_its_parts_together_are_refused(tmp_path: Path) -> None:
    folder = fused_llama_adapter(tmp_path / "adapter")
    part = "base_model.model.model.layers.0.self_attn.q_proj."
    halves = {f"{part}lora_A.weight": torch.ones(8, 64), f"{part}lora_B.weight": torch.ones(64, 8)}
    edit_tensors(folder, lambda found: found | halves)
    with pytest.raises(AdapterInvalid, match="change the same rows"):
        load_for(DrivenRunner(tiny_llama()).loaded, folder)


def test_ranks_that_add_up_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", tiny_phi3(), **PHI3_JOINT)
    edit_tensors(folder, block_diagonal)
    split_qkv(folder)
    loaded = DrivenRunner(tiny_phi3()).loaded
    with pytest.raises(AdapterTooLarge, match=r"rank 12 > max 8: .*qkv_proj.*ranks add up"):
        load_adapter(adapter_ref(folder), loaded.module_shapes, torch.float32, 8)
    assert (folder / CONFIG_NAME).exists()
    assert load_adapter(adapter_ref(folder), loaded.module_shapes, torch.float32, 12).nbytes > 0


def test_what_grows_too_large_in_a_joint_matrix_is_refused(tmp_path: Path) -> None:
    """On a fused base the scales of parts, where they differ, go into their B."""
    folder = save_peft_adapter(tmp_path / "adapter", tiny_phi3(), **PHI3_JOINT)
    edit_tensors(folder, block_diagonal)
    split_qkv(folder, doubled="k_proj")
    half = DrivenRunner(tiny_phi3().half()).loaded
    assert load_for(half, folder).modules
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    edit_tensors(folder, lambda found: found | {name: found[name].index_fill(0, torch.tensor([3]), 4e4)})
    words = r"lora_B of 'model\.layers\.1\.self_attn\.q_proj' times its scale is inf in row 3"
    with pytest.raises(AdapterInvalid, match=words):
        load_for(half, folder)
    assert load_for(DrivenRunner(tiny_phi3()).loaded, folder).modules, "in float32 there is room for it"
