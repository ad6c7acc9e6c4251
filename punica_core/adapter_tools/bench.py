"""`punica adapters bench`: what bringing an adapter to the GPU costs the host, from its folder and from a packed file.

From opening the files to all bytes in page-locked memory in the arena's layout, the device's copy left out. A folder
is read into memory of its own and laid out in the GPU tier's buffers; a packed file is read into landing memory, or, if
that is full, into memory of its own and copied to the buffers. Then the same without hashing and the search for NaN:
that is the copy, and the difference is the price of verifying.

The adapter is random, in the shapes of a Llama-like base; files are read out of the page cache, in turns. Buffers and
landing memory are there and were used before, as in a server; on a CPU they are ordinary memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from punica_core.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from punica_core.adapters.locate import ref_of
from punica_core.adapters.report_text import size
from punica_core.lora import tensor_reader
from punica_core.lora.arena_layout import Run, lay_out
from punica_core.lora.arena_writer import ArenaWriter
from punica_core.lora.landing import LandingMemory
from punica_core.lora.packed import PackedReader, write_packed
from punica_core.lora.tables import AdapterTables, Arena, shape_of
from punica_core.lora.weights import AdapterReader, AdapterWeights, load_adapter

Shapes = Mapping[str, tuple[int, int]]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_RANK = 256


def add_to(names: Any) -> None:
    """Add the action and its flags."""
    parser = names.add_parser("bench", help="loading from a folder beside loading a packed file", description=__doc__)
    parser.add_argument("--rank", type=int, default=16, help="of all modules (default: 16)")
    parser.add_argument("--hidden", type=int, default=4096, help="width of the base (default: 4096)")
    parser.add_argument("--intermediate", type=int, default=14336, help="width of its MLP (default: 14336)")
    parser.add_argument("--kv-width", type=int, default=1024, help="outputs of k and v (default: 1024)")
    parser.add_argument("--layers", type=int, default=32, help="of the base (default: 32)")
    parser.add_argument("--file-dtype", choices=_DTYPES, default="float32", help="of the folder (default: float32)")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the model (default: bfloat16)")
    parser.add_argument("--device", default="cpu", help="whose memory is page-locked: cpu or cuda (default: cpu)")
    parser.add_argument("--repeats", type=int, default=9, help="of each measurement (default: 9)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, source="bench")


def run(options: argparse.Namespace) -> int:
    """Measure and print. Exit code 0."""
    shapes = _shapes(options)
    with tempfile.TemporaryDirectory(prefix="punica-bench-") as folder:
        _save(folder, shapes, options)
        figures = _measure(folder, shapes, _DTYPES[options.dtype], options.device, options.repeats)
    figures |= {"options": {k: v for k, v in vars(options).items() if isinstance(v, int | str) and k != "source"}}
    print(json.dumps(figures, indent=2) if options.json else _text(figures))
    return 0


def _measure(folder: str, shapes: Shapes, dtype: torch.dtype, device: str, repeats: int) -> dict[str, Any]:
    ref = ref_of(folder)
    file = os.path.join(folder, "packed.punica")
    weights = load_adapter(ref, shapes, dtype, _MAX_RANK)
    write_packed(file, weights, shapes, dtype)
    packed_ref = ref_of(file)
    brought = _Brought(weights, dtype, device)

    def from_folder() -> None:
        with AdapterReader(ref, shapes, dtype, _MAX_RANK) as reader:
            brought.write(reader.read())

    def from_packed(into: torch.Tensor | None) -> None:
        with PackedReader(packed_ref, shapes, dtype, _MAX_RANK) as reader:
            brought.write(reader.read(into=into))

    ways: dict[str, Callable[[], None]] = {
        "folder": from_folder,
        "packed": lambda: from_packed(brought.landing),
        "packed, no room to land": lambda: from_packed(None),
    }
    seconds, unverified = _in_turns([ways, {name: _unverified(way) for name, way in ways.items()}], repeats)
    sources = {
        name: {
            "load_ms": 1000 * seconds[name],
            "copy_ms": 1000 * unverified[name],
            "verify_ms": 1000 * (seconds[name] - unverified[name]),
        }
        for name in ways
    }
    ratios = {
        name: {key.removesuffix("_ms"): sources["folder"][key] / values[key] for key in ("load_ms", "copy_ms")}
        for name, values in sources.items()
        if name != "folder"
    }
    bytes_of = {name: (ref if name == "folder" else packed_ref).weights_signature.size for name in ways}
    return {"sources": sources, "ratios": ratios, "bytes": bytes_of, "load_average": os.getloadavg()[0]}


class _Brought:
    """The GPU tier's way for one adapter after the other, up to the device's copy. landing: of the adapter's size."""

    def __init__(self, weights: AdapterWeights, dtype: torch.dtype, device: str) -> None:
        layout = lay_out({path: shape_of(module) for path, module in weights.modules.items()})
        arena = Arena(0, dtype=dtype, device=device)
        self._writer = _NothingSent(arena, AdapterTables(len(weights.modules), 1, device=device))
        self._runs = (Run(0, layout.num_elements, 0),)
        self.landing = LandingMemory(
            layout.num_elements * dtype.itemsize, dtype=dtype, page_locked=arena.buffer.device.type == "cuda"
        ).buffer

    def write(self, weights: AdapterWeights) -> None:
        modules = dict(enumerate(weights.modules.values()))
        layout = lay_out({index: shape_of(module) for index, module in modules.items()})
        self._writer.write(0, modules, layout, self._runs, laid_out=weights.laid_out, landed=weights.landed)


class _NothingSent(ArenaWriter):
    def _copy(self, *arguments: object) -> None:
        pass


def _in_turns(groups: Sequence[Mapping[str, Callable[[], object]]], repeats: int) -> list[dict[str, float]]:
    """Median seconds of processor time of each, after one run that is not counted. On one thread and out of the page
    cache nothing waits, so this is what it takes on a machine that does nothing else."""
    times: list[dict[str, list[float]]] = [{name: [] for name in cases} for cases in groups]
    for repeat in range(repeats + 1):
        for cases, found in zip(groups, times, strict=True):
            for name, case in cases.items():
                start = time.thread_time()
                case()
                if repeat:
                    found[name].append(time.thread_time() - start)
    return [{name: statistics.median(seconds) for name, seconds in found.items()} for found in times]


def _unverified(way: Callable[[], None]) -> Callable[[], None]:
    """The same, neither hashing nor looking for numbers that are not finite."""

    def unverified() -> None:
        with (
            mock.patch.object(tensor_reader, "blake3", _NoDigest),
            mock.patch.object(tensor_reader, "_check_finite", _no_check),
        ):
            way()

    return unverified


def _no_check(*arguments: object) -> None:
    pass


class _NoDigest:
    def update(self, data: object) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


def _shapes(options: argparse.Namespace) -> Shapes:
    hidden, wide, kv = options.hidden, options.intermediate, options.kv_width
    attention = {"q_proj": (hidden, hidden), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (hidden, hidden)}
    mlp = {"gate_proj": (hidden, wide), "up_proj": (hidden, wide), "down_proj": (wide, hidden)}
    return {
        f"model.layers.{layer}.{block}.{name}": shape
        for layer in range(options.layers)
        for block, linears in (("self_attn", attention), ("mlp", mlp))
        for name, shape in linears.items()
    }


def _save(folder: str, shapes: Shapes, options: argparse.Namespace) -> None:
    """As PEFT does."""
    dtype = _DTYPES[options.file_dtype]
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for path, (in_features, out_features) in shapes.items():
        a = torch.randn(options.rank, in_features, generator=generator)
        b = torch.randn(out_features, options.rank, generator=generator)
        tensors |= {f"base_model.model.{path}.lora_A.weight": a.to(dtype)}
        tensors |= {f"base_model.model.{path}.lora_B.weight": b.to(dtype)}
    save_file(tensors, os.path.join(folder, WEIGHTS_NAME), metadata={"format": "pt"})
    with open(os.path.join(folder, CONFIG_NAME), "w") as file:
        json.dump({"peft_type": "LORA", "r": options.rank, "lora_alpha": 2 * options.rank}, file)


def _text(figures: Mapping[str, Any]) -> str:
    lines = [f"{'':24} {'file':8} {'load':>10} = {'copy':>7} + verify"]
    for name, values in figures["sources"].items():
        lines.append(
            f"{name:24} {size(figures['bytes'][name]):8} {values['load_ms']:7.1f} ms {values['copy_ms']:9.1f} "
            f"{values['verify_ms']:8.1f}"
        )
    for name, ratios in figures["ratios"].items():
        lines.append(f"{name} is faster: " + ", ".join(f"{what} {ratio:.2f}×" for what, ratio in ratios.items()))
    return "\n".join([*lines, f"load average {figures['load_average']:.1f}"])
