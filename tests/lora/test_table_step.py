"""Adapters beside the base product and ahead of it: in that order, on unchanged inputs, eager and compiled."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from punica_core import ops
from punica_core.lora.layers import LinearGroup, LoRAContext, LoRALinear
from punica_core.lora.linear import has_onednn
from punica_core.lora.table_step import LoRAOrder, TableLoRA, lora_orders, most_inside_rows
from punica_core.lora.tables import AdapterTables, Arena, ModuleWeights
from punica_core.ops import linear as linear_ops

ROW_SLOTS = np.array([0] * 5 + [1] * 7 + [-1], np.int32)
HIDDEN, WIDE = 64, 48
PRODUCTS = ("aten::mm", "aten::addmm", "aten::linear", "mkldnn::_linear_pointwise")


class Mlp(nn.Module):  # type: ignore[misc]
    """Norm, gate and up as one, activation, down, residual: a layer's half, whose adapters lie in tables."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        context = LoRAContext()
        groups = (LinearGroup(0, ("gate", "up"), HIDDEN, (WIDE, WIDE)), LinearGroup(1, ("down",), WIDE, (HIDDEN,)))
        self.wide = LoRALinear(groups[0], [nn.Linear(HIDDEN, WIDE, bias=bias) for _ in range(2)], context)
        self.down = LoRALinear(groups[1], [nn.Linear(WIDE, HIDDEN, bias=bias)], context)
        self.tables = AdapterTables(3, 2)
        arena = Arena(1 << 16, dtype=torch.float32)
        shapes = ((HIDDEN, WIDE), (HIDDEN, WIDE), (WIDE, HIDDEN))
        self.adapters = [
            [ModuleWeights(torch.randn(rank, i) / 8, torch.randn(o, rank) / 8, 0.5) for i, o in shapes]
            for rank in (4, 16)
        ]
        for slot, modules in enumerate(self.adapters):
            self.tables.write(slot, dict(enumerate(modules)), arena)
        self.wide.table, self.down.table = self.tables.group(0, 2), self.tables.group(2, 1)
        self.lora = TableLoRA(self.tables, arena, max_rows=64, max_rank=256, beside=True)
        self.lora.begin(ROW_SLOTS)
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.wide(functional.layer_norm(x, (HIDDEN,))).split((WIDE, WIDE), -1)
        return x + self.down(functional.silu(gate) * up)

    def expected(self, x: Tensor) -> Tensor:
        """The same, row by row and without the ops."""
        rows = []
        for row, slot in zip(x.double(), ROW_SLOTS, strict=True):
            modules = self.adapters[slot] if slot >= 0 else None

            def linear(layer: LoRALinear, h: Tensor, parts: slice, modules: Any = modules) -> Tensor:
                y = functional.linear(h, layer.weight.double(), None if layer.bias is None else layer.bias.double())
                added = [m.scale * (m.b.double() @ (m.a.double() @ h)) for m in modules[parts]] if modules else []
                return y + torch.cat(added) if added else y

            h = functional.layer_norm(row, (HIDDEN,))
            gate, up = linear(self.wide, h, slice(0, 2)).split((WIDE, WIDE), -1)
            rows.append(row + linear(self.down, functional.silu(gate) * up, slice(2, 3)))
        return torch.stack(rows)


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """The products and ops that ran, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("punica::") or name in PRODUCTS:
            self.calls.append((name, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[False, True], ids=["no bias", "bias"])
def mlp(request: pytest.FixtureRequest) -> Mlp:
    return Mlp(request.param)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(len(ROW_SLOTS), HIDDEN, generator=torch.Generator().manual_seed(1))


def test_each_product_stands_between_its_shrink_and_its_expand(mlp: Mlp, x: Tensor) -> None:
    mlp.context.table_step = mlp.lora
    has_onednn()  # tries itself with a product, once
    with torch.inference_mode(), Recorder() as recorder:
        got = mlp(x)
    names = [name for name, _, _ in recorder.calls]
    assert [name for name in names if name.startswith("punica")] == ["punica::lora_shrink", "punica::lora_expand"] * 2
    assert [name in PRODUCTS for name in names] == [False, True, False] * 2
    for shrink, expand in (recorder.calls[0:3:2], recorder.calls[3:6:2]):
        assert shrink[2] == {"summed": True, "beside": True}
        assert expand[2]["summed"]
        assert expand[2]["x"].data_ptr() == shrink[1][1].data_ptr(), "x lives until expand"
    torch.testing.assert_close(got.double(), mlp.expected(x), rtol=1e-4, atol=1e-4)


def test_a_step_without_adapters_runs_the_products_alone(mlp: Mlp, x: Tensor) -> None:
    mlp.context.table_step = mlp.lora
    with torch.inference_mode():
        adapted = mlp(x)
        mlp.context.table_step = None
        with Recorder() as recorder:
            base = mlp(x)
    assert all(name in PRODUCTS for name, _, _ in recorder.calls)
    assert not torch.allclose(base[:12], adapted[:12], atol=1e-2)
    assert torch.equal(base[12], adapted[12])


def test_ahead_products_are_added_to_what_expand_wrote(mlp: Mlp, x: Tensor) -> None:
    mlp.context.table_step = mlp.lora
    with torch.inference_mode():
        beside = mlp(x)
        mlp.lora.running = LoRAOrder.AHEAD
        with Recorder() as recorder:
            ahead = mlp(x)
        mlp.context.table_step = None
        base = mlp(x)
    if mlp.down.bias is not None:
        assert torch.equal(ahead, beside), "a layer with a bias has one order"
        return
    names = [name for name, _, _ in recorder.calls if name.startswith("punica")]
    assert names == ["punica::lora_shrink", "punica::lora_expand", "punica::add_product"] * 2
    assert all(options["overwrite"] for name, _, options in recorder.calls if name == "punica::lora_expand")
    assert not any(options.get("beside") for _, _, options in recorder.calls)
    torch.testing.assert_close(ahead.double(), mlp.expected(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ahead[12], base[12], rtol=1e-5, atol=1e-5)


def test_what_was_in_the_memory_before_would_show(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = Mlp(bias=False)

    def forgetful(y: Tensor, *arguments: Any, overwrite: bool, **options: Any) -> None:
        assert overwrite
        torch.ops.punica.lora_expand(y.fill_(1.0), *arguments, **options)

    mlp.context.table_step, mlp.lora.running = mlp.lora, LoRAOrder.AHEAD
    monkeypatch.setattr(ops, "lora_expand", forgetful)
    with torch.inference_mode():
        wrong = (mlp(x).double() - mlp.expected(x)).abs().amax(-1)
    assert bool((wrong > 0.1).all()), "of rows with adapters and without"


MANY = 257
"""Rows of the shortest step that is computed ahead."""


@pytest.mark.parametrize(
    ("row_slots", "order"),
    [
        ([-1] * MANY, LoRAOrder.NONE),
        ([0] * (MANY - 1), LoRAOrder.BESIDE),
        ([0] * MANY, LoRAOrder.AHEAD),
        ([-1] * (MANY - 1) + [1], LoRAOrder.AHEAD),
        ([0] * MANY + [2], LoRAOrder.BESIDE),
    ],
    ids=["base", "few rows", "one adapter", "one row of one", "one row of one with a gain"],
)
def test_the_order_of_a_step_follows_its_rows(row_slots: list[int], order: LoRAOrder) -> None:
    arena, tables = Arena(1 << 12, dtype=torch.float32), AdapterTables(1, 3)
    plain = ModuleWeights(torch.randn(4, HIDDEN), torch.randn(WIDE, 4), 1.0)
    for slot, gain in enumerate((None, None, torch.ones(WIDE))):
        tables.write(slot, {0: dataclasses.replace(plain, row_gain=gain)}, arena)
    lora = TableLoRA(tables, arena, max_rows=2 * MANY, max_rank=8)
    assert lora.order(np.array(row_slots, np.int32)) is order
    assert order in lora_orders(len(row_slots))
    tables.clear(2, arena)
    tables.write(2, {0: plain}, arena)
    expected = LoRAOrder.AHEAD if 2 in row_slots else order
    assert lora.order(np.array(row_slots, np.int32)) is expected, "the slot has another adapter"


@pytest.mark.parametrize(
    ("row_slots", "order"),
    [
        ([-1] * 64, LoRAOrder.NONE),
        ([0] * 64, LoRAOrder.INSIDE),
        ([0] * 129, LoRAOrder.BESIDE),
        ([-1, 0, 0, -1, 1, -1], LoRAOrder.INSIDE),
        ([0, 1] * 8 + [-1, -1], LoRAOrder.INSIDE),
        ([0, 1] * 8 + [-1, 0], LoRAOrder.BESIDE),
        ([0, 0, 2], LoRAOrder.BESIDE),
        ([3, 1] * 4, LoRAOrder.INSIDE),
        ([3, 1] * 4 + [0], LoRAOrder.BESIDE),
        ([4], LoRAOrder.BESIDE),
        ([0] * 65, LoRAOrder.INSIDE),
        ([0, 1] * 6 + [1] * 64, LoRAOrder.INSIDE),
        ([0, 1] * 6 + [0] * 64, LoRAOrder.BESIDE),
        ([3] + [0] * 64, LoRAOrder.BESIDE),
    ],
    ids=[
        "base",
        "one adapter",
        "more rows",
        "two adapters",
        "sixteen runs",
        "seventeen runs",
        "one of them with a gain",
        "ranks up to 256 in sum",
        "ranks beyond",
        "a rank that the kernel does not take",
        "many rows",
        "many rows in twelve runs",
        "many rows in thirteen runs",
        "many rows and a large rank",
    ],
)
def test_lora_of_few_rows_is_inside_the_product_where_there_is_a_kernel(row_slots: list[int], order: LoRAOrder) -> None:
    arena, tables = Arena(1 << 15, dtype=torch.float32), AdapterTables(1, 5)
    plain = ModuleWeights(torch.randn(4, HIDDEN), torch.randn(WIDE, 4), 1.0)
    for slot, gain in enumerate((None, None, torch.ones(WIDE))):
        tables.write(slot, {0: dataclasses.replace(plain, row_gain=gain)}, arena)
    for slot, lora_rank in ((3, 60), (4, 65)):
        large = ModuleWeights(torch.randn(lora_rank, HIDDEN), torch.randn(WIDE, lora_rank), 1.0)
        tables.write(slot, {0: large}, arena)
    rows = np.array(row_slots, np.int32)
    inside, plain_lora = (TableLoRA(tables, arena, max_rows=129, max_rank=72, inside_rows=most) for most in (128, 0))
    assert inside.order(rows) is order
    assert order in lora_orders(len(rows), inside_rows=128)
    assert plain_lora.order(rows) is (LoRAOrder.BESIDE if order is LoRAOrder.INSIDE else order)


@pytest.mark.parametrize(
    ("sizes", "slices", "most"),
    [
        ((4096, 4096, 1024, 14336), (3, 1, 2, 1), 128),
        ((4096, 4096, 1024, 14336), (3, 1, 3, 1), 64),
        ((3072, 3072, 1024, 8192), (3, 1, 2, 1), 128),
        ((5120, 5120, 5120, 13824), (3, 1, 2, 1), 128),
        ((2048, 2048, 512, 8192), (3, 1, 2, 1), 128),
        ((4096, 4096, 4096, 11008), (3, 1, 2, 1), 0),
        ((3584, 3584, 512, 18944), (3, 1, 2, 1), 0),
        ((4096, 4096, 1024, 12288), (3, 1, 2, 1), 0),
        ((8192, 8192, 1024, 28672), (3, 1, 2, 1), 0),
    ],
    ids=[
        "llama3-8b",
        "half of three slices",
        "llama3-3b",
        "llama2-13b",
        "llama3-1b",
        "llama2-7b",
        "qwen2.5-7b",
        "qwen3-8b",
        "llama3-70b",
    ],
)
def test_a_model_has_lora_inside_its_products_if_each_of_its_layers_can_be(monkeypatch, sizes, slices, most) -> None:
    """docs/kernels.md names these models. sizes: hidden, of queries, of keys, of gate."""
    hidden, queries, keys, wide = sizes
    layers = ((hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * wide), (wide, hidden))
    groups = [
        LinearGroup(index, tuple(map(str, range(count))), fin, (8,) * (count - 1) + (fout - 8 * (count - 1),))
        for index, ((fin, fout), count) in enumerate(zip(layers, slices, strict=True))
    ]
    assert most_inside_rows(groups, torch.device("cpu")) == 0
    monkeypatch.setattr(linear_ops, "fits_kernel", lambda device: True)
    monkeypatch.setattr(linear_ops, "_num_sms", lambda device: 132)
    assert most_inside_rows(groups, torch.device("cuda")) == most


def test_a_dropped_order_is_left_for_the_next_best() -> None:
    tables = AdapterTables(1, 1)
    tables.slot_rank[0] = 4
    lora = TableLoRA(tables, Arena(64, dtype=torch.float32), max_rows=MANY, max_rank=8, inside_rows=64)
    few, many = np.zeros(64, np.int32), np.zeros(MANY, np.int32)
    assert [lora.order(few), lora.order(many)] == [LoRAOrder.INSIDE, LoRAOrder.AHEAD]
    lora.dropped.add(LoRAOrder.AHEAD)
    assert [lora.order(few), lora.order(many)] == [LoRAOrder.INSIDE, LoRAOrder.BESIDE]
    lora.dropped.add(LoRAOrder.INSIDE)
    assert [lora.order(few), lora.order(many)] == [LoRAOrder.BESIDE, LoRAOrder.BESIDE]


def test_a_layer_with_lora_inside_is_one_op(mlp: Mlp, x: Tensor) -> None:
    mlp.context.table_step, mlp.lora.running = mlp.lora, LoRAOrder.INSIDE
    with torch.inference_mode(), Recorder() as recorder:
        got = mlp(x)
    assert [name for name, _, _ in recorder.calls] == ["punica::lora_linear"] * 2
    torch.testing.assert_close(got.double(), mlp.expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "num_slices", "names"),
    [
        (64, 3, ["punica::lora_linear"]),
        (65, 2, ["punica::lora_linear"]),
        (65, 3, ["punica::lora_shrink", "aten::linear", "punica::lora_expand"]),
    ],
)
def test_layers_that_the_kernel_is_too_slow_for_are_computed_beside_it(num_rows, num_slices, names) -> None:
    tables = AdapterTables(3, 1)
    lora = TableLoRA(tables, Arena(64, dtype=torch.float32), max_rows=65, max_rank=8, inside_rows=128)
    lora.running = LoRAOrder.INSIDE
    lora.begin(np.full(num_rows, -1, np.int32))
    x, weight = torch.randn(num_rows, HIDDEN), torch.randn(8 * num_slices, HIDDEN)
    with torch.inference_mode(), Recorder() as recorder:
        y = lora.product(tables.group(0, num_slices), (8,) * num_slices, x, weight, None)
    assert [name for name, _, _ in recorder.calls] == names
    torch.testing.assert_close(y, x @ weight.T)


def test_a_step_without_lora_has_one_order() -> None:
    assert lora_orders(MANY, lora=False) == lora_orders(1, lora=False) == (LoRAOrder.NONE,)


def test_it_can_be_turned_off(mlp: Mlp, x: Tensor) -> None:
    mlp.context.table_step = mlp.lora
    with torch.inference_mode():
        want = mlp(x)
        mlp.lora.beside = False
        with Recorder() as recorder:
            assert torch.equal(mlp(x), want)
    assert recorder.calls[0][2].get("beside", False) is False
    assert recorder.calls[2][2].get("x") is None


CALL = re.compile(r"^        (?:torch\.ops\.)?(punica\.\w+|extern_kernels\.\w+|cpp_fused\w*)[.(]", re.MULTILINE)


def compiled_code(mlp: Mlp, x: Tensor) -> tuple[str, list[str]]:
    """What torch compiles, once it gives what eager code does: its body, and the ops and products that it calls."""
    torch._dynamo.reset()
    with torch.inference_mode():
        want = mlp(x)
        got, code = run_and_get_code(torch.compile(mlp, fullgraph=True, dynamic=True), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    body = code[0][code[0].index("def call(") : code[0].index("runner = ")]
    return body, [name for name in CALL.findall(body) if not name.startswith("cpp_fused")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_compiled_code_adds_the_product_in_place(x: Tensor) -> None:
    mlp = Mlp(bias=False)
    mlp.context.table_step, mlp.lora.running = mlp.lora, LoRAOrder.AHEAD
    body, calls = compiled_code(mlp, x)
    assert calls == ["punica.lora_shrink", "punica.lora_expand", "punica.add_product"] * 2
    between = [part.split("punica.add_product")[0] for part in body.split("punica.lora_shrink.default")[1:]]
    assert len(between) == 2
    assert not any("cpp_fused" in part for part in between)
    assert "clone" not in body


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_compiled_code_of_a_layer_with_lora_inside_copies_nothing(mlp: Mlp, x: Tensor) -> None:
    mlp.context.table_step, mlp.lora.running = mlp.lora, LoRAOrder.INSIDE
    body, calls = compiled_code(mlp, x)
    assert calls == ["punica.lora_linear"] * 2
    assert "clone" not in body


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_each_order_is_compiled_once(x: Tensor) -> None:
    torch._dynamo.reset()
    mlp, counter = Mlp(bias=False), CompileCounter()
    compiled = torch.compile(mlp, backend=counter, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for num_rows in (13, 7, 60):
            mlp.lora.begin(np.zeros(num_rows, np.int32))
            for order in LoRAOrder:
                mlp.context.table_step = None if order is LoRAOrder.NONE else mlp.lora
                mlp.lora.running = order
                compiled(x[:1].repeat(num_rows, 1))
    assert counter.frame_count == len(LoRAOrder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_compiled_code_keeps_the_order_and_copies_nothing(mlp: Mlp, x: Tensor) -> None:
    mlp.context.table_step = mlp.lora
    body, calls = compiled_code(mlp, x)
    product = "extern_kernels.addmm" if mlp.down.bias is not None else "extern_kernels.mm"
    assert calls == ["punica.lora_shrink", product, "punica.lora_expand"] * 2
    between = [part.split("punica.lora_expand")[0] for part in body.split("punica.lora_shrink.default")[1:]]
    assert len(between) == 2
    assert not any("cpp_fused" in part for part in between)
    assert body.count("x=buf") == 2
    assert "clone" not in body
