from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from punica_core import LoRAWeight
from punica_core.errors import AdapterInvalid, AdapterUnsupported
from tests.support.peft_adapters import edit_config, save_peft_adapter

A, B = torch.randn(4, 24), torch.randn(16, 4)


@pytest.mark.parametrize(
    ("options", "scale"),
    [({}, 1.0), ({"scale": 0.5}, 0.5), ({"alpha": 6}, 1.5), ({"alpha": 0}, 0.0)],
    ids=str,
)
def test_the_scale_is_given_or_alpha_over_rank(options: dict[str, float], scale: float) -> None:
    weight = LoRAWeight(A, B, **options)
    assert weight.scale == scale
    assert (weight.lora_rank, weight.in_features, weight.out_features) == (4, 24, 16)
    assert "a=[4, 24], b=[16, 4]" in repr(weight)


def test_a_dtype_casts_both_matrices() -> None:
    weight = LoRAWeight(A, B.half(), dtype=torch.bfloat16)
    assert torch.equal(weight.a, A.bfloat16())
    assert torch.equal(weight.b, B.half().bfloat16())


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        (A.T, B, {}, r"A is \[24, 4\] and B \[16, 4\]"),
        (A, B.T, {}, r"\[rank, in\] and \[out, rank\]"),
        (A[0], B, {}, r"A is \[24\]"),
        (torch.ones(300, 8), torch.ones(8, 300), {}, "has rank 300; 1 to 256"),
        (A[:0], B[:, :0], {}, "has rank 0"),
        (A.int(), B, {}, "must be floating point"),
        (A.to("meta"), B, {}, "one device"),
        (A, B, {"scale": 1.0, "alpha": 2.0}, "give one of them"),
    ],
    ids=["A transposed", "B transposed", "vector", "rank 300", "rank 0", "integers", "devices", "scale and alpha"],
)
def test_wrong_arguments_are_named(a: torch.Tensor, b: torch.Tensor, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRAWeight(a, b, **options)


def test_a_peft_folder_gives_every_module_by_its_path(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "x", r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "o_proj"])
    weights = LoRAWeight.from_peft(folder)
    assert sorted(weights) == [f"model.layers.{i}.self_attn.{n}_proj" for i in range(3) for n in "oq"]
    stored = load_file(folder / "adapter_model.safetensors")
    for path, weight in weights.items():
        assert torch.equal(weight.a, stored[f"base_model.model.{path}.lora_A.weight"])
        assert torch.equal(weight.b, stored[f"base_model.model.{path}.lora_B.weight"])
        assert weight.scale == 3.0


def test_a_peft_folder_is_read_in_the_dtype_asked_for(folders: list[Path]) -> None:
    exact, rounded = LoRAWeight.from_peft(folders[0]), LoRAWeight.from_peft(folders[0], dtype=torch.float16)
    for path, weight in exact.items():
        assert torch.equal(weight.a.half(), rounded[path].a)


def test_a_folder_whose_mathematics_is_not_plain_lora_is_refused(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "x", use_dora=True, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(AdapterUnsupported, match="it has DoRA and LoRA on an embedding"):
        LoRAWeight.from_peft(folder)
    folder = save_peft_adapter(tmp_path / "y")
    edit_config(folder, use_qalora=True)
    with pytest.raises(AdapterUnsupported, match="use_qalora"):
        LoRAWeight.from_peft(folder)


def test_missing_and_pickled_weights_are_named(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "x")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterInvalid, match=r"adapter_model\.safetensors is missing"):
        LoRAWeight.from_peft(folder)
    (folder / "adapter_model.bin").touch()
    with pytest.raises(AdapterUnsupported, match="pickled weights only"):
        LoRAWeight.from_peft(folder)
