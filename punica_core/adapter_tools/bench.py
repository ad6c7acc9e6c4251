"""`punica adapters bench`: what loading an adapter costs, from its folder and from a packed file.

The adapter is random, in the shapes of a Llama-like base. Both are read out of the page cache, in turns, by what the
server reads with; then the same with hashing and the search for NaN left out: the difference is the price of verifying,
the rest is the copy. After it comes the copy into a laid-out buffer, as the GPU tier fills its page-locked ones.
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
    parser.add_argument("--repeats", type=int, default=9, help="of each measurement (default: 9)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, source="bench")


def run(options: argparse.Namespace) -> int:
    """Measure and print. Exit code 0."""
    shapes = _shapes(options)
    with tempfile.TemporaryDirectory(prefix="punica-bench-") as folder:
        _save(folder, shapes, options)
        figures = _measure(folder, shapes, _DTYPES[options.dtype], options.repeats)
    figures |= {"options": {k: v for k, v in vars(options).items() if isinstance(v, int | str) and k != "source"}}
    print(json.dumps(figures, indent=2) if options.json else _text(figures))
    return 0


def _measure(folder: str, shapes: Shapes, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    ref = ref_of(folder)
    file = os.path.join(folder, "packed.punica")
    write_packed(file, load_adapter(ref, shapes, dtype, _MAX_RANK), shapes, dtype)
    packed_ref = ref_of(file)

    def from_folder() -> AdapterWeights:
        with AdapterReader(ref, shapes, dtype, _MAX_RANK) as reader:
            return reader.read()

    def from_packed() -> AdapterWeights:
        with PackedReader(packed_ref, shapes, dtype, _MAX_RANK) as reader:
            return reader.read()

    readers = {"folder": from_folder, "packed": from_packed}
    seconds, unverified, laid_out = _in_turns(
        [
            readers,
            {name: _unverified(read) for name, read in readers.items()},
            {name: _arena_copy(read(), dtype) for name, read in readers.items()},
        ],
        repeats,
    )
    sources = {
        name: {
            "load_ms": 1000 * seconds[name],
            "copy_ms": 1000 * unverified[name],
            "verify_ms": 1000 * (seconds[name] - unverified[name]),
            "to_arena_ms": 1000 * laid_out[name],
        }
        for name in readers
    }
    before, after = sources["folder"], sources["packed"]
    ratios = {key.removesuffix("_ms"): before[key] / after[key] for key in ("load_ms", "copy_ms", "to_arena_ms")}
    ratios["copy and to_arena"] = (before["copy_ms"] + before["to_arena_ms"]) / (
        after["copy_ms"] + after["to_arena_ms"]
    )
    bytes_of = {"folder": ref.weights_signature.size, "packed": packed_ref.weights_signature.size}
    return {"sources": sources, "ratios": ratios, "bytes": bytes_of, "load_average": os.getloadavg()[0]}


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


def _unverified(read: Callable[[], AdapterWeights]) -> Callable[[], AdapterWeights]:
    """A reader that neither hashes nor looks for numbers that are not finite."""

    def unverified() -> AdapterWeights:
        with (
            mock.patch.object(tensor_reader, "blake3", _NoDigest),
            mock.patch.object(tensor_reader, "_check_finite", _no_check),
        ):
            return read()

    return unverified


def _no_check(*arguments: object) -> None:
    pass


class _NoDigest:
    def update(self, data: object) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


def _arena_copy(weights: AdapterWeights, dtype: torch.dtype) -> Callable[[], None]:
    """What brings an adapter from host memory into the arena, on the CPU."""
    modules = dict(enumerate(weights.modules.values()))
    layout = lay_out({index: shape_of(module) for index, module in modules.items()})
    arena = Arena(layout.num_elements, dtype=dtype)
    writer = ArenaWriter(arena, AdapterTables(len(modules), 1))
    runs = (Run(0, layout.num_elements, 0),)
    return lambda: writer.write(0, modules, layout, runs, laid_out=weights.laid_out)


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
    lines = ["         file        load  =   copy + verify   then to the arena"]
    for name, values in figures["sources"].items():
        lines.append(
            f"{name:8} {size(figures['bytes'][name]):8} {values['load_ms']:7.1f} ms {values['copy_ms']:7.1f} "
            f"{values['verify_ms']:8.1f}   {values['to_arena_ms']:7.1f} ms"
        )
    ratios = ", ".join(f"{name} {ratio:.2f}×" for name, ratio in figures["ratios"].items())
    return "\n".join([*lines, f"packed is faster: {ratios}", f"load average {figures['load_average']:.1f}"])
