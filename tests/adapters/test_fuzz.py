"""Mutated adapter folders: each is served exactly as its bytes say or refused by an AdapterError, never anything else.

A failure prints its seed: `mutate(folder, random.Random(seed))` makes the same folder again.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from punica_core.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from punica_core.adapters.format import ModelShapes
from punica_core.errors import AdapterError
from punica_core.lora.weights import AdapterWeights, load_adapter
from tests.support.peft_adapters import adapter_ref, linear_shapes, save_peft_adapter, tiny_llama

NUM_SEEDS = 200
HOSTILE_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**64, 10**40, 1.5, -0.0, "", "8", "LORA", "\0", "é" * 50, [], [1], {}),
    *({"q_proj": 8}, {"(": 1}, {"a|b": 2}, [[[[]]]], "x" * 5000, [0, 4], [4, 0], [2**63, 1], "F32", "BF16", "I64"),
]


def mutate(folder: Path, rng: random.Random) -> None:
    """One to three random faults of random kinds."""
    for _ in range(rng.randint(1, 3)):
        rng.choice(FAULTS)(folder, rng)


def split(folder: Path) -> tuple[bytes, bytes]:
    raw = (folder / WEIGHTS_NAME).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return raw[8:end], raw[end:]


def join(folder: Path, header: bytes, data: bytes) -> None:
    (folder / WEIGHTS_NAME).write_bytes(struct.pack("<Q", len(header)) + header + data)


def flip_bytes(raw: bytes, rng: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_in_config(folder: Path, rng: random.Random) -> None:
    path = folder / CONFIG_NAME
    path.write_bytes(flip_bytes(path.read_bytes(), rng))


def flip_in_header(folder: Path, rng: random.Random) -> None:
    header, data = split(folder)
    join(folder, flip_bytes(header, rng), data)


def flip_anywhere(folder: Path, rng: random.Random) -> None:
    path = folder / WEIGHTS_NAME
    path.write_bytes(flip_bytes(path.read_bytes(), rng))


def cut(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice([CONFIG_NAME, WEIGHTS_NAME])
    raw = path.read_bytes()
    path.write_bytes(raw[: rng.randrange(len(raw) + 1)] + rng.choice([b"", b"", b"\0" * 7]))


def change_config_value(folder: Path, rng: random.Random) -> None:
    def change(config: dict[str, Any]) -> None:
        config[rng.choice([*config, "r", "lora_alpha", "future"])] = rng.choice(HOSTILE_VALUES)

    edit_json(folder / CONFIG_NAME, change)


def drop_config_key(folder: Path, rng: random.Random) -> None:
    edit_json(folder / CONFIG_NAME, lambda config: config.pop(rng.choice([*config, "r"]), None))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    try:
        config = json.loads(path.read_bytes())
        change(config)
    except (ValueError, LookupError, AttributeError, TypeError):
        return  # an earlier fault left nothing to change
    path.write_text(json.dumps(config))


def change_entry(folder: Path, rng: random.Random) -> None:
    def change(table: dict[str, Any]) -> None:
        entry = table[rng.choice(sorted(table))]
        entry[rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(HOSTILE_VALUES)

    edit_header(folder, change)


def rename_tensor(folder: Path, rng: random.Random) -> None:
    old, new = rng.choice(
        [
            ("base_model.model.", ""),
            (".weight", ".default.weight"),
            ("lora_A", "lora_B"),
            ("lora_A", "lora_embedding_A"),
            ("layers.0", "layers.7"),
            ("q_proj", "qkv_proj"),
            ("up_proj", "gate_proj"),
            ("model", ""),
        ]
    )

    def change(table: dict[str, Any]) -> None:
        chosen = [rng.choice(sorted(table))] if rng.random() < 0.5 else sorted(table)
        for name in chosen:
            table[name.replace(old, new)] = table.pop(name)

    edit_header(folder, change)


def reorder_tensors(folder: Path, rng: random.Random) -> None:
    """Not a fault: the order of the header's entries means nothing."""

    def change(table: dict[str, Any]) -> None:
        for name in rng.sample(sorted(table), len(table)):
            table[name] = table.pop(name)

    edit_header(folder, change)


def edit_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header, data = split(folder)
    try:
        table = json.loads(header)
        change(table)
    except (ValueError, LookupError, AttributeError, TypeError):
        return
    join(folder, json.dumps(table).encode(), data)


FAULTS = [
    flip_in_config,
    flip_in_header,
    flip_anywhere,
    cut,
    change_config_value,
    drop_config_key,
    change_entry,
    rename_tensor,
    reorder_tensors,
]


def assert_served_as_the_bytes_say(weights: AdapterWeights, folder: Path, shapes: ModelShapes) -> None:
    """Against other readers of the same files: the safetensors library and json."""
    tensors = load_file(folder / WEIGHTS_NAME)
    config = json.loads((folder / CONFIG_NAME).read_text())
    by_name = {name.removeprefix("base_model.model.").replace(".default.", "."): t for name, t in tensors.items()}
    assert len(by_name) == 2 * len(weights.modules)
    for path, module in weights.modules.items():
        a, b = by_name[f"{path}.lora_A.weight"], by_name[f"{path}.lora_B.weight"]
        assert torch.equal(module.a, a.float())
        assert torch.equal(module.b, b.float())
        assert (a.shape[1], b.shape[0]) == shapes[path]
        alpha = next((value for key, value in (config.get("alpha_pattern") or {}).items() if key in path), None)
        alpha = config["lora_alpha"] if alpha is None else alpha
        rank = a.shape[0]
        assert module.scale == pytest.approx(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
        assert torch.isfinite(module.a).all()
        assert torch.isfinite(module.b).all()


def outcome(folder: Path, shapes: ModelShapes) -> AdapterWeights | AdapterError:
    try:
        return load_adapter(adapter_ref(folder), shapes, torch.float32, 256)
    except AdapterError as error:
        return error


def check_seed(seed: int, folder: Path, shapes: ModelShapes) -> bool:
    """Whether the mutated adapter was served; anything but served right or refused raises."""
    mutate(folder, random.Random(seed))
    result = outcome(folder, shapes)
    if isinstance(result, AdapterError):
        assert 0 < len(result.message) < 1000
        assert str(folder.parent) not in result.message
        return False
    assert_served_as_the_bytes_say(result, folder, shapes)
    return True


def test_mutated_adapters_are_served_right_or_refused(tmp_path: Path) -> None:
    base = tiny_llama(num_layers=1)
    shapes = linear_shapes(base)
    pristine = save_peft_adapter(tmp_path / "pristine", base, r=2, target_modules=["q_proj", "up_proj"])
    served = 0
    for seed in range(NUM_SEEDS):
        folder = Path(shutil.copytree(pristine, tmp_path / f"seed{seed}"))
        try:
            served += check_seed(seed, folder, shapes)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        shutil.rmtree(folder)
    assert NUM_SEEDS // 10 < served < NUM_SEEDS // 2, f"{served} of {NUM_SEEDS} served: the faults are not mixed well"
