"""A linear layer with its adapters in one op: what it means on a CPU, the kernel and its stand-in on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from punica_core import ops
from punica_core.ops import linear as linear_ops
from punica_core.ops import reference
from punica_core.ops.layout import NUM_COUNTERS
from punica_core.ops.linear import MAX_LINEAR_ROWS, LinearTile, linear_tile
from tests.support.lora_batch import MIXED_RANKS, LoraBatch, make_batch, rows_of
from tests.support.numerics import assert_as_exact_as_torch

CPU = pytest.param("cpu", torch.float32, id="cpu-fp32")
CPU_BF16 = pytest.param("cpu", torch.bfloat16, id="cpu-bf16")
GPU_BF16 = pytest.param("cuda", torch.bfloat16, id="gpu-bf16", marks=pytest.mark.gpu)
GPU_FP16 = pytest.param("cuda", torch.float16, id="gpu-fp16", marks=pytest.mark.gpu)
targets = pytest.mark.parametrize(("device", "dtype"), [CPU, CPU_BF16, GPU_BF16, GPU_FP16])


@dataclasses.dataclass
class Layer:
    """A base layer under the adapters of a batch."""

    batch: LoraBatch
    weight: Tensor
    bias: Tensor | None

    def run(self, y: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        """The op, into memory that held NaN."""
        batch = self.batch
        out = torch.full_like(batch.y, torch.nan) if y is None else y
        batch.v.fill_(torch.nan)
        tables = (batch.arena.buffer, batch.table, batch.plan.plan)
        rows = batch.x if x is None else x
        ops.lora_linear(out, batch.v, rows, self.weight, self.bias, *tables, batch.out_features, batch.max_rank)
        return out

    def expected(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The same maths without the ops, with every intermediate in `dtype`."""
        y = torch.nn.functional.linear(
            self.batch.x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        )
        return dataclasses.replace(self.batch, y=y).expected(dtype)

    def check(self, got: Tensor | None = None) -> None:
        out = self.run() if got is None else got
        assert_as_exact_as_torch(out, self.expected(), self.expected(out.dtype))

    def begin(self, row_slots: Sequence[int]) -> None:
        self.batch.row_slots = np.asarray(row_slots, np.int32)
        self.batch.plan.set_rows(self.batch.row_slots, self.batch.tables.slot_rank)


def make_layer(
    row_slots: Sequence[int],
    *,
    in_features: int = 1040,
    out_features: Sequence[int] = (520, 72),
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    ranks: Sequence[int] = MIXED_RANKS,
    missing: Sequence[tuple[int, int]] = (),
    max_rank: int | None = None,
) -> Layer:
    batch = make_batch(
        row_slots,
        ranks=ranks,
        in_features=in_features,
        out_features=out_features,
        dtype=dtype,
        device=device,
        missing=missing,
        max_rank=max_rank,
    )
    generator = torch.Generator(device).manual_seed(1)
    total = sum(out_features)
    weight = torch.randn(total, in_features, generator=generator, device=device).to(dtype) / in_features**0.5
    own_bias = torch.randn(total, generator=generator, device=device).to(dtype) if bias else None
    return Layer(batch, weight, own_bias)


def launched(monkeypatch: pytest.MonkeyPatch) -> list[LinearTile | None]:
    """The tiles that calls from now on choose."""
    seen: list[LinearTile | None] = []

    def recording(*arguments, **options) -> LinearTile | None:
        seen.append(linear_tile(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(linear_ops, "linear_tile", recording)
    return seen


@targets
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [7, 1, 9, 33],
        [64],
        [1, 63],
        [50, 14],
        [3] * 20,
        [1] * 64,
        [17],
        [32],
        [2, 2],
        [5] * 12,
        [128],
        [1, 99],
        [65],
        [2] * 60,
    ],
    ids=lambda counts: f"{len(counts)}x{max(counts)}",
)
def test_every_row_gets_the_base_and_its_own_adapter(device, dtype, counts, bias) -> None:
    make_layer(rows_of(counts), bias=bias, dtype=dtype, device=device).check()


@targets
@pytest.mark.parametrize("lora_rank", MIXED_RANKS)
def test_any_rank(device, dtype, lora_rank) -> None:
    make_layer(rows_of([1, 9, 30], base_rows=2), ranks=[lora_rank], dtype=dtype, device=device).check()


@targets
@pytest.mark.parametrize(
    ("in_features", "out_features"),
    [
        (4096, (4096, 1024, 1024)),
        (1024, (4096,)),
        (512, (17408, 17408)),
        (14336, (256,)),
        (1000, (24, 8, 40)),
        (64, (8,)),
    ],
    ids=str,
)
def test_any_width(device, dtype, in_features, out_features) -> None:
    if device == "cpu" and in_features * sum(out_features) > 1 << 24:
        pytest.skip("takes a CPU long")
    layer = make_layer(
        rows_of([3, 12, 1], base_rows=1), in_features=in_features, out_features=out_features, dtype=dtype, device=device
    )
    layer.check()


@targets
@pytest.mark.parametrize("num_rows", [8, 16, 17, 64, 70, 128])
def test_rows_without_an_adapter_are_the_base_product(device, dtype, num_rows) -> None:
    layer = make_layer([-1] * (num_rows - 5) + [0] * 4 + [-1], dtype=dtype, device=device)
    adapted = layer.run()
    layer.begin([-1] * num_rows)
    base = layer.run()
    others = layer.batch.row_slots < 0
    others[num_rows - 5 : num_rows - 1] = False
    assert torch.equal(adapted[others], base[others])
    assert not torch.equal(adapted, base)
    layer.check(base)


@targets
def test_slices_that_an_adapter_does_not_target(device, dtype) -> None:
    layer = make_layer(
        rows_of([2, 30]),
        ranks=[16, 4],
        out_features=(264, 32, 72),
        missing=[(0, 1), (1, 0)],
        dtype=dtype,
        device=device,
    )
    layer.check()


@targets
def test_outputs_and_inputs_may_be_parts_of_wider_ones(device, dtype) -> None:
    layer = make_layer(rows_of([4, 9], base_rows=1), dtype=dtype, device=device)
    storage = torch.full((14, 600), 7.0, dtype=dtype, device=device)
    wide = torch.full((14, 1040 + 16), torch.nan, dtype=dtype, device=device)
    wide[:, 8:1048] = layer.batch.x
    got = layer.run(storage[:, :592], wide[:, 8:1048])
    assert torch.equal(got, layer.run())
    assert (storage[:, 592:] == 7).all()


@targets
def test_another_adapter_gives_another_answer(device, dtype) -> None:
    layer = make_layer(rows_of([9, 9]), dtype=dtype, device=device)
    want = layer.expected()
    layer.begin([1] * 9 + [0] * 9)
    with pytest.raises(AssertionError):
        assert_as_exact_as_torch(layer.run(), want, want.to(dtype))


@targets
def test_opcheck(device, dtype) -> None:
    batch = (layer := make_layer(rows_of([3, 5], base_rows=1), dtype=dtype, device=device)).batch
    tables = (batch.arena.buffer.nan_to_num(), batch.table, batch.plan.plan)
    arguments = (torch.zeros_like(batch.y), torch.zeros_like(batch.v), batch.x, layer.weight, None, *tables)
    torch.library.opcheck(torch.ops.punica.lora_linear.default, (*arguments, batch.out_features, batch.max_rank))


@pytest.mark.gpu
def test_one_graph_replays_any_mix_with_the_bits_of_eager_and_leaves_its_counters_at_zero(monkeypatch) -> None:
    tiles = launched(monkeypatch)
    layer = make_layer(rows_of([1] * 40))
    out = torch.empty_like(layer.batch.y)
    layer.run(out)
    assert tiles == [LinearTile(64, 32, 2, 2, 8)], "the kernel is what is tested"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run(out)
    generator = np.random.default_rng(0)
    for _ in range(200):
        adapters = generator.choice(40, int(generator.integers(1, 41)), replace=False)
        rows = generator.choice(adapters, 40)
        rows[generator.random(40) < generator.choice([0.0, 0.1, 0.9])] = -1
        layer.begin(np.sort(rows))
        want = layer.run()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
        assert not layer.batch.plan.plan[-NUM_COUNTERS:].any()
    layer.check(out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "fused"),
    [({}, True), ({"in_features": 1036}, False), ({"out_features": (516, 72)}, False), ({"max_rank": 256}, True)],
    ids=["kernel", "odd depth", "odd width", "rank 256"],
)
def test_what_the_kernel_does_not_take_is_computed_by_cublas(monkeypatch, change, fused) -> None:
    tiles = launched(monkeypatch)
    layer = make_layer(rows_of([4, 9, 20]), ranks=[16], **change)
    layer.check()
    assert [tile is not None for tile in tiles] == [fused]


@pytest.mark.gpu
def test_long_steps_are_computed_by_cublas(monkeypatch) -> None:
    tiles = launched(monkeypatch)
    make_layer(rows_of([100, 29])).check()
    assert tiles == [None]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LinearTile]]:
    """On a CPU the way that calls take on an H200, with the reference for the kernel: the tiles it is launched with."""
    tiles = []

    def launch(*arguments: Any) -> None:
        *others, tile = arguments
        tiles.append(LinearTile(*tile))
        reference.lora_linear(*others)

    monkeypatch.setattr(ops, "lora_linear", linear_ops.lora_linear_cuda)
    monkeypatch.setattr(linear_ops, "fits_kernel", lambda device: True)
    monkeypatch.setattr(linear_ops, "_num_sms", lambda device: 132)
    with torch.library._scoped_library("punica", "IMPL") as library:
        library.impl("lora_linear_tile", launch, "CPU")
        yield tiles


def with_batch(layer: Layer, **changes: Any) -> Layer:
    return dataclasses.replace(layer, batch=dataclasses.replace(layer.batch, **changes))


def shifted(tensor: Tensor) -> Tensor:
    """The same values in memory that starts 8 bytes behind a multiple of 16."""
    by = 8 // tensor.itemsize
    wide = torch.full((*tensor.shape[:-1], tensor.size(-1) + 8), torch.nan, dtype=tensor.dtype)
    wide[..., by : by + tensor.size(-1)] = tensor
    return wide[..., by : by + tensor.size(-1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("sizes", "fused"),
    [({}, True), ({"counts": [100, 29]}, False), ({"in_features": 1036}, False), ({"out_features": (516, 72)}, False)],
    ids=["kernel", "long step", "odd depth", "odd width"],
)
def test_a_call_goes_to_the_kernel_or_to_what_gives_the_same(launches, dtype, bias, sizes, fused) -> None:
    options = {"counts": [4, 9, 20], "out_features": (520, 72)} | sizes
    rows = rows_of(options.pop("counts"))
    make_layer(rows, bias=bias, dtype=dtype, device="cpu", **options).check()
    assert launches == ([LinearTile(64, 32, 2, 2, 8)] if fused else [])


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: dataclasses.replace(layer, weight=shifted(layer.weight)),
        lambda layer: dataclasses.replace(layer, bias=shifted(layer.bias)),
        lambda layer: dataclasses.replace(layer, bias=layer.bias.repeat_interleave(2)[::2]),
        lambda layer: with_batch(layer, x=shifted(layer.batch.x)),
    ],
    ids=["weight", "bias", "strided bias", "x"],
)
def test_what_the_copy_engine_cannot_read_does_not_go_to_the_kernel(launches, change: Callable[[Layer], Layer]) -> None:
    # With AMX torch multiplies what lies behind rows whose length is no multiple of 32, and by zero: NaN, here.
    layer = make_layer(rows_of([4, 9, 20]), bias=True, dtype=torch.bfloat16, device="cpu", in_features=1024)
    layer.check()
    assert len(launches) == 1
    change(layer).check()
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((4096, 4096, 1), (LinearTile(8, 64, 2, 2, 6), LinearTile(128, 64, 2, 2, 4))),
        ((6144, 4096, 3), (LinearTile(8, 96, 2, 2, 4), None)),
        ((28672, 4096, 2), (LinearTile(8, 224, 1, 1, 4), LinearTile(128, 224, 1, 1, 4))),
        ((4096, 14336, 1), (LinearTile(8, 64, 2, 2, 6), LinearTile(128, 64, 2, 2, 4))),
    ],
    ids=["o", "qkv", "gate_up", "down"],
)
def test_llama_8b_fills_the_multiprocessors_of_an_h200_once(shape, tiles) -> None:
    out_features, in_features, slices = shape
    for num_rows, tile in zip((5, 65), tiles, strict=True):
        assert linear_tile(num_rows, out_features, in_features, slices=slices, max_rank=256, num_sms=132) == tile
        assert tile is None or -(-out_features // tile.height) * tile.splits == 128


@pytest.mark.parametrize("num_rows", [1, 8, 9, 33, 64, 65, 128])
@pytest.mark.parametrize("out_features", [8, 576, 1032, 4608, 8192, 28672, 32768])
def test_a_tile_covers_the_layer_and_fits_shared_memory(num_rows, out_features) -> None:
    tile = linear_tile(num_rows, out_features, 4096, slices=1, max_rank=64, num_sms=132)
    assert tile is not None
    assert num_rows <= tile.rows <= MAX_LINEAR_ROWS
    assert tile.height % (16 * tile.splits) == 0
    assert 16 <= tile.height <= 256
    stage = tile.boxes * (tile.height + tile.rows) * 128
    sums = tile.splits * tile.rows * (tile.height // tile.splits + 4) * 4
    in_ring = tile.splits == 1 or tile.rows > 64
    assert 2 * stage + max(0 if in_ring else sums, 64 * 128) + 1024 <= 208 << 10
    assert not in_ring or sums <= tile.stages * stage


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_rows": 0},
        {"num_rows": 129},
        {"in_features": 4100},
        *({"out_features": width} for width in (4100, 12288, 22016, 57344)),
    ],
    ids=str,
)
def test_what_has_no_tile(wrong) -> None:
    right = {"num_rows": 5, "out_features": 4096, "in_features": 4096}
    assert linear_tile(**right, slices=1, max_rank=64, num_sms=132) is not None
    assert linear_tile(**(right | wrong), slices=1, max_rank=64, num_sms=132) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: dataclasses.replace(layer, weight=layer.weight[:-1]), "is not x"),
        (lambda layer: dataclasses.replace(layer, weight=layer.weight.double()), "one dtype"),
        (lambda layer: dataclasses.replace(layer, bias=torch.zeros(3)), "bias must be"),
        (lambda layer: with_batch(layer, v=layer.batch.v[2:]), "v must start on 16 bytes"),
        (lambda layer: with_batch(layer, max_rank=8), "lora_ranks up to 16, max_rank is 8"),
        (lambda layer: with_batch(layer, x=layer.batch.x[:1], y=layer.batch.y[:1]), "the plan has 2 rows, the step 1"),
    ],
    ids=["width", "dtype", "bias", "start", "ranks", "rows"],
)
def test_wrong_arguments_are_named(change, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        change(make_layer([0, 0], ranks=[13], dtype=torch.float32, device="cpu")).run()


@pytest.mark.gpu
def test_a_layer_whose_blocks_do_not_all_run_at_once_is_refused() -> None:
    """They wait for each other. The driver is asked; nothing has been started, so calls that fit go on."""
    if not linear_ops.fits_kernel(torch.device("cuda")):
        pytest.skip("another GPU")
    layer = make_layer(rows_of([5]), in_features=256, out_features=(16 * 1024,), ranks=[16])
    batch, out = layer.batch, torch.empty_like(layer.batch.y)
    tables = (batch.arena.buffer, batch.table, batch.plan.plan)
    call = (out, batch.v, batch.x, layer.weight, layer.bias, *tables, batch.out_features, batch.max_rank)
    with pytest.raises(RuntimeError, match="too many blocks in cooperative launch"):
        torch.ops.punica.lora_linear_tile(*call, list(LinearTile(rows=8, height=16, splits=1, boxes=2, stages=6)))
    layer.check()
