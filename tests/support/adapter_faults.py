"""Random faults of adapter folders. `mutate(folder, random.Random(seed))` makes the same of the same folder again."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from punica_core.adapters.files import CONFIG_NAME, WEIGHTS_NAME

Json = dict[str, Any]

HOSTILE_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**64, 10**40, 1.5, -0.0, "", "8", "LORA", "\0", "é" * 50, [], [1], {}),
    *({"q_proj": 8}, {"(": 1}, {"a|b": 2}, [[[[]]]], "x" * 5000, [0, 4], [4, 0], [2**63, 1], "F32", "BF16", "I64"),
    *({f"m{i}": 3 for i in range(5000)}, [str(i) for i in range(5000)], {"(a*)*": 1}, {"模块": 2}, "all", "lora_only"),
]
RENAMES = [
    ("base_model.model.", ""),
    ("base_model.model.", "base_model.model.base_model.model."),
    (".weight", ".default.weight"),
    ("lora_A", "lora_B"),
    ("lora_A", "lora_embedding_A"),
    ("layers.0", "layers.7"),
    ("layers.0", "layers.1"),
    ("q_proj", "qkv_proj"),
    ("q_proj", "k_proj"),
    ("up_proj", "gate_proj"),
    ("model", ""),
    ("proj", "прој"),
    ("lora_A.weight", "lora_A.weight\u202e"),
]


def mutate(folder: Path, rng: random.Random) -> None:
    """One to three random faults of random kinds."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(FAULTS)(folder, rng)


def split(folder: Path) -> tuple[bytes, bytes]:
    """The header's JSON and the data of a weights file."""
    raw = _bytes(folder / WEIGHTS_NAME)
    end = 8 + int.from_bytes(raw[:8], "little")
    return raw[8:end], raw[end:]


def join(folder: Path, header: bytes, data: bytes) -> None:
    (folder / WEIGHTS_NAME).write_bytes(struct.pack("<Q", len(header)) + header + data)


def edit_json(path: Path, change: Callable[[Json], object]) -> None:
    """Nothing, if an earlier fault has left nothing to change."""
    try:
        config = json.loads(_bytes(path))
        change(config)
    except (ValueError, LookupError, AttributeError, TypeError):
        return
    path.write_text(json.dumps(config))


def edit_header(folder: Path, change: Callable[[Json], object]) -> None:
    header, data = split(folder)
    try:
        table = json.loads(header)
        change(table)
    except (ValueError, LookupError, AttributeError, TypeError):
        return
    join(folder, json.dumps(table).encode(), data)


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _flipped(raw: bytes, rng: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_in_config(folder: Path, rng: random.Random) -> None:
    path = folder / CONFIG_NAME
    if path.is_file():
        path.write_bytes(_flipped(path.read_bytes(), rng))


def flip_in_header(folder: Path, rng: random.Random) -> None:
    header, data = split(folder)
    join(folder, _flipped(header, rng), data)


def flip_in_data(folder: Path, rng: random.Random) -> None:
    header, data = split(folder)
    join(folder, header, _flipped(data, rng))


def cut(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice([CONFIG_NAME, WEIGHTS_NAME])
    raw = _bytes(path)
    path.write_bytes(raw[: rng.randrange(len(raw) + 1)] + rng.choice([b"", b"", b"\0" * 7]))


def change_config_value(folder: Path, rng: random.Random) -> None:
    keys = ["r", "lora_alpha", "future", "use_rslora", "bias", "rank_pattern", "alpha_pattern", "modules_to_save"]

    def change(config: Json) -> None:
        config[rng.choice([*config, *keys])] = rng.choice(HOSTILE_VALUES)

    edit_json(folder / CONFIG_NAME, change)


def drop_config_key(folder: Path, rng: random.Random) -> None:
    edit_json(folder / CONFIG_NAME, lambda config: config.pop(rng.choice([*config, "r"]), None))


def change_maths(folder: Path, rng: random.Random) -> None:
    """Not a fault: another scale."""
    values = {"lora_alpha": [1, 2.5, 64, -3], "use_rslora": [True, False], "alpha_pattern": [{"q_proj": 5}, {".*": 7}]}
    key = rng.choice(sorted(values))
    edit_json(folder / CONFIG_NAME, lambda config: config.update({key: rng.choice(values[key])}))


def change_entry(folder: Path, rng: random.Random) -> None:
    def change(table: Json) -> None:
        entry = table[rng.choice(sorted(table))]
        entry[rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(HOSTILE_VALUES)

    edit_header(folder, change)


def lie_about_size(folder: Path, rng: random.Random) -> None:
    length = rng.choice([0, 1, 7, 2**20, 2**32, 2**60, 2**64 - 1])
    (folder / WEIGHTS_NAME).write_bytes(struct.pack("<Q", length) + _bytes(folder / WEIGHTS_NAME)[8:])


def reshape(folder: Path, rng: random.Random) -> None:
    """Another shape or dtype of the same number of bytes."""

    def change(table: Json) -> None:
        entry = table[rng.choice(sorted(set(table) - {"__metadata__"}))]
        shape = entry["shape"]
        entry.update(
            rng.choice(
                [
                    {"shape": shape[::-1]},
                    {"shape": [1, *shape]},
                    {"shape": [shape[0] * shape[-1]]},
                    {"dtype": "F16", "shape": [*shape[:-1], shape[-1] * 2]},
                    {"dtype": "F64", "shape": [*shape[:-1], shape[-1] // 2]},
                    {"dtype": "I32"},
                    {"dtype": "F8_E4M3", "shape": [*shape[:-1], shape[-1] * 4]},
                ]
            )
        )

    edit_header(folder, change)


def drop_tensor(folder: Path, rng: random.Random) -> None:
    """One half of a pair, or any other tensor, goes, data and all."""

    def drop(table: Json, data: bytes) -> bytes:
        names = [name for name in table if name != "__metadata__"]
        gone = rng.choice(sorted(names))
        begin, end = table.pop(gone)["data_offsets"]
        for name in names:
            if name != gone and table[name]["data_offsets"][0] >= end:
                table[name]["data_offsets"] = [offset - end + begin for offset in table[name]["data_offsets"]]
        return data[:begin] + data[end:]

    _edit_both(folder, drop)


def add_tensor(folder: Path, rng: random.Random) -> None:
    names = [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
        "base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.foo.weight",
        "base_model.model.lm_head.weight",
        "base_model.model.model.visual.0.qkv.lora_A.weight",
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.other.weight",
        "",
        "\0",
        "x" * 600,
    ]

    def add(table: Json, data: bytes) -> bytes:
        shape = rng.choice([[1], [2, 4], [0], []])
        count = 4
        for side in shape:
            count *= side
        table[rng.choice(names)] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + count]}
        return data + bytes(count)

    _edit_both(folder, add)


def many_tensors(folder: Path, rng: random.Random) -> None:
    def add(table: Json, data: bytes) -> bytes:
        for index in range(rng.choice([3000, 60_000])):
            end = len(data) + 4 * index
            table[f"t{index}"] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
        return data + bytes(4 * index + 4)

    _edit_both(folder, add)


def repeat_name(folder: Path, rng: random.Random) -> None:
    """The header has one of its names twice."""
    header, data = split(folder)
    try:
        table = json.loads(header)
        name = rng.choice(sorted(table))
        again = json.dumps({name: table[name]})[1:]
    except (ValueError, LookupError, TypeError):
        return
    join(folder, json.dumps(table)[:-1].encode() + b", " + again.encode(), data)


def swap_data(folder: Path, rng: random.Random) -> None:
    """Not a fault where the shapes are equal: two tensors change places."""

    def change(table: Json) -> None:
        one, other = rng.sample(sorted(set(table) - {"__metadata__"}), 2)
        table[one], table[other] = table[other], table[one]

    edit_header(folder, change)


def rename_tensors(folder: Path, rng: random.Random) -> None:
    old, new = rng.choice(RENAMES)

    def change(table: Json) -> None:
        names = sorted(set(table) - {"__metadata__"})
        for name in [rng.choice(names)] if rng.random() < 0.5 else names:
            table[name.replace(old, new)] = table.pop(name)

    edit_header(folder, change)


def reorder_tensors(folder: Path, rng: random.Random) -> None:
    """Not a fault: the order of the header's entries means nothing."""

    def change(table: Json) -> None:
        for name in rng.sample(sorted(table), len(table)):
            table[name] = table.pop(name)

    edit_header(folder, change)


def put_number(folder: Path, rng: random.Random) -> None:
    """One number becomes NaN, infinite, huge, tiny or another one."""
    header, data = split(folder)
    if len(data) < 8:
        return
    place = rng.randrange(len(data) // 4) * 4
    number = struct.pack("<f", rng.choice([float("nan"), float("inf"), 3e38, 1e-40, 7.0, -0.0]))
    join(folder, header, data[:place] + number + data[place + 4 :])


def replace_file(folder: Path, rng: random.Random) -> None:
    """A link to elsewhere, to nothing or to itself, a FIFO, a folder, an empty file, no file."""
    path = folder / rng.choice([CONFIG_NAME, WEIGHTS_NAME])
    if not path.is_file():
        return
    outside = folder.parent.parent / f"outside-{path.name}"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    kind = rng.randrange(8)
    if kind < 3:
        path.symlink_to([outside, "nowhere", path][kind])
    elif kind == 3:
        os.mkfifo(path)
    elif kind == 4:
        path.mkdir()
    elif kind == 5:
        path.touch()
    elif kind == 6:
        (folder / "inside").write_bytes(outside.read_bytes())
        path.symlink_to("inside")  # not a fault


def pickle_instead(folder: Path, rng: random.Random) -> None:
    path = folder / WEIGHTS_NAME
    raw = rng.choice([b"\x80\x02}q\0.", b"PK\3\4" + bytes(100), b"\x80\x05cos\nsystem\n."])
    if rng.random() < 0.5:
        path.write_bytes(raw)
    elif path.is_file():
        path.rename(folder / "adapter_model.bin")


def _edit_both(folder: Path, change: Callable[[Json, bytes], bytes]) -> None:
    header, data = split(folder)
    try:
        table = json.loads(header)
        data = change(table, data)
    except (ValueError, LookupError, AttributeError, TypeError):
        return
    join(folder, json.dumps(table).encode(), data)


FAULTS: list[Callable[[Path, random.Random], None]] = [
    flip_in_config,
    flip_in_header,
    flip_in_data,
    flip_in_data,
    cut,
    change_config_value,
    change_config_value,
    drop_config_key,
    change_maths,
    change_maths,
    change_maths,
    change_entry,
    lie_about_size,
    reshape,
    drop_tensor,
    add_tensor,
    many_tensors,
    repeat_name,
    swap_data,
    swap_data,
    rename_tensors,
    rename_tensors,
    reorder_tensors,
    put_number,
    put_number,
    replace_file,
    pickle_instead,
]
