"""The `pack` command, what it reports, and the copy of a packed adapter into the arena in one piece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from punica_core.adapter_tools.__main__ import main
from punica_core.adapter_tools.base import BaseFolder
from punica_core.adapter_tools.numbers import examine
from punica_core.adapter_tools.pack import pack
from punica_core.adapters.locate import ref_of
from punica_core.adapters.packed_header import PAGE_BYTES
from punica_core.errors import AdapterInvalid, AdapterMismatch, AdapterUnsupported, ConfigError
from punica_core.lora import tensor_reader
from punica_core.lora.arena_layout import Part, Run, lay_out
from punica_core.lora.arena_writer import ArenaWriter, _Sender
from punica_core.lora.packed import PackedReader
from punica_core.lora.tables import AdapterTables, Arena, ModuleWeights, shape_of
from punica_core.lora.weight import LoRAWeight
from punica_core.lora.weights import AdapterWeights, load_adapter
from tests.support.driven_runner import DrivenRunner
from tests.support.peft_adapters import adapter_ref, edit_tensors, save_peft_adapter, tiny_llama


def read(file: Path, base: BaseFolder) -> AdapterWeights:
    with PackedReader(ref_of(str(file)), base.shapes, torch.float32, 256) as reader:
        return reader.read()


def test_it_packs_and_reports_what_the_server_will_load(
    adapter: Path, base: BaseFolder, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = adapter.parent / "packed.punica"
    flags = ["--model", str(model_folder), "--dtype", "float32", "--json"]
    assert main(["pack", str(adapter), str(file), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    weights = read(file, base)
    assert (report["verdict"], report["packed"], report["adapter_key"]) == ("served", True, weights.key)
    assert report["host_bytes"] == report["gpu_bytes"] == weights.nbytes
    assert report["ranks"]["model.layers.0.mlp.down_proj"] == 5
    assert len(report["tensors"]) == 42
    assert weights.modules.keys() == load_adapter(adapter_ref(adapter), base.shapes, torch.float32, 256).modules.keys()
    with PackedReader(ref_of(str(file)), base.shapes, torch.float32, 256) as reader:
        assert reader.header.config_digest == blake3((adapter / "adapter_config.json").read_bytes()).hexdigest()
    assert main(["pack", str(adapter), str(file), *flags]) == 1
    assert "nothing is overwritten" in json.loads(capsys.readouterr().out)["reason"]
    assert main(["validate", str(file), "--model", str(model_folder), "--dtype", "float32"]) == 0
    assert weights.key in capsys.readouterr().out


def test_a_base_of_another_shape_is_told_by_validate(adapter: Path, base: BaseFolder, tmp_path: Path) -> None:
    file = tmp_path / "packed.punica"
    pack(str(adapter), str(file), base, torch.bfloat16)
    assert examine(str(file), base, torch.bfloat16).is_served
    alone = examine(str(file), None, torch.bfloat16)
    assert alone.adapter_key == examine(str(file), base, torch.bfloat16).adapter_key
    other = BaseFolder("other", DrivenRunner(tiny_llama(num_layers=4)).loaded.module_shapes, base.dtype, base.weights)
    report = examine(str(file), other, torch.bfloat16)
    assert report.code == "adapter_mismatch"
    assert len(report.tensors) == 42


def test_copies_of_the_bases_weights_are_compared_and_left_out(tmp_path: Path, base: BaseFolder) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["lm_head", "q_proj"], r=3)
    copy = "base_model.model.lm_head.base_layer.weight"
    pack(str(folder), str(tmp_path / "a.punica"), base, torch.float32)
    loaded = DrivenRunner(tiny_llama()).loaded
    expected = load_adapter(adapter_ref(folder), loaded.module_shapes, torch.float32, 256, loaded.base_weights)
    packed = read(tmp_path / "a.punica", base)
    for path, module in expected.modules.items():
        assert torch.equal(packed.modules[path].b, module.b)
    edit_tensors(folder, lambda found: found | {copy: found[copy] + 1})
    with pytest.raises(AdapterMismatch, match="differs from the base"):
        pack(str(folder), str(tmp_path / "b.punica"), base, torch.float32)
    assert not (tmp_path / "b.punica").exists()


@pytest.mark.parametrize(
    "config", [{"use_dora": True}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}], ids=str
)
def test_what_cannot_be_packed_is_refused_by_name(tmp_path: Path, base: BaseFolder, config: dict[str, Any]) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", **config)
    with pytest.raises(AdapterUnsupported, match=r"(DoRA|a trained embedding), which is computed.*Serve its folder"):
        pack(str(folder), str(tmp_path / "a.punica"), base, torch.float32)


def test_wrong_sources_and_targets_are_refused(adapter: Path, base: BaseFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end with \.punica"):
        pack(str(adapter), str(tmp_path / "a.bin"), base, torch.float32)
    with pytest.raises(ConfigError, match="Nothing can be written"):
        pack(str(adapter), str(tmp_path / "no" / "a.punica"), base, torch.float32)
    with pytest.raises(AdapterInvalid, match="neither a folder nor"):
        pack(str(tmp_path / "none"), str(tmp_path / "a.punica"), base, torch.float32)
    pack(str(adapter), str(tmp_path / "a.punica"), base, torch.float32)
    with pytest.raises(AdapterUnsupported, match="packed already"):
        pack(str(tmp_path / "a.punica"), str(tmp_path / "b.punica"), base, torch.float32)
    with pytest.raises(AdapterUnsupported, match="packed adapter; give the folder"):
        LoRAWeight.from_peft(tmp_path / "a.punica")


@pytest.mark.parametrize("buffer_bytes", [4096, 1_000_000])
def test_a_laid_out_adapter_fills_the_arena_as_its_matrices_do(
    adapter: Path, base: BaseFolder, tmp_path: Path, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(str(adapter), str(tmp_path / "a.punica"), base, torch.float32)
    weights = read(tmp_path / "a.punica", base)
    modules = dict(enumerate(weights.modules.values()))
    layout = lay_out({index: shape_of(module) for index, module in modules.items()})
    half = layout.num_elements // 2 // 8 * 8
    cut = next(end for end in ends(layout.part_sizes) if end > half)
    runs = (Run(0, cut, 4096), Run(cut, layout.num_elements - cut, 8))

    def written(modules: dict[int, ModuleWeights], laid_out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        layout = lay_out({index: shape_of(module) for index, module in modules.items()})
        arena = Arena(2 * layout.num_elements + 8192, dtype=torch.float32)
        tables = AdapterTables(len(modules), 2)
        ArenaWriter(arena, tables, buffer_bytes=buffer_bytes).write(1, modules, layout, runs, laid_out=laid_out)
        return arena.buffer, tables.records

    plain = written(modules, None)
    other = written(modules, torch.zeros(layout.num_elements))
    assert torch.equal(plain[0], other[0]), "a buffer that the matrices do not lie in is not used"
    backwards = dict(reversed(modules.items()))
    runs = (Run(0, layout.num_elements, 4096),)
    expected, got = written(backwards, None), written(backwards, weights.laid_out)
    assert torch.equal(expected[0], got[0]), "nor one that has them in another order"
    runs = (Run(0, cut, 4096), Run(cut, layout.num_elements - cut, 8))
    monkeypatch.setattr("punica_core.lora.arena_writer._Sender.put", None)  # matrix by matrix
    whole = written(modules, weights.laid_out)
    assert torch.equal(plain[0], whole[0])
    assert torch.equal(plain[1], whole[1])


def ends(sizes: list[int]) -> list[int]:
    total, found = 0, []
    for size in sizes:
        total += size
        found.append(total)
    return found


def test_the_benchmark_measures_both(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden", "64", "--intermediate", "96", "--kv-width", "32", "--layers", "2", "--repeats", "2"]
    assert main(["bench", *sizes, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["sources"].keys() == {"folder", "packed", "packed, no room to land"}
    assert all(values["load_ms"] > 0 for values in figures["sources"].values())
    assert figures["ratios"].keys() == {"packed", "packed, no room to land"}
    assert main(["bench", *sizes, "--rank", "3"]) == 0
    assert "packed is faster" in capsys.readouterr().out


def test_what_is_measured_is_the_whole_way(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each way ends with all of the adapter in memory that is sent, and only the verified one is hashed."""
    sent: dict[bool, int] = {False: 0, True: 0}
    put, landed, digests = _Sender.put, ArenaWriter._send_landed, list[int]()
    real = tensor_reader.TensorReader.key

    def count_put(sender: _Sender, part: Part, words: Any) -> None:
        sent[False] += part.size
        put(sender, part, words)

    def count_landed(writer: ArenaWriter, elements: torch.Tensor, *arguments: Any) -> None:
        sent[True] += elements.numel()
        assert elements.isfinite().all()
        assert elements.any()
        landed(writer, elements, *arguments)

    def count_key(reader: tensor_reader.TensorReader) -> str:
        key = real(reader)
        digests.append(len(key))
        return key

    monkeypatch.setattr(_Sender, "put", count_put)
    monkeypatch.setattr(ArenaWriter, "_send_landed", count_landed)
    monkeypatch.setattr(tensor_reader.TensorReader, "key", count_key)
    sizes = ["--hidden", "64", "--intermediate", "96", "--kv-width", "32", "--layers", "1", "--repeats", "1"]
    assert main(["bench", *sizes, "--rank", "8", "--json"]) == 0
    elements = json.loads(capsys.readouterr().out)["bytes"]["packed"] // 2 - PAGE_BYTES // 2
    assert sent == {False: 4 * elements, True: 4 * elements}
    assert (digests.count(64), digests.count(0)) == (6 + 1, 6)
