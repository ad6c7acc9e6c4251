"""Adapters for benchmarks: random weights on all linears of a model, made in memory, or written as PEFT folders.

    python -m punica_core.bench.synthetic OUT --model llama-3.1-8b --adapters 64 --lora-ranks 16

writes a model folder with a tokenizer and without weights (serve it with --load-format dummy) and OUT/adapters.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import torch
from blake3 import blake3
from safetensors.torch import save_file

from punica_core.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from punica_core.bench.shapes import LinearShapes, is_in_a_layer, linear_shapes, model_folder, write_tokenizer
from punica_core.lora.tables import ModuleWeights
from punica_core.lora.weights import ALIGNMENT_BYTES, AdapterWeights
from punica_core.ops.layout import row_pitch
from punica_core.protocol import AdapterRef, FileSignature
from punica_core.stdout import until_unread

STD: Final = 0.03
SCALE: Final = 2.0
"""Of the matrices, and alpha / r: an adapter then changes each product of a random model by a third or so."""

_BLOCK_ELEMENTS: Final = (1 << 22) - 3
"""Random numbers that are drawn; adapters repeat them, each from a place of its own. Odd, so that no two matrices of an
adapter begin at the same place either."""


class SyntheticAdapters:
    """`count` adapters; the i-th has lora_rank lora_ranks[i % len(lora_ranks)] and weights of its own.

    `open` stands in the place of `AdapterReader`. Equal arguments give equal adapters.
    """

    def __init__(self, count: int, lora_ranks: Sequence[int], *, seed: int = 0) -> None:
        self.lora_ranks = tuple(lora_ranks[index % len(lora_ranks)] for index in range(count))
        self.refs = tuple(_ref(index, lora_rank, seed) for index, lora_rank in enumerate(self.lora_ranks))
        self._index_of = {ref: index for index, ref in enumerate(self.refs)}
        self._block = functools.lru_cache(maxsize=2)(functools.partial(_random_block, seed))

    def open(
        self, ref: AdapterRef, shapes: LinearShapes, dtype: torch.dtype, max_lora_rank: int
    ) -> SyntheticAdapterSource:
        """See `OpenAdapter`."""
        index = self._index_of[ref]
        return SyntheticAdapterSource(
            ref, _in_layers(shapes), self.lora_ranks[index], index, functools.partial(self._block, dtype), dtype
        )

    def arena_bytes(self, shapes: LinearShapes, itemsize: int) -> int:
        """What all of them take on a device of a model with these linears, and more than they take on the host."""
        linears = _in_layers(shapes).values()
        per_rank = {
            lora_rank: sum(
                row_pitch(lora_rank * fan_in) + row_pitch(fan_out * row_pitch(lora_rank)) + ALIGNMENT_BYTES
                for fan_in, fan_out in linears
            )
            for lora_rank in set(self.lora_ranks)
        }
        return itemsize * sum(per_rank[lora_rank] for lora_rank in self.lora_ranks)


class SyntheticAdapterSource:
    """Implements `AdapterSource` for the index-th adapter. random_block: the numbers that all of them repeat."""

    def __init__(
        self,
        ref: AdapterRef,
        shapes: LinearShapes,
        lora_rank: int,
        index: int,
        random_block: Callable[[], torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        self._ref = ref
        self._shapes = shapes
        self._lora_rank = lora_rank
        self._index = index
        self._random_block = random_block
        self._dtype = dtype
        self._step: int = ALIGNMENT_BYTES // dtype.itemsize
        sizes = [self._aligned(lora_rank * width) for pair in shapes.values() for width in pair]
        self._elements = sum(sizes)
        self.nbytes = self._elements * dtype.itemsize

    def read(self, progress: Callable[[], None] = lambda: None) -> AdapterWeights:
        buffer = torch.empty(self._elements, dtype=self._dtype)
        _fill(buffer, self._random_block(), 7919 * self._index)
        progress()
        modules: dict[str, ModuleWeights] = {}
        start = 0
        for path, (fan_in, fan_out) in self._shapes.items():
            a, start = self._matrix(buffer, start, self._lora_rank, fan_in)
            b, start = self._matrix(buffer, start, fan_out, self._lora_rank)
            modules[path] = ModuleWeights(a, b, SCALE)
        key = blake3(f"{self._ref.name} {self._ref.path} {self._lora_rank} {self._dtype}".encode()).hexdigest()
        return AdapterWeights(key, MappingProxyType(modules), self.nbytes)

    def _matrix(self, buffer: torch.Tensor, start: int, height: int, width: int) -> tuple[torch.Tensor, int]:
        elements = height * width
        return buffer[start : start + elements].view(height, width), start + self._aligned(elements)

    def _aligned(self, elements: int) -> int:
        return math.ceil(elements / self._step) * self._step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is open."""


def _ref(index: int, lora_rank: int, seed: int) -> AdapterRef:
    name = f"adapter-{index:03}"
    signature = FileSignature(index, lora_rank, seed, 0)
    return AdapterRef(name=name, path=f"memory:{seed}/{name}", config_signature=signature, weights_signature=signature)


def _in_layers(shapes: LinearShapes) -> dict[str, tuple[int, int]]:
    return {path: shape for path, shape in shapes.items() if is_in_a_layer(path)}


def _random_block(seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(_BLOCK_ELEMENTS, generator=generator) * STD).to(dtype)


def _fill(buffer: torch.Tensor, block: torch.Tensor, first: int) -> None:
    """Repeat `block` over `buffer`, from its element `first` (modulo its length) on."""
    at, source = 0, first % block.numel()
    while at < buffer.numel():
        size = min(buffer.numel() - at, block.numel() - source)
        buffer[at : at + size] = block[source : source + size]
        at, source = at + size, 0


def write_adapters(
    folder: Path, adapters: SyntheticAdapters, shapes: LinearShapes, dtype: torch.dtype
) -> Iterator[Path]:
    """Write each adapter as PEFT would, into a folder of its name below `folder`; yields each when it is there."""
    for ref, lora_rank in zip(adapters.refs, adapters.lora_ranks, strict=True):
        weights = adapters.open(ref, shapes, dtype, lora_rank).read()
        tensors = {}
        for path, module in weights.modules.items():
            tensors[f"base_model.model.{path}.lora_A.weight"] = module.a.clone()  # one buffer cannot be saved twice
            tensors[f"base_model.model.{path}.lora_B.weight"] = module.b.clone()
        own = folder / ref.name
        own.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": lora_rank,
            "lora_alpha": SCALE * lora_rank,
            "target_modules": sorted({path.rpartition(".")[2] for path in weights.modules}),
        }
        (own / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, own / WEIGHTS_NAME)
        yield own


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m punica_core.bench.synthetic", description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape by name, or a model folder")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--lora-ranks", type=lambda text: [int(part) for part in text.split(",")], default=[16])
    options = parser.parse_args(arguments)
    folder = model_folder(options.model, options.out)
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder, int(json.loads((folder / "config.json").read_text())["vocab_size"]))
    adapters = SyntheticAdapters(options.adapters, options.lora_ranks)
    written = list(write_adapters(options.out / "adapters", adapters, linear_shapes(folder), torch.bfloat16))
    print(f"{folder}: a model without weights; {options.out / 'adapters'}: {len(written)} adapters")
    return 0


if __name__ == "__main__":
    sys.exit(until_unread(main))
