"""What `validate` says of an adapter is what the server does with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from punica_core.adapter_tools.__main__ import main
from punica_core.adapter_tools.base import BaseFolder, read_base
from punica_core.adapter_tools.numbers import examine
from punica_core.adapters.report import NO_BASE, AdapterReport
from punica_core.adapters.report_text import one_report
from punica_core.errors import ConfigError
from punica_core.lora.arena_layout import lay_out
from punica_core.lora.tables import shape_of
from punica_core.lora.weights import AdapterWeights, load_adapter
from punica_core.model.shapes import model_shapes
from tests.support.adapter_formats import tiny_qwen2
from tests.support.driven_runner import DrivenRunner
from tests.support.peft_adapters import adapter_ref, edit_config, edit_tensors, save_peft_adapter, tiny_llama

FORMATS: dict[str, dict[str, Any]] = {
    "plain": {"rank_pattern": {"v_proj": 3}},
    "DoRA": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "lora_bias": {"lora_bias": True},
    "head and embedding": {"target_modules": ["lm_head", "embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "token rows": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9]},
}


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> AdapterWeights:
    """As the server loads it."""
    model = DrivenRunner(tiny_llama()).loaded
    return load_adapter(adapter_ref(folder), model.module_shapes, dtype, 256, model.base_weights)


@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS.keys())
def test_key_and_bytes_are_the_servers(tmp_path: Path, base: BaseFolder, config: dict[str, Any]) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", **config)
    report = examine(str(folder), base, torch.float32)
    assert report.is_served, report.reason
    weights = loaded(folder)
    assert report.adapter_key == weights.key
    assert report.host_bytes == weights.nbytes
    assert report.ranks == {path: module.a.size(0) for path, module in weights.modules.items()} | embedding_rank(
        weights
    )
    if weights.vocabulary is None:
        layout = lay_out({path: shape_of(module) for path, module in weights.modules.items()})
        assert report.gpu_bytes == layout.num_elements * 4
    else:
        assert report.gpu_bytes is None


def embedding_rank(weights: AdapterWeights) -> dict[str, int]:
    embedding = weights.vocabulary.embedding if weights.vocabulary else None
    return {} if embedding is None else {"model.embed_tokens": embedding.a.size(0)}


@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS.keys())
def test_every_tensor_is_accounted_for(tmp_path: Path, base: BaseFolder, config: dict[str, Any]) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", **config)
    file = (folder / "adapter_model.safetensors").read_bytes()
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    header.pop("__metadata__", None)
    for report in (examine(str(folder), None, torch.float32), examine(str(folder), base, torch.float32)):
        assert {line.name for line in report.tensors} == header.keys()
        assert len(report.tensors) == len(header)
        assert {line.name: list(line.shape) for line in report.tensors} == {n: e["shape"] for n, e in header.items()}
        assert sum(line.nbytes for line in report.tensors) == len(file) - 8 - int.from_bytes(file[:8], "little")
    assert all(line.targets for line in report.tensors), "with a base it is known where each goes"


def test_the_tensors_of_fused_names_go_to_the_parts(tmp_path: Path, base: BaseFolder) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["gate_proj"])
    edit_tensors(
        folder,
        lambda found: {
            name.replace("gate_proj", "gate_up_proj"): torch.cat([t, t]) if "lora_B" in name else t
            for name, t in found.items()
        },
    )
    report = examine(str(folder), base, torch.float32)
    assert report.is_served, report.reason
    parts = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
    assert report.tensors[0].targets == parts
    assert " → model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj" in one_report(report)


def test_without_a_model_the_files_tell_what_they_can(tmp_path: Path, adapter: Path) -> None:
    plain = examine(str(adapter), None, torch.float32)
    assert plain.adapter_key == loaded(adapter).key
    assert plain.verdict == NO_BASE
    assert f": {NO_BASE} (every number was read)" in one_report(plain)
    saved = save_peft_adapter(tmp_path / "saved", target_modules=["q_proj"], modules_to_save=["lm_head"])
    report = examine(str(saved), None, torch.float32)
    assert report.is_served
    assert report.adapter_key is None
    assert "--model" in report.notes[0]
    name = "base_model.model.lm_head.weight"
    edit_tensors(saved, lambda found: found | {name: found[name] * float("nan")})
    assert "NaN" in examine(str(saved), None, torch.float32).reason, "its numbers are read all the same"


def refusals(folder: Path, base: BaseFolder | None) -> AdapterReport:
    report = examine(str(folder), base, torch.float32)
    assert not report.is_served
    assert report.adapter_key is None
    assert "refused" in one_report(report)
    assert report.reason in one_report(report)
    return report


def test_what_is_refused_says_why_and_what_was_found(tmp_path: Path, base: BaseFolder, adapter: Path) -> None:
    other = save_peft_adapter(tmp_path / "other", tiny_llama(hidden_size=128))
    report = refusals(other, base)
    assert report.code == "adapter_mismatch"
    assert "the base model has 176 → 64" in report.reason
    assert report.ranks, "what was parsed before is told"
    assert examine(str(other), None, torch.float32).is_served, "its files alone do not tell"
    orphan = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    edit_tensors(adapter, lambda found: {n: t for n, t in found.items() if n != orphan})
    report = refusals(adapter, None)
    assert "lack their other half" in report.reason
    assert len(report.tensors) == 41, "names, shapes and dtypes are told even so"
    edit_config(adapter, peft_type="LOHA")
    assert refusals(adapter, None).code == "adapter_unsupported"
    (adapter / "adapter_config.json").unlink()
    assert "no adapter_config.json" in refusals(adapter, None).reason
    assert "neither a folder" in refusals(tmp_path / "nothing\0", None).reason


@pytest.mark.parametrize("inside", [["a", "b"], ["b.punica"], ["empty"], []], ids=" ".join)
def test_who_names_the_folder_of_all_adapters_is_told_so(tmp_path: Path, adapter: Path, inside: list[str]) -> None:
    (parent := tmp_path / "all").mkdir()
    for name in inside:
        (parent / name).mkdir()
        if len(name) == 1:
            (parent / name / "adapter_config.json").write_text("{}")
    reason = refusals(parent, None).reason
    if inside in ([], ["empty"]):
        assert "There are" not in reason
    else:
        assert f"There are adapters in it: name one, such as {str(parent / inside[0])!r}" in reason


def test_what_is_no_base_model_is_called_what_it_is(tmp_path: Path, adapter: Path, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere'; there is no such folder"):
        read_base(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="adapter is an adapter, not a base model"):
        read_base(str(adapter))
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"adapter has no config\.json"):
        read_base(str(adapter))
    assert read_base(str(model_folder)).shapes


def test_nan_and_overflow_are_found(base: BaseFolder, adapter: Path) -> None:
    name = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    edit_tensors(adapter, lambda found: found | {name: found[name] + 1e9})
    assert "too large for torch.float16" in examine(str(adapter), base, torch.float16).reason
    assert examine(str(adapter), base, torch.bfloat16).is_served
    edit_tensors(adapter, lambda found: found | {name: found[name] * float("inf")})
    assert "NaN or infinite" in refusals(adapter, base).reason


def test_copies_of_the_bases_weights_are_compared_with_its_files(
    tmp_path: Path, base: BaseFolder, model_folder: Path
) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["lm_head"])
    copy = "base_model.model.lm_head.base_layer.weight"
    assert examine(str(folder), base, torch.float32).is_served
    edit_tensors(folder, lambda found: found | {copy: found[copy] + 1})
    assert "differs from the base" in refusals(folder, base).reason
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((model_folder / "config.json").read_text())
    report = examine(str(folder), read_base(str(tmp_path / "bare")), torch.float32)
    assert report.is_served
    assert "were not compared" in report.notes[0]


def test_the_base_is_built_from_its_config_alone(tmp_path: Path) -> None:
    tiny_qwen2().config.save_pretrained(tmp_path)
    base = read_base(str(tmp_path))
    assert base.shapes.linears == model_shapes(tiny_qwen2()).linears
    assert base.shapes.biased == model_shapes(tiny_qwen2()).biased
    assert not base.weights.is_there
    for wrong in ("{", '{"model_type": "mixtral"}', '{"model_type": "no-such"}'):
        (tmp_path / "config.json").write_text(wrong)
        with pytest.raises(ConfigError):
            read_base(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_base(str(tmp_path))


def test_the_command_prints_text_or_json_and_exits_1_if_one_is_refused(
    tmp_path: Path, model_folder: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_peft_adapter(tmp_path / "other", tiny_llama(hidden_size=128))
    model = ["--model", str(model_folder), "--dtype", "float32"]
    assert main(["validate", str(adapter), *model]) == 0
    text = capsys.readouterr().out
    assert "model.layers.*.mlp.down_proj  lora_A  [5, 176] F32 ×3" in text
    assert loaded(adapter).key in text
    assert main(["validate", str(adapter), "--tensors"]) == 0
    assert text.count("lora_A") * 3 == capsys.readouterr().out.count("lora_A") // 2, "a line for every tensor"
    assert main(["validate", str(adapter), str(other), *model, "--json"]) == 1
    good, bad = json.loads(capsys.readouterr().out)
    assert (good["verdict"], good["adapter_key"]) == ("served", loaded(adapter).key)
    assert good["targets"]["down_proj"] == 3
    assert good["ranks"]["model.layers.0.mlp.down_proj"] == 5
    assert (bad["verdict"], bad["code"], bad["adapter_key"]) == ("refused", "adapter_mismatch", None)
    assert main(["validate", str(adapter), *model, "--max-lora-rank", "4"]) == 1
    assert "rank 5 > max 4" in capsys.readouterr().out
    assert main(["validate", str(adapter), "--model", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err


def test_the_list_with_a_base_says_which_adapters_fit(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "all"
    save_peft_adapter(root / "tuned", r=3)
    save_peft_adapter(root / "foreign", tiny_llama(hidden_size=128))
    command = ["list", str(root), "--model", str(model_folder)]
    assert main([*command, "--json"]) == 0
    reports = {report["name"]: report for report in json.loads(capsys.readouterr().out)}
    assert {name: report["verdict"] for name, report in reports.items()} == {"tuned": "served", "foreign": "refused"}
    assert reports["foreign"]["code"] == "adapter_mismatch"
    assert main(command) == 0
    table, _, note = capsys.readouterr().out.partition("\n\n")
    assert table.splitlines()[-1].endswith("served")
    assert "punica adapters validate" in note
    (root / "tuned").rename(root / model_folder.name)
    assert main([*command, "--json"]) == 0
    _, base = sorted(json.loads(capsys.readouterr().out), key=lambda report: report["name"] == model_folder.name)
    assert (base["verdict"], "name of the base model" in base["reason"]) == ("refused", True)
    (root / model_folder.name).rename(root / "tuned")
    assert main([*command, "--max-lora-rank", "2"]) == 0
    assert "rank 3 > max 2" in capsys.readouterr().out
    assert main(["list", str(tmp_path / "none"), "--model", str(model_folder)]) == 1
    assert "is not a folder" in capsys.readouterr().err
