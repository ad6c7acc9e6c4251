"""Queries and keys are rotated by their positions, and keys and values land where kv_slots says, and nowhere else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from punica_core import ops
from punica_core.ops import reference
from punica_core.ops.build import source_directory
from tests.ops.emulator.rotary import ROTARY_KERNELS, emulated_rotary_append, sum_of_prefetched_bytes
from tests.support.emulation import compile_kernels
from tests.support.numerics import assert_as_exact_as_torch

BLOCKS, LAYERS, BLOCK_SIZE, LAYER = 6, 3, 16, 1
KV_SLOTS = (17, 0, -1, 95, 33, -1, 16)
POSITIONS = (1, 0, 0, 4095, 77, 0, 131071)
DTYPES = [torch.bfloat16, torch.float16]
SHAPES = {
    "multi-head 64": (4, 4, 64, 64),
    "one kv head 128": (7, 1, 128, 128),
    "grouped 128": (32, 8, 128, 128),
    "grouped 256": (8, 2, 256, 256),
    "partial": (6, 2, 128, 32),
    "narrow": (3, 3, 16, 16),
}

RotaryAppend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]


class Case:
    """Inputs of a step, poisoned outputs, and what torch makes of them. The rows of all inputs are strided."""

    def __init__(self, shape: str, dtype: torch.dtype, device: str = "cpu", kv_slots: tuple[int, ...] = KV_SLOTS):
        self.heads, self.kv_heads, head_dim, self.rotary_dim = SHAPES[shape]
        generator = torch.Generator().manual_seed(len(shape))
        rows, width = len(kv_slots), (self.heads + 2 * self.kv_heads) * head_dim
        self.qkv = torch.randn(rows, width + 8, generator=generator).to(device, dtype)[:, :width]
        angles = torch.tensor((POSITIONS * rows)[:rows])[:, None] / 10000 ** (
            torch.arange(self.rotary_dim // 2) * 2 / head_dim
        )
        angles = torch.cat((angles, angles), -1)
        both = torch.cat((1.25 * angles.cos(), 1.25 * angles.sin()), -1).to(device, dtype)
        self.cos, self.sin = both.chunk(2, -1)
        self.kv_slots = torch.tensor(kv_slots, dtype=torch.int32, device=device)
        self.cache = torch.full(
            (BLOCKS, LAYERS, 2, BLOCK_SIZE, self.kv_heads, head_dim), torch.nan, dtype=dtype, device=device
        )
        self.query = torch.full((rows, self.heads, head_dim), torch.nan, dtype=dtype, device=device)

    def run(self, rotary_append: RotaryAppend) -> None:
        rotary_append(self.query, self.cache, self.qkv, self.cos, self.sin, self.kv_slots, LAYER)

    def wanted(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as transformers computes them in `dtype`."""
        heads = self.qkv.unflatten(1, (-1, self.query.size(2))).to(dtype)
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        cos, sin = self.cos[:, None].to(dtype), self.sin[:, None].to(dtype)
        moved = apply_rotary_pos_emb(query[..., : self.rotary_dim], key[..., : self.rotary_dim], cos, sin, 0)
        whole = [torch.cat((x[0], y[..., self.rotary_dim :]), -1) for x, y in zip(moved, (query, key), strict=True)]
        return whole[0], whole[1], value

    def check(self) -> None:
        (query, key, _), same_dtype = self.wanted(torch.float64), self.wanted(self.cache.dtype)
        assert_as_exact_as_torch(self.query, query, same_dtype[0])
        cache = self.cache.clone()
        for row, slot in enumerate(self.kv_slots.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, BLOCK_SIZE)
                assert_as_exact_as_torch(cache[block, LAYER, 0, offset], key[row], same_dtype[1][row])
                assert torch.equal(cache[block, LAYER, 1, offset], same_dtype[2][row])
                kept = cache[block, LAYER, 0, offset, :, self.rotary_dim :]
                assert torch.equal(kept, same_dtype[1][row][:, self.rotary_dim :])
                cache[block, LAYER, :, offset] = torch.nan
        assert bool(cache.isnan().all())


@pytest.fixture(scope="module")
def library(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(nvcc, ROTARY_KERNELS, tmp_path_factory.mktemp("emulated") / "rotary.so")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_rotated_and_land_in_their_slots(shape: str, dtype: torch.dtype, device: str) -> None:
    case = Case(shape, dtype, device)
    case.run(ops.rotary_append)
    case.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_does_what_its_reference_does(library: Path, shape: str, dtype: torch.dtype) -> None:
    case = Case(shape, dtype)
    case.run(partial(emulated_rotary_append, library))
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("rotate<T>(upper, plain,", "rotate<T>(upper, lower,"),
        ("lower_sin, -1.0f", "lower_sin, 1.0f"),
        ("if (kv_slot < 0) return nullptr;", "if (kv_slot < 0) kv_slot = 1;"),
        ("params.cos, params.cos_stride, row, upper_column", "params.cos, params.qkv_stride, row, upper_column"),
        ("  wait_for_previous();\n", ""),
    ],
    ids=["rotated twice", "sign", "padding", "stride", "no wait"],
)
def test_a_broken_kernel_is_noticed(nvcc: str, tmp_path: Path, text: str, broken: str) -> None:
    sources = Path(shutil.copytree(source_directory(), tmp_path / "csrc"))
    path = sources / "include" / "punica" / "rotary_append.cuh"
    assert text in path.read_text()
    path.write_text(path.read_text().replace(text, broken))
    library = compile_kernels(nvcc, ROTARY_KERNELS, tmp_path / "broken.so", sources)
    case = Case("partial", torch.bfloat16)

    def run_and_check() -> None:
        case.run(partial(emulated_rotary_append, library))
        case.check()

    with pytest.raises((AssertionError, RuntimeError)):
        run_and_check()


@pytest.mark.parametrize("num_bytes", [16, 5 * (16 << 10), 64 * (16 << 10) + 48])
def test_what_is_read_soon_is_asked_for_once(library: Path, num_bytes: int) -> None:
    soon = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    case = Case("partial", torch.bfloat16)
    before = sum_of_prefetched_bytes(library)
    case.run(partial(emulated_rotary_append, library, soon=soon))
    case.check()
    assert sum_of_prefetched_bytes(library) - before == int(soon.sum())
    many = Case("narrow", torch.bfloat16, kv_slots=tuple(range(17)))
    many.run(partial(emulated_rotary_append, library, soon=soon))
    assert sum_of_prefetched_bytes(library) - before == int(soon.sum())


@pytest.mark.gpu
def test_asking_for_what_is_read_soon_changes_nothing() -> None:
    found = []
    for soon in (None, torch.randn(4096, 4104, dtype=torch.bfloat16, device="cuda")):
        case = Case("grouped 128", torch.bfloat16, "cuda")
        case.run(partial(ops.rotary_append, soon=soon))
        case.check()
        found.append((case.query, case.cache.nan_to_num()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.gpu
def test_a_replayed_graph_gives_what_the_kernel_gives_eagerly() -> None:
    case = Case("grouped 128", torch.bfloat16, "cuda")
    case.run(ops.rotary_append)
    wanted = case.query.clone(), case.cache.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            case.qkv.mul_(1.0)  # dependent launch must wait for what came before
            case.run(ops.rotary_append)
    for _ in range(20):
        case.query.fill_(torch.nan)
        case.cache.fill_(torch.nan)
        graph.replay()
        assert torch.equal(case.query, wanted[0])
        assert torch.equal(case.cache.nan_to_num(), wanted[1].nan_to_num())


def test_other_shapes_are_refused() -> None:
    case = Case("partial", torch.bfloat16)
    case.cos = case.cos[:, :31]
    with pytest.raises(RuntimeError, match=r"sin must be \[7, 31\]"):
        case.run(ops.rotary_append)
    case.sin = case.sin[:, :31]
    with pytest.raises(RuntimeError, match="even number of columns"):
        case.run(ops.rotary_append)
    case = Case("partial", torch.bfloat16)
    case.sin = case.sin.float()
    with pytest.raises(RuntimeError, match="the cache's dtype"):
        case.run(ops.rotary_append)
    case = Case("partial", torch.bfloat16)
    case.qkv = case.qkv[:, :-16]
    with pytest.raises(RuntimeError, match=r"qkv must be \[7, 1280\]"):
        case.run(ops.rotary_append)


def test_opcheck() -> None:
    case = Case("partial", torch.bfloat16)
    case.cache.zero_()
    case.query.zero_()
    arguments = (case.query, case.cache, case.qkv, case.cos, case.sin, case.kv_slots, LAYER)
    torch.library.opcheck(torch.ops.punica.rotary_append.default, arguments)


def test_one_rounding_is_nearer_than_transformers() -> None:
    case = Case("grouped 128", torch.bfloat16)
    case.run(reference.rotary_append)
    exact, rounded = case.wanted(torch.float64)[0], case.wanted(torch.bfloat16)[0]
    assert (case.query.double() - exact).norm() < 0.8 * (rounded.double() - exact).norm()
