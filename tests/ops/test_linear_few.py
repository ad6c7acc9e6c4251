"""A few rows times a weight, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from punica_core import ops
from punica_core.ops.build import source_directory
from tests.ops.emulator.linear import LINEAR_KERNELS, emulated_linear_few
from tests.support.emulation import compile_kernels
from tests.support.numerics import assert_as_exact_as_torch

DTYPES = [torch.bfloat16, torch.float16]
SHAPES = {
    "tall tiles": (1, 512, 128),
    "tall tiles, eight rows": (8, 2560, 64),
    "short tiles": (3, 1024, 48),
    "odd widths": (5, 1000, 75),
    "narrow": (2, 8, 5),
    "several tiles a block": (7, 520, 400),
    "whole rings": (6, 4096, 224),
    "whole rings, short tiles": (6, 2048, 208),
}
"""T, I, O."""


class Case:
    """Strided inputs between numbers that must not be read, and a poisoned output."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, *, bias: bool = False, device: str = "cpu"):
        rows, width, out = shape
        generator = torch.Generator().manual_seed(rows)
        around = torch.full((rows + 1, width + 8), torch.nan)
        around[:rows, :width] = torch.randn(rows, width, generator=generator)
        self.x = around.to(device, dtype)[:rows, :width]
        self.weight = (torch.randn(out, width, generator=generator) / width**0.5).to(device, dtype)
        self.bias = torch.randn(out, generator=generator).to(device, dtype) if bias else None
        self.around = torch.full((rows + 1, out + 3), torch.nan, dtype=dtype, device=device)
        self.y = self.around[:rows, :out]

    def run(self, linear_few: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]) -> None:
        linear_few(self.y, self.x, self.weight, self.bias)

    def check(self) -> None:
        exact = self.x.double() @ self.weight.double().T
        exact = exact if self.bias is None else exact + self.bias.double()
        assert_as_exact_as_torch(self.y, exact, functional.linear(self.x, self.weight, self.bias))
        self.y.fill_(torch.nan)
        assert bool(self.around.isnan().all())


@pytest.fixture(scope="module")
def library(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(nvcc, LINEAR_KERNELS, tmp_path_factory.mktemp("emulated") / "linear.so")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_times_weight(shape: str, dtype: torch.dtype, device: str) -> None:
    case = Case(SHAPES[shape], dtype, bias=shape == "odd widths", device=device)
    case.run(ops.linear_few)
    case.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_does_what_its_reference_does(library: Path, shape: str, dtype: torch.dtype) -> None:
    case = Case(SHAPES[shape], dtype, bias=shape == "odd widths")
    case.run(partial(emulated_linear_few, library, 4 if shape == "tall tiles" else 3))
    case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(("width", "out"), [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)])
def test_shapes_of_a_model_in_a_graph_of_dependent_launches(rows: int, width: int, out: int) -> None:
    case = Case((rows, width, out), torch.bfloat16, device="cuda")
    case.run(ops.linear_few)
    case.check()
    case.run(ops.linear_few)
    wanted, given = case.y.clone(), case.x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            case.x.copy_(given)
            case.run(ops.linear_few)
    for _ in range(5):
        case.y.fill_(torch.nan)
        case.x.fill_(torch.nan)
        graph.replay()
        assert torch.equal(case.y, wanted)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("place.tile += gridDim.x;", "place.tile += 1;"),
        ("kWhole || column < params.in_features", "true"),
        ("  wait_for_previous();\n", ""),
        ("ring.weight[slot][2 * i + 1]", "ring.weight[slot][2 * i]"),
    ],
    ids=["tiles", "columns behind the end", "no wait", "rows"],
)
def test_a_broken_kernel_is_noticed(nvcc: str, tmp_path: Path, text: str, broken: str) -> None:
    sources = Path(shutil.copytree(source_directory(), tmp_path / "csrc"))
    path = sources / "include" / "punica" / "linear_few.cuh"
    assert text in path.read_text()
    path.write_text(path.read_text().replace(text, broken))
    library = compile_kernels(nvcc, LINEAR_KERNELS, tmp_path / "broken.so", sources)
    case = Case(SHAPES["several tiles a block"], torch.bfloat16)

    def run_and_check() -> None:
        case.run(partial(emulated_linear_few, library, 3))
        case.check()

    with pytest.raises((AssertionError, RuntimeError)):
        run_and_check()


def test_other_shapes_are_refused() -> None:
    case = Case(SHAPES["short tiles"], torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"weight must be contiguous \[O, 1024\]"):
        ops.linear_few(case.y, case.x, case.weight[:, :-8].contiguous())
    with pytest.raises(RuntimeError, match=r"y must be \[3, 48\]"):
        ops.linear_few(case.y[:, :-1], case.x, case.weight)
    with pytest.raises(RuntimeError, match="weight's dtype"):
        ops.linear_few(case.y, case.x.float(), case.weight)


def test_opcheck() -> None:
    case = Case(SHAPES["odd widths"], torch.bfloat16, bias=True)
    torch.library.opcheck(
        torch.ops.punica.linear_few.default, (case.y.zero_(), case.x.contiguous(), case.weight, case.bias)
    )
