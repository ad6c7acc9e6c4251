"""Packed adapters: they hold bit for bit what their folder computes, fit one base only, and are trusted in nothing."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from punica_core.adapters.format import ModelShapes
from punica_core.adapters.kinds import kind_of
from punica_core.adapters.packed_header import MAGIC, MAX_HEADER_BYTES, PAGE_BYTES
from punica_core.adapters.registry import AdapterRegistry
from punica_core.errors import (
    AdapterChanged,
    AdapterError,
    AdapterInvalid,
    AdapterMismatch,
    AdapterTooLarge,
    AdapterUnsupported,
    ConfigError,
)
from punica_core.lora.cache import AdapterCache
from punica_core.lora.packed import PackedReader, opener_for, write_packed
from punica_core.lora.weights import AdapterWeights, load_adapter
from punica_core.model.shapes import model_shapes
from tests.support.adapter_formats import PROMPT, tiny_phi3
from tests.support.adapter_loading import granted
from tests.support.driven_runner import DrivenRunner
from tests.support.peft_adapters import adapter_ref, edit_tensors, packed_ref, save_peft_adapter, tiny_llama

FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd ranks": {"r": 3, "rank_pattern": {"q_proj": 1, "down_proj": 33}, "use_rslora": True},
    "the head too": {"r": 5, "target_modules": ["q_proj", "lm_head"], "alpha_pattern": {"lm_head": 3}},
    "lora_bias": {"lora_bias": True, "r": 2},
}


def pack(folder: Path, file: Path, base: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Path:
    shapes = model_shapes(base)
    write_packed(str(file), load_adapter(adapter_ref(folder), shapes, dtype, 256), shapes, dtype)
    return file


def read(file: Path, shapes: ModelShapes, dtype: torch.dtype = torch.float32, max_rank: int = 256) -> AdapterWeights:
    with PackedReader(packed_ref(file), shapes, dtype, max_rank) as reader:
        weights = reader.read()
        assert weights.nbytes == reader.nbytes
    return weights


def refusal(file: Path, shapes: ModelShapes, **options: Any) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        read(file, shapes, **options)
    assert str(file.parent) not in caught.value.message, "a message must not tell the server's paths"
    assert len(caught.value.message) < 1000
    return caught.value


@pytest.fixture
def packed(saved_adapter: Path, tmp_path: Path) -> Path:
    return pack(saved_adapter, tmp_path / "A.punica", tiny_llama())


def assert_equal(one: AdapterWeights, other: AdapterWeights) -> None:
    assert list(one.modules) == list(other.modules)
    for path, module in one.modules.items():
        twin = other.modules[path]
        assert torch.equal(module.a, twin.a)
        assert torch.equal(module.b, twin.b)
        assert module.scale == twin.scale
        assert (module.bias is None) == (twin.bias is None)
        assert module.bias is None or torch.equal(module.bias, twin.bias)


def test_two_that_differ_in_numbers_alone_are_of_one_kind(packed: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin.punica"
    twin.write_bytes(packed.read_bytes()[:-4] + b"more")
    assert kind_of(packed_ref(twin)) == kind_of(packed_ref(packed))
    other = pack(save_peft_adapter(tmp_path / "other", r=3), tmp_path / "other.punica", tiny_llama())
    assert kind_of(packed_ref(other)) != kind_of(packed_ref(packed))


@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_adapter_is_its_folder(tmp_path: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", **config)
    edit_tensors(folder, lambda found: {name: t for name, t in found.items() if "base_layer" not in name})
    shapes = model_shapes(tiny_llama())
    file = pack(folder, tmp_path / "adapter.punica", tiny_llama(), dtype)
    assert_equal(read(file, shapes, dtype), load_adapter(adapter_ref(folder), shapes, dtype, 256))


def test_split_names_on_a_fused_base_are_packed_as_what_they_become(tmp_path: Path) -> None:
    base = tiny_phi3()
    folder = save_peft_adapter(tmp_path / "adapter", tiny_phi3(), target_modules=["qkv_proj", "o_proj"])
    file = pack(folder, tmp_path / "adapter.punica", base)
    assert_equal(
        read(file, model_shapes(base)), load_adapter(adapter_ref(folder), model_shapes(base), torch.float32, 256)
    )


def test_it_computes_what_its_folder_computes_beside_others(tmp_path: Path) -> None:
    folders = [save_peft_adapter(tmp_path / f"a{seed}", seed=seed, r=3, lora_bias=seed == 1) for seed in range(2)]
    driven = DrivenRunner(tiny_llama())
    shapes = driven.loaded.module_shapes
    for slot, folder in enumerate(folders):
        driven.adapters[slot] = load_adapter(adapter_ref(folder), shapes, torch.float32, 256)
        driven.adapters[slot + 2] = read(pack(folder, tmp_path / f"{slot}.punica", tiny_llama()), shapes)
    sequences = [driven.sequence(PROMPT, slot) for slot in (0, 2, 1, 3, -1)]
    driven.generate(sequences, 3)
    first, first_packed, second, second_packed, plain = (driven.logits_of(sequence) for sequence in sequences)
    # The same numbers, but rows of B lie farther apart, so a library may choose another order of summation.
    torch.testing.assert_close(first_packed, first, rtol=0, atol=1e-5)
    torch.testing.assert_close(second_packed, second, rtol=0, atol=1e-5)
    assert not torch.allclose(first, second, atol=0.1)
    assert not torch.allclose(first, plain, atol=0.1)


def test_the_matrices_are_views_of_one_buffer_in_the_arenas_layout(packed: Path, shapes: ModelShapes) -> None:
    weights = read(packed, shapes)
    assert weights.laid_out is not None
    for module in weights.modules.values():
        assert module.a.untyped_storage().data_ptr() == weights.laid_out.untyped_storage().data_ptr()
        assert module.b.stride() == (8, 1)


def test_the_key_is_of_the_bytes(packed: Path, shapes: ModelShapes, tmp_path: Path) -> None:
    key = read(packed, shapes).key
    copy = tmp_path / "other-name.punica"
    copy.write_bytes(packed.read_bytes())
    assert read(copy, shapes).key == key
    keys = {key}
    raw = packed.read_bytes()
    for place, new in ((len(raw) - 4, b"\1"), (PAGE_BYTES * 4, b"\1")):
        copy.write_bytes(raw[:place] + new + raw[place + 1 :])
        keys.add(read(copy, shapes).key)
    edit(packed, lambda table: table.update(config_digest="of another config"))
    keys.add(read(packed, shapes).key)
    edit(packed, lambda table: table["modules"][0].update(scale=3.0))
    keys.add(read(packed, shapes).key)
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: tiny_llama(hidden_size=128), "this one's maps 128 → 128"),
        (lambda: tiny_llama(num_kv_heads=4), r"'model.layers.0.self_attn.k_proj' maps 64 → 32"),
        (lambda: tiny_llama(num_layers=2), "it lacks 'model.layers.2.self_attn.q_proj'"),
        (lambda: tiny_llama(num_layers=4), "'model.layers.3.self_attn.q_proj', "),
    ],
    ids=["wider", "more kv heads", "fewer layers", "more layers"],
)
def test_another_base_is_refused(packed: Path, other: Callable[[], torch.nn.Module], words: str) -> None:
    error = refusal(packed, model_shapes(other()))
    assert isinstance(error, AdapterMismatch)
    assert words in error.message


def test_a_rank_above_the_limit_is_refused(packed: Path, shapes: ModelShapes) -> None:
    assert "rank 8 > max 7" in refusal(packed, shapes, max_rank=7).message
    assert read(packed, shapes, max_rank=8).modules


def test_numbers_that_are_not_finite_are_refused(packed: Path, shapes: ModelShapes) -> None:
    raw = bytearray(packed.read_bytes())
    raw[-4:] = b"\0\0\xc0\x7f"
    packed.write_bytes(raw)
    assert "NaN or infinite" in refusal(packed, shapes).message


def test_numbers_too_large_for_the_models_dtype_are_refused(packed: Path, shapes: ModelShapes) -> None:
    raw = bytearray(packed.read_bytes())
    raw[-4:] = torch.tensor([1e30]).numpy().tobytes()
    packed.write_bytes(raw)
    assert "too large for torch.float16" in refusal(packed, shapes, dtype=torch.float16).message


def test_a_file_that_changes_is_not_read(packed: Path, shapes: ModelShapes) -> None:
    ref = packed_ref(packed)
    os.utime(packed, (1, 1))
    with pytest.raises(AdapterChanged):
        PackedReader(ref, shapes, torch.float32, 256)


def test_nothing_is_overwritten(saved_adapter: Path, packed: Path) -> None:
    before = packed.read_bytes()
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        pack(saved_adapter, packed, tiny_llama())
    assert packed.read_bytes() == before
    assert [path.name for path in packed.parent.iterdir()] == [packed.name]


def test_a_file_system_without_links_or_without_room(
    saved_adapter: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EPERM, "no such links here")

    monkeypatch.setattr(os, "link", refuse)
    other = pack(saved_adapter, packed.with_name("other.punica"), tiny_llama())
    assert other.read_bytes() == packed.read_bytes()
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        pack(saved_adapter, other, tiny_llama())
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ConfigError, match="cannot be written: no such links here"):
        pack(saved_adapter, packed.with_name("third.punica"), tiny_llama())
    assert sorted(path.name for path in packed.parent.iterdir()) == ["A.punica", "other.punica"]


@pytest.mark.parametrize(
    "config",
    [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}],
    ids=str,
)
def test_what_needs_the_bases_numbers_is_not_packed(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = save_peft_adapter(tmp_path / "adapter", **config)
    loaded = DrivenRunner(tiny_llama()).loaded
    weights = load_adapter(adapter_ref(folder), loaded.module_shapes, torch.float32, 256, loaded.base_weights)
    with pytest.raises(AdapterUnsupported, match="Serve its folder"):
        write_packed(str(tmp_path / "x.punica"), weights, loaded.module_shapes, torch.float32)
    assert not (tmp_path / "x.punica").exists()


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    raw = file.read_bytes()
    end = 16 + int.from_bytes(raw[8:16], "little")
    return json.loads(raw[16:end]), raw[end + -end % PAGE_BYTES :]


def join(file: Path, table: object, data: bytes) -> None:
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    head = MAGIC + len(raw).to_bytes(8, "little") + raw
    file.write_bytes(head + bytes(-len(head) % PAGE_BYTES) + data)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table, data = split(file)
    change(table)
    join(file, table, data)


HOSTILE_HEADERS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "more elements": ("is truncated", lambda t: t.update(num_elements=t["num_elements"] + 8)),
    "fewer elements": ("something behind", lambda t: t.update(num_elements=t["num_elements"] - 8)),
    "2^62 elements": ("num_elements", lambda t: t.update(num_elements=2**62)),
    "no elements": ("num_elements", lambda t: t.update(num_elements=0)),
    "elements of text": ("num_elements", lambda t: t.update(num_elements="8")),
    "another dtype of the size": ("something behind|truncated", lambda t: t.update(dtype="BF16")),
    "unknown dtype": ("dtype", lambda t: t.update(dtype="I8")),
    "dtype list": ("dtype", lambda t: t.update(dtype=["F32"])),
    "rank 2^40": ("lora_rank", lambda t: t["modules"][0].update(lora_rank=2**40)),
    "rank 0": ("lora_rank", lambda t: t["modules"][0].update(lora_rank=0)),
    "rank true": ("lora_rank", lambda t: t["modules"][0].update(lora_rank=True)),
    "other rank": ("modules take", lambda t: t["modules"][0].update(lora_rank=200)),
    "scale of text": ("scale", lambda t: t["modules"][0].update(scale="2")),
    "scale 1e300": ("scale", lambda t: t["modules"][0].update(scale=1e300)),
    "scale 10^400": ("scale", lambda t: t["modules"][0].update(scale=10**400)),
    "bias of a number": ("has_bias", lambda t: t["modules"][0].update(has_bias=1)),
    "a bias that is not there": ("modules take", lambda t: t["modules"][0].update(has_bias=True)),
    "path that the base lacks": ("path", lambda t: t["modules"][0].update(path="model.x")),
    "path list": ("path", lambda t: t["modules"][0].update(path=[])),
    "module twice": ("named once", lambda t: t["modules"].append(t["modules"][0])),
    "no modules": ("modules", lambda t: t.update(modules=[])),
    "modules object": ("modules", lambda t: t.update(modules={})),
    "module list": ("modules", lambda t: t["modules"].append([])),
    "a key more": ("exactly", lambda t: t.update(adapter_key="abc")),
    "a key less": ("exactly", lambda t: t.pop("base")),
    "base empty": ("base", lambda t: t.update(base={})),
    "base shape of three": ("base", lambda t: t["base"].update({"model.x": [1, 2, 3]})),
    "base shape negative": ("base", lambda t: t["base"].update({"model.x": [1, -2]})),
    "base with a long name": ("base", lambda t: t["base"].update({"x" * 5000: [1, 2]})),
    "another base": ("'extra' is not there|lacks 'extra'", lambda t: t["base"].update({"extra": [1, 2]})),
    "digest of a megabyte": ("config_digest", lambda t: t.update(config_digest="x" * 1_000_000)),
}


@pytest.mark.parametrize(("words", "change"), HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS.keys())
def test_a_hostile_header_is_refused(
    packed: Path, shapes: ModelShapes, words: str, change: Callable[[dict[str, Any]], object]
) -> None:
    edit(packed, change)
    error = refusal(packed, shapes)
    assert isinstance(error, AdapterInvalid | AdapterMismatch)
    assert any(word in error.message for word in words.split("|")), error.message


def test_a_header_out_of_bounds_is_refused(packed: Path, shapes: ModelShapes) -> None:
    table, data = split(packed)
    raw = packed.read_bytes()
    for length in (2**60, MAX_HEADER_BYTES + 1, MAX_HEADER_BYTES):
        packed.write_bytes(raw[:8] + length.to_bytes(8, "little") + raw[16:])
        error = refusal(packed, shapes)
        assert isinstance(error, AdapterInvalid)
        assert "truncated" in error.message
    packed.write_bytes(raw[:8] + (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + raw[16:])
    os.truncate(packed, MAX_HEADER_BYTES + 2 * PAGE_BYTES)
    assert isinstance(refusal(packed, shapes), AdapterTooLarge)
    packed.write_bytes(raw[:7] + b"\2" + raw[8:])
    assert "format 2, this server reads 1" in refusal(packed, shapes).message
    packed.write_bytes(b"safetens" + raw[8:])
    assert "not a packed adapter" in refusal(packed, shapes).message
    for header in (b"[]", b"{", b'{"dtype": NaN}', b"\xff", b"[" * 100_000, b'{"a":1,"a":2}'):
        join(packed, header, data)
        assert isinstance(refusal(packed, shapes), AdapterInvalid)
    join(packed, table, data)
    assert read(packed, shapes).modules, "unchanged it is served"


@pytest.mark.parametrize(("server", "words"), [("git-lfs", "a Git LFS pointer"), ("get-lfs", "not a packed adapter")])
def test_a_pointer_of_git_lfs_is_called_that(packed: Path, shapes: ModelShapes, server: str, words: str) -> None:
    packed.write_text(f"version https://{server}.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1000\n")
    error = refusal(packed, shapes)
    assert isinstance(error, AdapterInvalid)
    assert words in error.message


def test_cut_anywhere_or_grown_it_is_refused(packed: Path, shapes: ModelShapes) -> None:
    raw = packed.read_bytes()
    for size in (0, 1, 8, 15, 16, 17, 1000, PAGE_BYTES, PAGE_BYTES * 2, len(raw) // 2, len(raw) - 1):
        packed.write_bytes(raw[:size])
        assert isinstance(refusal(packed, shapes), AdapterInvalid)
    packed.write_bytes(raw + b"\0")
    assert "something behind" in refusal(packed, shapes).message
    end = 16 + int.from_bytes(raw[8:16], "little")
    packed.write_bytes(raw[:end] + b"\1" + raw[end + 1 :])
    assert "between its header and its elements" in refusal(packed, shapes).message


def outcome(file: Path, shapes: ModelShapes) -> AdapterWeights | AdapterError:
    try:
        return read(file, shapes)
    except AdapterError as error:
        return error


def test_flips_are_refused_or_served_as_they_say(packed: Path, shapes: ModelShapes) -> None:
    raw = packed.read_bytes()
    original = read(packed, shapes)
    end = 16 + int.from_bytes(raw[8:16], "little")
    served = 0
    for seed in range(200):
        rng = random.Random(seed)
        changed = bytearray(raw)
        place = rng.randrange(end) if seed % 2 else rng.randrange(end, len(raw))
        changed[place] ^= 1 << rng.randrange(8)
        packed.write_bytes(changed)
        result = outcome(packed, shapes)
        if isinstance(result, AdapterWeights):
            served += 1
            assert result.key != original.key, f"seed {seed}: another file has the same key"
    assert 60 < served < 140, "flips of elements are served, flips of the header mostly not"


def test_the_server_finds_and_loads_it_under_its_stem(packed: Path, shapes: ModelShapes) -> None:
    registry = AdapterRegistry(packed.parent, {"base"})
    assert registry.names() == ["A"]
    cache = AdapterCache(shapes, torch.float32, 10_000_000, open_adapter=opener_for(None))
    try:
        weights = cache.weights(granted(cache, registry.resolve("A")).slot)
    finally:
        cache.close()
    assert weights.key == read(packed, shapes).key
