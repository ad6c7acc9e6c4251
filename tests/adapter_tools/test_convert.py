"""Conversion: the result computes what PEFT says the source does, the source stays, hostile pickles do nothing."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from punica_core.adapter_tools.base import BaseFolder
from punica_core.adapter_tools.convert import Conversion, convert
from punica_core.adapter_tools.pickle_file import load_pickle
from punica_core.errors import (
    AdapterError,
    AdapterInvalid,
    AdapterMismatch,
    AdapterTooLarge,
    AdapterUnsupported,
    ConfigError,
)
from punica_core.lora.weights import load_adapter
from tests.support.driven_runner import DrivenRunner
from tests.support.peft_adapters import (
    Tensors,
    adapter_ref,
    edit_config,
    edit_tensors,
    peft_logits,
    read_tensors,
    save_peft_adapter,
    tiny_llama,
)

PROMPT = [4, 60, 5, 9, 17, 3, 9, 7]
PREFIX = "base_model.model."
TOLERANCE = 1e-4


def key_of(folder: Path) -> str:
    loaded = DrivenRunner(tiny_llama()).loaded
    return load_adapter(adapter_ref(folder), loaded.module_shapes, torch.float32, 256, loaded.base_weights).key


def as_pickle(folder: Path, wrap: Callable[[Tensors], object] = lambda found: found, **options: Any) -> None:
    """Replace an adapter's weights by what older PEFT versions saved."""
    found = read_tensors(folder)
    (folder / "adapter_model.safetensors").unlink()
    torch.save(wrap(found), folder / "adapter_model.bin", **options)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def converted(folder: Path, base: BaseFolder | None = None) -> tuple[Path, Conversion]:
    before = digest(folder)
    target = folder.parent / "converted"
    done = convert(str(folder), str(target), base)
    assert digest(folder) == before, "the source is only read"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["adapter", "converted"], "nothing is left behind"
    return target, done


def test_a_pickle_becomes_safetensors_of_the_same_numbers(adapter: Path) -> None:
    reference, key = peft_logits(adapter, PROMPT), key_of(adapter)
    names = read_tensors(adapter).keys()
    as_pickle(adapter)
    target, done = converted(adapter)
    assert done.changes == ["adapter_model.bin became adapter_model.safetensors"]
    assert done.report.adapter_key == key_of(target) == key
    assert read_tensors(target).keys() == names
    assert torch.equal(peft_logits(target, PROMPT), reference)


PICKLES: dict[str, tuple[Callable[[Tensors], object], dict[str, Any]]] = {
    "before torch 1.6": (lambda found: found, {"_use_new_zipfile_serialization": False}),
    "an ordered dict": (lambda found: collections.OrderedDict(found), {}),
    "nested": (lambda found: {"module": found, "step": 5}, {}),
    "parameters": (lambda found: {n: torch.nn.Parameter(t) for n, t in found.items()}, {}),
    "views of one storage": (lambda found: unflattened(found), {}),
    "adapter's name inside": (lambda found: {n.replace(".weight", ".default.weight"): t for n, t in found.items()}, {}),
}


def unflattened(found: Tensors) -> Tensors:
    flat = torch.cat([t.reshape(-1) for t in found.values()])
    parts = flat.split([t.numel() for t in found.values()])
    return {n: part.view(t.shape) for (n, t), part in zip(found.items(), parts, strict=True)}


@pytest.mark.parametrize(("wrap", "options"), PICKLES.values(), ids=PICKLES.keys())
def test_whatever_torch_wrote_is_read(
    adapter: Path, wrap: Callable[[Tensors], object], options: dict[str, Any]
) -> None:
    key = key_of(adapter)
    as_pickle(adapter, wrap, **options)
    target, _ = converted(adapter)
    assert key_of(target) == key


def spelled(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda found: {n.replace(old, new): t for n, t in found.items()})


SPELLINGS = {
    "no prefix": spelled(PREFIX, ""),
    "default": spelled(".weight", ".default.weight"),
    "compiled": spelled(PREFIX, f"{PREFIX}_orig_mod."),
    "DDP": spelled(PREFIX, f"module.{PREFIX}"),
}


@pytest.mark.parametrize("edit", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_other_spellings_become_what_peft_itself_loads(adapter: Path, edit: Callable[[Path], None]) -> None:
    reference, key, names = peft_logits(adapter, PROMPT), key_of(adapter), read_tensors(adapter).keys()
    edit(adapter)
    assert read_tensors(adapter).keys() != names
    target, done = converted(adapter)
    assert "42 of 42 tensors renamed" in done.changes[0]
    assert read_tensors(target).keys() == names
    assert key_of(target) == key
    assert torch.equal(peft_logits(target, PROMPT), reference)


EVERYTHING: dict[str, dict[str, Any]] = {
    "DoRA on head and embedding": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
    "saved head and token rows": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head"],
        "trainable_token_indices": [5, 9],
    },
    "lora_bias": {"lora_bias": True},
}


@pytest.mark.parametrize("config", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_every_role_has_its_canonical_name(tmp_path: Path, base: BaseFolder, config: dict[str, Any]) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", **config)
    names, reference = read_tensors(folder).keys(), peft_logits(folder, PROMPT)
    edit_tensors(
        folder,
        lambda found: {re.sub(r"(lora_[AB]|vector|embedding_[AB])", r"\1.mine", n[17:]): t for n, t in found.items()},
    )
    target, _ = converted(folder, base)
    assert read_tensors(target).keys() == names
    assert torch.equal(peft_logits(target, PROMPT), reference)


def test_a_canonical_adapter_is_copied_with_its_chat_template(adapter: Path) -> None:
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    (adapter / "optimizer.pt").write_bytes(b"not part of it")
    target, done = converted(adapter)
    assert done.changes == ["chat_template.jinja copied"]
    assert sorted(path.name for path in target.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
    ]
    assert key_of(target) == key_of(adapter)
    assert target.stat().st_mode & 0o777 == 0o755


def fuse(folder: Path, *, prefix: str = f"{PREFIX}model.") -> None:
    """Rewrite q, k and v of one adapter as qkv_proj; the halves of A are stacked, B is block-diagonal."""
    found = read_tensors(folder)
    fused: Tensors = {}
    for layer in range(3):
        path = f"{PREFIX}model.layers.{layer}.self_attn."
        a = found[f"{path}q_proj.lora_A.weight"]
        b = torch.cat([found[f"{path}{name}.lora_B.weight"] for name in ("q_proj", "k_proj", "v_proj")])
        fused[f"{prefix}layers.{layer}.self_attn.qkv_proj.lora_A.weight"] = a
        fused[f"{prefix}layers.{layer}.self_attn.qkv_proj.lora_B.weight"] = b
    edit_tensors(folder, lambda _: fused)


@pytest.mark.parametrize("prefix", [f"{PREFIX}model.", PREFIX, ""])
@pytest.mark.parametrize("rslora", [False, True])
def test_fused_names_are_split_for_a_base_that_has_them_split(
    tmp_path: Path, base: BaseFolder, prefix: str, rslora: bool
) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["q_proj", "k_proj", "v_proj"], r=4)
    found = read_tensors(folder)
    shared = {n: found[re.sub("[qkv]_proj", "q_proj", n)].clone() if "lora_A" in n else t for n, t in found.items()}
    edit_tensors(folder, lambda _: shared)
    patterns = {
        "r": 9,
        "rank_pattern": {"self_attn.[qkv]_proj": 4},
        "alpha_pattern": {"layers.1.self_attn.[a-z]+_proj": 5},
    }
    edit_config(folder, use_rslora=rslora, **patterns)
    reference = peft_logits(folder, PROMPT)
    fuse(folder, prefix=prefix)
    edit_config(
        folder,
        target_modules=["qkv_proj"],
        rank_pattern={"qkv_proj": 4},
        alpha_pattern={"layers.1.self_attn.qkv_proj": 5},
    )
    target, done = converted(folder, base)
    assert "3 qkv_proj split into q_proj, k_proj, v_proj" in done.changes
    assert read_tensors(target).keys() == shared.keys()
    assert torch.allclose(peft_logits(target, PROMPT), reference, rtol=0, atol=TOLERANCE)
    config = json.loads((target / "adapter_config.json").read_text())
    assert len(config["target_modules"]) == 9
    edit_config(target, alpha_pattern={})
    assert not torch.allclose(peft_logits(target, PROMPT), reference, rtol=0, atol=100 * TOLERANCE), "patterns matter"


def test_without_a_model_fused_names_stay(tmp_path: Path) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", target_modules=["q_proj", "k_proj", "v_proj"])
    fuse(folder)
    target, done = converted(folder)
    assert done.changes == ["nothing: it was canonical"]
    assert key_of(target) == key_of(folder)


def test_what_would_be_refused_is_not_written(adapter: Path, base: BaseFolder) -> None:
    target = adapter.parent / "converted"

    def refused(kind: type[AdapterError], words: str) -> None:
        with pytest.raises(kind, match=words):
            convert(str(adapter), str(target), base)
        assert [path.name for path in adapter.parent.iterdir()] == ["adapter"]

    edit_tensors(adapter, lambda found: found | {f"{PREFIX}model.layers.7.self_attn.q_proj.foo": torch.ones(1)})
    refused(AdapterUnsupported, "foo")
    edit_tensors(
        adapter, lambda found: {n.replace("layers.2", "layers.7"): t for n, t in found.items() if "foo" not in n}
    )
    refused(AdapterMismatch, "layers.7")
    edit_tensors(adapter, lambda found: {n: t.double() for n, t in found.items() if "layers.7" not in n})
    assert convert(str(adapter), str(target), base).report.is_served
    shutil.rmtree(target)
    edit_tensors(adapter, lambda found: {n: t * 1e200 for n, t in found.items()})
    refused(AdapterInvalid, "too large for torch.float32")
    edit_tensors(adapter, lambda found: {n: t * float("nan") for n, t in found.items() if "layers.7" not in n})
    refused(AdapterInvalid, "NaN")
    edit_config(adapter, peft_type="LOHA")
    refused(AdapterUnsupported, "LOHA")
    (adapter / "adapter_model.safetensors").unlink()
    edit_config(adapter, peft_type="LORA")
    refused(AdapterInvalid, "no weights")
    (adapter / "adapter_config.json").unlink()
    refused(AdapterInvalid, "adapter_config.json is gone")


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_nothing_is_overwritten(adapter: Path, there: str) -> None:
    target = adapter.parent / "converted"
    if there == "folder":
        target.mkdir()
    elif there == "file":
        target.write_text("precious")
    else:
        target.symlink_to("nowhere")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        convert(str(adapter), str(target), None)
    assert not list(target.iterdir()) if there == "folder" else os.path.lexists(target)
    with pytest.raises(ConfigError, match="Nothing can be written"):
        convert(str(adapter), str(adapter.parent / "no" / "such" / "place"), None)


class Call:
    """Pickles as a call, which the unpickler then makes."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.made = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.made


def test_a_pickle_that_runs_code_runs_none(adapter: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    bomb = Call(os.mkdir, str(trace))
    pickle.loads(pickle.dumps(bomb))
    assert trace.exists(), "the pickle works"
    trace.rmdir()
    for write in (
        lambda file: torch.save({"a": bomb}, file),
        lambda file: torch.save({"a": bomb}, file, _use_new_zipfile_serialization=False),
        lambda file: file.write_bytes(pickle.dumps(bomb)),
    ):
        write(tmp_path / "x.bin")
        with pytest.raises(AdapterUnsupported, match="cannot be read as a file of tensors"):
            load_pickle(str(tmp_path / "x.bin"))
        assert not trace.exists()


WRONG_PICKLES: dict[str, tuple[type[AdapterError], str, object]] = {
    "a list": (AdapterInvalid, "holds a list", [torch.ones(1)]),
    "empty": (AdapterInvalid, "holds a dict", {}),
    "a number": (AdapterUnsupported, "'a' is a int", {"a": 1}),
    "a number as name": (AdapterUnsupported, "1 is a Tensor", {1: torch.ones(1)}),
    "integers": (AdapterUnsupported, "torch.int64", {"a": torch.ones(1, dtype=torch.int64)}),
    "sparse": (AdapterUnsupported, "not a plain tensor", {"a": torch.eye(3).to_sparse()}),
    "a few bytes spread over terabytes": (AdapterInvalid, "repeat", {"a": torch.ones(1).expand(10**6, 10**6)}),
}


@pytest.mark.parametrize(("kind", "words", "content"), WRONG_PICKLES.values(), ids=WRONG_PICKLES.keys())
def test_a_pickle_of_other_things_is_refused(
    tmp_path: Path, kind: type[AdapterError], words: str, content: object
) -> None:
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(kind, match=words):
        load_pickle(str(tmp_path / "x.bin"))


def test_damaged_pickles_are_refused(tmp_path: Path, adapter: Path) -> None:
    as_pickle(adapter)
    raw = (adapter / "adapter_model.bin").read_bytes()
    file = tmp_path / "x.bin"
    for changed in (b"", b"PK\3\4", raw[: len(raw) // 2], raw[:-100], b"\x80\x05.", b"\x80\x02}q\0.", bytes(1000)):
        file.write_bytes(changed)
        with pytest.raises((AdapterUnsupported, AdapterInvalid)):
            load_pickle(str(file))
    os.truncate(file, 2**37)  # a hole
    with pytest.raises(AdapterTooLarge):
        load_pickle(str(file))


@pytest.mark.parametrize("zipped", [True, False])
def test_flipped_and_cut_pickles_give_tensors_or_a_refusal(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "x.bin"
    torch.save({f"m{i}": torch.randn(2, 8) for i in range(4)}, file, _use_new_zipfile_serialization=zipped)
    raw = file.read_bytes()
    outcomes = []
    for seed in range(100):
        rng = random.Random(seed)
        changed = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        file.write_bytes(changed[: rng.choice([len(raw), len(raw), len(raw), rng.randrange(len(raw))])])
        outcomes.append(outcome(file))
    assert 10 < outcomes.count("tensors") < 60, outcomes


def outcome(file: Path) -> str:
    try:
        tensors = load_pickle(str(file))
    except AdapterError as error:
        return error.code
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    return "tensors"


def test_the_program_cannot_be_made_to_take_all_memory(adapter: Path) -> None:
    as_pickle(adapter, lambda found: {"a": Call(bytearray, 2**36)})
    command = [sys.executable, "-m", "punica_core.adapter_tools", "convert", str(adapter), str(adapter.parent / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "cannot be read as a file of tensors (weights_only): MemoryError" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (adapter.parent / "x").exists()
