"""Damaged and hostile weights files: refused from the header, within bounds, and never unpickled."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from punica_core.adapters.format import AdapterManifest, ModelShapes, build_manifest
from punica_core.adapters.header import MAX_HEADER_BYTES, TensorEntry, parse_header
from punica_core.adapters.peft_config import parse_config
from punica_core.errors import AdapterInvalid, AdapterTooLarge
from tests.support.adapter_loading import refusal

FIRST_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FIRST_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def write(folder: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(raw) if length is None else length)
    (folder / "adapter_model.safetensors").write_bytes(size + raw + data)


def entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "no tensors": ("no weights", lambda folder: write(folder, {})),
    "metadata only": ("no weights", lambda folder: write(folder, {"__metadata__": {"format": "pt"}})),
    "size-0 tensors": ("no weights", lambda folder: write(folder, {FIRST_A: entry([0], 0, 0)})),
    "0 bytes": ("no weights", lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"") and None),
    "5 bytes": ("truncated", lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345") and None),
    "header of 2^60 bytes": ("claims a header of", lambda folder: write(folder, {}, length=2**60)),
    "header longer than the file": ("truncated", lambda folder: write(folder, {}, length=100)),
    "header is a list": ("JSON list", lambda folder: write(folder, [])),
    "header is no JSON": ("not valid JSON", lambda folder: write(folder, b"{'a'}")),
    "overlap": ("overlaps", lambda folder: write(folder, {"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, b"12345678")),
    "hole": ("hole", lambda folder: write(folder, {"a": entry([1], 4, 8)}, b"12345678")),
    "tail": ("4 bytes behind", lambda folder: write(folder, {"a": entry([1], 0, 4)}, b"12345678")),
    "missing data": ("truncated", lambda folder: write(folder, {"a": entry([4], 0, 16)}, b"12345678")),
    "size and shape differ": ("needs 12 bytes", lambda folder: write(folder, {"a": entry([3], 0, 8)}, b"12345678")),
    "shape negative": ("shape", lambda folder: write(folder, {"a": entry([-1], 0, 4)}, b"1234")),
    "shape overflows": ("needs", lambda folder: write(folder, {"a": entry([2**62, 2**62], 0, 4)}, b"1234")),
    "shape of floats": ("shape", lambda folder: write(folder, {"a": entry([1.0], 0, 4)}, b"1234")),
    "offsets reversed": ("offsets", lambda folder: write(folder, {"a": entry([1], 4, 0)}, b"1234")),
    "unknown dtype": ("unknown dtype", lambda folder: write(folder, {"a": entry([1], 0, 4, "F33")}, b"1234")),
    "extra field": ("exactly", lambda folder: write(folder, {"a": entry([1], 0, 4) | {"x": 1}}, b"1234")),
    "long name": ("name of", lambda folder: write(folder, {"a" * 1000: entry([1], 0, 4)}, b"1234")),
}


@pytest.mark.parametrize(("words", "damage"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_damaged_or_hostile_file_is_refused(
    adapter: Path, shapes: ModelShapes, words: str, damage: Callable[[Path], None]
) -> None:
    damage(adapter)
    error = refusal(adapter, shapes)
    assert isinstance(error, AdapterInvalid | AdapterTooLarge)
    assert words in error.message


def test_a_header_is_too_large_only_if_the_file_has_it(adapter: Path, shapes: ModelShapes) -> None:
    write(adapter, {}, length=MAX_HEADER_BYTES + 1)
    assert isinstance(refusal(adapter, shapes), AdapterInvalid)
    os.truncate(adapter / "adapter_model.safetensors", MAX_HEADER_BYTES + 100)
    assert isinstance(refusal(adapter, shapes), AdapterTooLarge)


def test_a_truncated_file_is_refused_with_both_sizes(adapter: Path, shapes: ModelShapes) -> None:
    weights = adapter / "adapter_model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 100)
    assert f"end at byte {size}, the file at {size - 100}" in refusal(adapter, shapes).message


def test_a_key_repeated_behind_half_a_million_others_is_found_in_one_pass() -> None:
    # comparing each key with all others would take hours of a reader thread that holds the GIL
    raw = "{" + ",".join(f'"{number}":1' for number in range(500_000)) + ',"499999":1}'
    with pytest.raises(AdapterInvalid, match="'499999' appears twice"):
        parse_header(raw.encode(), 10**9, "f")


def test_too_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("punica_core.adapters.header.MAX_TENSORS", 2)
    header = json.dumps({str(index): {} for index in range(3)}).encode()
    with pytest.raises(AdapterTooLarge, match="3 tensors; at most 2"):
        parse_header(header, len(header) + 8, "file")


def test_too_many_patterns_for_so_many_modules_are_refused() -> None:
    patterns = {f"layers.{index}.other": 8 for index in range(4000)}
    settings = parse_config(
        json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "rank_pattern": patterns}).encode()
    )
    names = [f"m{index}.lora_{half}.weight" for index in range(1001) for half in "AB"]
    with pytest.raises(AdapterTooLarge, match="1001 modules and 4000 entries"):
        build_manifest(settings, {name: TensorEntry(name, "F32", (1, 1), 0, 4) for name in names})


def manifest_of(paths: list[str], **patterns: dict[str, int]) -> AdapterManifest:
    """Of an adapter of rank 1 on linears at `paths`."""
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1} | patterns
    tensors = {}
    for path in paths:
        for half in "AB":
            name = f"{path}.lora_{half}.weight"
            tensors[name] = TensorEntry(name, "F32", (1, 1), 0, 4)
    return build_manifest(parse_config(json.dumps(config).encode()), tensors)


HOSTILE_PATTERNS: dict[str, list[str]] = {
    "two groups that repeat": [f"(.*)(.*)x{i}" for i in range(64)],
    "alternatives that all match": [f"(.|.|.|.|.|.|.|.|.)(.|.|.|.|.|.|.|.|.).*.*x{i}" for i in range(8)],
    "dots": ["." * 140 + f"x{i}" for i in range(2000)],
}


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("names", HOSTILE_PATTERNS.values(), ids=HOSTILE_PATTERNS.keys())
def test_patterns_that_would_take_minutes_are_refused_at_once(names: list[str], key: str) -> None:
    """A reader's thread that matches them holds up everybody."""
    paths = [f"{i:04d}".ljust(150, ".") + "z" for i in range(1000)]
    start = time.process_time()
    with pytest.raises(AdapterTooLarge, match=r"could take \d{10,} steps to match with 1000 modules; at most"):
        manifest_of(paths, **{key: dict.fromkeys(names, 1)})
    assert time.process_time() - start < 10, "most of it goes into compiling 2000 patterns"


def test_no_step_of_matching_takes_longer_than_is_counted_on() -> None:
    paths = ["." * 150 + "z", "a." * 75]
    for names in HOSTILE_PATTERNS.values():
        settings = parse_config(
            json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "rank_pattern": {names[0]: 2}}).encode()
        )
        seconds = []
        for _ in range(3):
            start = time.process_time()
            assert [settings.rank_of(path) for path in paths] == [1, 1]
            seconds.append(time.process_time() - start)
        assert min(seconds) < 10e-9 * settings.matching_steps(paths) + 1e-4


def test_patterns_of_the_largest_models_are_far_below_the_bound() -> None:
    leaves = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    leaves += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    paths = [f"model.layers.{layer}.{leaf}" for layer in range(126) for leaf in leaves]
    manifest = manifest_of(paths, rank_pattern=dict.fromkeys(paths, 1), alpha_pattern=dict.fromkeys(paths, 2))
    assert {module.scale for module in manifest.modules.values()} == {2.0}
    ranges = {rf".*layers\.({i}|{i + 1}|{i + 2})\..*q_proj": 1 for i in range(0, 126, 2)}
    assert len(manifest_of(paths, rank_pattern=ranges).modules) == len(paths)


class Marker:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_named_safetensors_is_refused_and_not_opened(
    adapter: Path, shapes: ModelShapes, tmp_path: Path, protocol: int
) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(pickle.dumps(Marker(tmp_path / "ran"), protocol))
    error = refusal(adapter, shapes)
    assert "pickle" in error.message
    assert "punica adapters convert" in error.message
    assert not (tmp_path / "ran").exists()


def test_a_torch_archive_named_safetensors_is_refused(adapter: Path, shapes: ModelShapes, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "adapter_model.bin")
    shutil.copy(tmp_path / "adapter_model.bin", adapter / "adapter_model.safetensors")
    assert "pickle" in refusal(adapter, shapes).message


def test_a_sparse_file_of_4_gb_is_refused_from_its_header(adapter: Path, shapes: ModelShapes) -> None:
    features = 2**27
    a, b = entry([8, features], 0, 32 * features), entry([64, 8], 32 * features, 32 * features + 2048)
    write(adapter, {FIRST_A: a, FIRST_B: b})
    weights = adapter / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size + 32 * features + 2048)
    assert f"{features} → 64" in refusal(adapter, shapes).message
