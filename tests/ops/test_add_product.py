"""The base product added to what is there: in place, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from punica_core import ops
from tests.support.numerics import assert_as_exact_as_torch

CPU = pytest.param("cpu", torch.float32, id="cpu-fp32")
CPU_BF16 = pytest.param("cpu", torch.bfloat16, id="cpu-bf16")
GPU_BF16 = pytest.param("cuda", torch.bfloat16, id="gpu-bf16", marks=pytest.mark.gpu)
GPU_FP16 = pytest.param("cuda", torch.float16, id="gpu-fp16", marks=pytest.mark.gpu)
targets = pytest.mark.parametrize(("device", "dtype"), [CPU, CPU_BF16, GPU_BF16, GPU_FP16])


def drawn(device: str, dtype: torch.dtype, rows: int = 300, width: int = 264, depth: int = 1032) -> list[Tensor]:
    """y [rows, width], x [rows, depth] and a weight, whose product is about as large as y."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((rows, width), (rows, depth), (width, depth))
    y, x, weight = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    return [y, x, weight / depth**0.5]


@targets
@pytest.mark.parametrize(("rows", "width", "depth"), [(300, 264, 1032), (1, 40, 64), (513, 77, 100)], ids=str)
def test_the_product_is_added_and_rounded_once(device, dtype, rows, width, depth) -> None:
    y, x, weight = drawn(device, dtype, rows, width, depth)
    exact, same = y.double() + x.double() @ weight.double().T, y + x @ weight.T
    before = y.clone()
    ops.add_product(y, x, weight)
    assert_as_exact_as_torch(y, exact, same)
    with pytest.raises(AssertionError):
        assert_as_exact_as_torch(y - before, exact, same)


@targets
def test_to_zero_it_adds_what_the_product_alone_is(device, dtype) -> None:
    _, x, weight = drawn(device, dtype)
    alone = (x.float() @ weight.float().T).to(dtype) if device == "cpu" else x @ weight.T
    y = torch.zeros_like(alone)
    ops.add_product(y, x, weight)
    assert torch.equal(y, alone)
    y[7] = 0.5
    ops.add_product(y, x, weight)
    assert not torch.equal(y[7], 2 * alone[7])


@targets
def test_columns_beside_a_strided_output_are_not_touched(device, dtype) -> None:
    y, x, weight = drawn(device, dtype)
    storage = torch.full((300, 272), 7.0, dtype=dtype, device=device)
    storage[:, :264] = y
    ops.add_product(storage[:, :264], x, weight)
    ops.add_product(y, x, weight)
    assert torch.equal(storage[:, :264], y)
    assert (storage[:, 264:] == 7).all()


@pytest.mark.gpu
def test_it_takes_no_memory() -> None:
    y, x, weight = drawn("cuda", torch.bfloat16, 2048, 4096, 4096)
    ops.add_product(y, x, weight)  # takes cuBLAS's workspace
    taken = []
    for add in (lambda: ops.add_product(y, x, weight), lambda: torch.addmm(y, x, weight.t())):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        add()
        taken.append(torch.cuda.max_memory_allocated() - before)
    assert taken[0] == 0
    assert taken[1] >= y.nbytes


@pytest.mark.gpu
def test_a_graph_adds_on_every_replay() -> None:
    y, x, weight = drawn("cuda", torch.bfloat16)
    want = y.clone()
    for _ in range(2):
        ops.add_product(want, x, weight)
    start = y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.add_product(y, x, weight)
    y.copy_(start)
    for _ in range(2):
        graph.replay()
    assert torch.equal(y, want)


@targets
def test_opcheck(device, dtype) -> None:
    torch.library.opcheck(torch.ops.punica.add_product.default, tuple(drawn(device, dtype)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y, x, weight: (y, x.double(), weight), "one dtype"),
        (lambda y, x, weight: (y, x.T.contiguous().T, weight), "contiguous rows"),
        (lambda y, x, weight: (y, x, weight[:-1]), "is not x"),
        (lambda y, x, weight: (y[:-1], x, weight), "is not x"),
    ],
    ids=["dtype", "stride", "width", "rows"],
)
def test_wrong_arguments_are_named(change, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.add_product(*change(*drawn("cpu", torch.float32)))
