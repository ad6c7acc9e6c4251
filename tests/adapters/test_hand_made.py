"""Adapters that were changed by hand, in ways that people and tools do, or that nobody does but an attacker.

Each is served as PEFT computes it, or refused with a code and words that name the fault.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from punica_core.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from punica_core.errors import PunicaError
from tests.adapters.test_fuzz import Fuzzer
from tests.support.adapter_faults import join, split
from tests.support.peft_adapters import Tensors, edit_config, edit_tensors

Edit = Callable[[Path], object]
LAYER = "base_model.model.model.layers.0."
SERVED = ""


def config(**changes: Any) -> Edit:
    return lambda folder: edit_config(folder, **changes)


def raw_config(text: bytes) -> Edit:
    return lambda folder: (folder / CONFIG_NAME).write_bytes(text)


def tensors(change: Callable[[Tensors], Tensors]) -> Edit:
    return lambda folder: edit_tensors(folder, change)


def renamed(old: str, new: str) -> Edit:
    return tensors(lambda found: {name.replace(old, new): tensor for name, tensor in found.items()})


def also(old: str, new: str) -> Edit:
    """The tensors, and copies of them under other names."""
    return tensors(lambda found: found | {n.replace(old, new): t.clone() for n, t in found.items() if old in n})


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return tensors(lambda found: {n: change(t).contiguous() if part in n else t for n, t in found.items()})


def without(end: str) -> Edit:
    return tensors(lambda found: {name: tensor for name, tensor in found.items() if not name.endswith(end)})


def header(change: Callable[[dict[str, Any]], Any], behind: bytes = b"") -> Edit:
    def edit(folder: Path) -> None:
        raw, data = split(folder)
        table = json.loads(raw)
        change(table)
        join(folder, json.dumps(table).encode() + behind, data)

    return edit


def entry(**changes: Any) -> Edit:
    """In the header, of the first tensor."""
    return header(lambda table: table[next(name for name in table if name != "__metadata__")].update(changes))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1000000\n"


def weights(content: bytes) -> Edit:
    return lambda folder: (folder / WEIGHTS_NAME).write_bytes(content)


def linked(target: str) -> Edit:
    """The weights are a link."""

    def edit(folder: Path) -> None:
        (folder / WEIGHTS_NAME).rename(folder / "kept")
        (folder / WEIGHTS_NAME).symlink_to(target)

    return edit


def piped(folder: Path) -> None:
    (folder / WEIGHTS_NAME).unlink()
    os.mkfifo(folder / WEIGHTS_NAME)


def sharded(folder: Path) -> None:
    (folder / WEIGHTS_NAME).rename(folder / "adapter_model-00001-of-00002.safetensors")
    (folder / f"{WEIGHTS_NAME}.index.json").write_text('{"weight_map": {}}')


def of_all_dtypes(found: Tensors) -> Tensors:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return {name: tensor.to(dtypes[i % 4]) for i, (name, tensor) in enumerate(found.items())}


Case = tuple[str, Edit, str]
"""(variant of the fuzzer's, what is done to it, "code: words" or SERVED)."""

CASES: dict[str, Case] = {
    # scales
    "a pattern from the start": ("plain", config(alpha_pattern={"^model.layers.0.self_attn.q_proj": 3}), SERVED),
    "a pattern from another start": ("plain", config(alpha_pattern={"^layers.0.self_attn.q_proj": 3}), SERVED),
    "half a name": ("plain", config(alpha_pattern={"proj": 3, "layers.1": 5}), SERVED),
    "alternatives": ("plain", config(alpha_pattern={"q_proj|up_proj": 3, "up_proj": 5}), SERVED),
    "an end": ("plain", config(alpha_pattern={"q_proj$": 5}), SERVED),
    "layers of a class": ("plain", config(alpha_pattern={r"layers\.[02]\..*": 7}), SERVED),
    "an alpha of 0 for one": ("plain", config(alpha_pattern={"q_proj": 0}), SERVED),
    "half an alpha, negative": ("plain", config(lora_alpha=-0.5), SERVED),
    "DoRA with alphas of its own": ("DoRA", config(alpha_pattern={"down_proj": 9}, use_rslora=True), SERVED),
    # numbers
    "a dtype for each tensor": ("DoRA", tensors(of_all_dtypes), SERVED),
    "negative magnitudes": ("DoRA", changed("magnitude", torch.neg), SERVED),
    "no magnitude": ("DoRA", changed("magnitude", torch.zeros_like), SERVED),
    "untrained": ("plain", changed("lora_B", torch.zeros_like), SERVED),
    "denormal": ("plain", changed("lora_B", lambda t: t * 1e-40), SERVED),
    "NaN of the other sign": ("plain", changed("up_proj.lora_B", lambda t: t * -torch.nan), "adapter_invalid: NaN"),
    "beyond float32": ("plain", changed("lora_A", lambda t: t.double() * 1e200), "adapter_invalid: too large for"),
    "int8": ("plain", changed("lora_A", lambda t: t.to(torch.int8)), "adapter_unsupported: I8"),
    "fp8": ("plain", changed("lora_A", lambda t: t.to(torch.float8_e4m3fn)), "adapter_unsupported: F8_E4M3"),
    "transposed": ("plain", changed("lora_A", torch.t), "adapter_invalid: they must be [r, in]"),
    "a convolution": ("plain", changed("lora_A", lambda t: t[..., None, None]), "adapter_invalid: must be [r, in]"),
    # options
    "all that is off": ("plain", config(use_a=False, use_b=None, use_c={}, d_config={}, e_config=None, f=1), SERVED),
    "an option of numbers": ("plain", config(use_moon={"n": 2}), "adapter_unsupported: use_moon is {'n': 2}"),
    "an option of text": ("plain", config(use_moon="yes"), "adapter_unsupported: use_moon is 'yes'"),
    "an unknown beginning": ("plain", config(init_lora_weights="moon"), "adapter_unsupported: init_lora_weights is"),
    "a list of beginnings": ("plain", config(init_lora_weights=["pissa"]), "adapter_invalid: init_lora_weights is"),
    "r is 2.0": ("plain", config(r=2.0), "adapter_invalid: r is 2.0"),
    "rsLoRA is 1": ("plain", config(use_rslora=1), "adapter_invalid: use_rslora is 1"),
    "a rank of 0": ("plain", config(rank_pattern={"q_proj": 0}), "adapter_invalid: rank_pattern"),
    "biases lost": ("bias", without(".bias"), "adapter_invalid: the file has no bias of"),
    "one bias lost": ("bias", without("1.self_attn.q_proj.bias"), "adapter_invalid: no bias of 'model.layers.1.self"),
    "lone digits": (
        "plain",
        raw_config(b'{"peft_type":"LORA","r":2,"lora_alpha":' + b"9" * 5000 + b"}"),
        "adapter_inv",
    ),
    "half a character": (
        "plain",
        raw_config(b'{"peft_type":"\\ud800","r":2,"lora_alpha":2}'),
        "adapter_unsupported: p",
    ),
    "UTF-16": ("plain", raw_config('{"peft_type":"LORA"}'.encode("utf-16")), "adapter_invalid: not valid JSON"),
    "a comma too many": ("plain", raw_config(b'{"peft_type":"LORA","r":2,"lora_alpha":2,}'), "adapter_invalid: valid"),
    # names
    "DDP": ("plain", renamed("base_model", "module.base_model"), SERVED),
    "DDP twice": ("plain", renamed("base_model", "module.module.base_model"), "adapter_mismatch: module.base_model"),
    "a layer 00": ("plain", renamed("layers.0.", "layers.00."), "adapter_mismatch: layers.00"),
    "a layer -0": ("plain", renamed("layers.0.", "layers.-0."), "adapter_mismatch: layers.-0"),
    "twice, once compiled": ("plain", also("model.layers", "_orig_mod.model.layers"), "adapter_invalid: are both the"),
    "twice, once bare": ("plain", also("base_model.model.model.", ""), "adapter_invalid: are both"),
    "two adapters": ("plain", also(".weight", ".other.weight"), "adapter_invalid: are both the"),
    "right to left": ("plain", renamed("q_proj.lora_A", "q_proj\u202e.lora_A"), "adapter_invalid: other half"),
    "a script": ("plain", also(f"{LAYER}self_attn.q_proj", "<script>\n"), "adapter_mismatch: <script>"),
    "a buffer": ("plain", also(f"{LAYER}mlp.up_proj.lora_A.weight", "x.inv_freq"), "adapter_unsupported: inv_freq"),
    # files
    "spaces behind the header": ("plain", header(lambda table: None, b" " * 37), SERVED),
    "a link beside": ("plain", linked("kept"), SERVED),
    "a link out": ("plain", linked("/etc/hostname"), "adapter_invalid: is missing"),
    "a link to a device": ("plain", linked("/dev/zero"), "adapter_invalid: is missing"),
    "a pipe": ("plain", piped, "adapter_invalid: not a regular file"),
    "shards": ("plain", sharded, "adapter_invalid: is missing"),
    "a web page": ("plain", weights(b"<html>Not found</html>" * 9), "adapter_invalid: Is it safetensors?"),
    "a pointer": ("plain", weights(LFS), "adapter_invalid: is a Git LFS pointer, not the file"),
    "no pointer": ("plain", weights(LFS.replace(b"git-lfs", b"get-lfs")), "adapter_invalid: Is it safetensors?"),
    "a pointer as config": ("plain", raw_config(LFS), "adapter_invalid: is a Git LFS pointer, not the file"),
    "offsets below 0": ("plain", entry(data_offsets=[-4, 4]), "adapter_invalid: offsets"),
    "sides of 2^40": ("plain", entry(shape=[2**40, 2**40]), "adapter_invalid: needs"),
    "sides that are fractions": ("plain", entry(shape=[2.0, 48]), "adapter_invalid: shape"),
    "metadata of numbers": (
        "plain",
        header(lambda table: table.update(__metadata__={"a": 1})),
        "adapter_invalid: meta",
    ),
}


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Fuzzer(tmp_path_factory.mktemp("hand-made"))
    torch.set_num_threads(before)


@pytest.mark.parametrize(("variant", "edit", "refusal"), CASES.values(), ids=CASES.keys())
def test_it_is_served_as_peft_does_or_refused_by_name(
    fuzzer: Fuzzer, tmp_path: Path, variant: str, edit: Edit, refusal: str
) -> None:
    folder = Path(shutil.copytree(fuzzer.pristine[variant], tmp_path / "adapters" / "a"))
    edit(folder)
    outcome = fuzzer.outcome(folder)
    if not refusal:
        assert not isinstance(outcome, PunicaError), outcome.message
        fuzzer.compare(folder, outcome)
        return
    assert isinstance(outcome, PunicaError)
    code, _, words = refusal.partition(": ")
    assert outcome.code.startswith(code)
    assert words in outcome.message
    assert str(tmp_path) not in outcome.message


def test_another_scale_would_be_seen(fuzzer: Fuzzer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, edit, _ = CASES["layers of a class"]
    folder = Path(shutil.copytree(fuzzer.pristine[variant], tmp_path / "adapters" / "a"))
    edit(folder)
    monkeypatch.setattr(
        "punica_core.adapters.peft_config.LoraSettings.alpha_of", lambda settings, path: settings.lora_alpha
    )
    outcome = fuzzer.outcome(folder)
    assert not isinstance(outcome, PunicaError)
    with pytest.raises(AssertionError, match="from PEFT"):
        fuzzer.compare(folder, outcome)
