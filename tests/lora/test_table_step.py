"""Shrink before the base product and expand behind it: in that order, on unchanged inputs, eager and compiled."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from punica_core.lora.layers import LinearGroup, LoRAContext, LoRALinear
from punica_core.lora.linear import has_onednn
from punica_core.lora.table_step import TableLoRA
from punica_core.lora.tables import AdapterTables, Arena, ModuleWeights

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
        assert shrink[2] == {"beside": True}
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_compiled_code_keeps_the_order_and_copies_nothing(mlp: Mlp, x: Tensor) -> None:
    torch._dynamo.reset()
    mlp.context.table_step = mlp.lora
    with torch.inference_mode():
        want = mlp(x)
        got, code = run_and_get_code(torch.compile(mlp, fullgraph=True, dynamic=True), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    body = code[0][code[0].index("def call(") : code[0].index("runner = ")]
    product = "extern_kernels.addmm" if mlp.down.bias is not None else "extern_kernels.mm"
    calls = [name for name in CALL.findall(body) if not name.startswith("cpp_fused")]
    assert calls == ["punica.lora_shrink", product, "punica.lora_expand"] * 2
    between = [part.split("punica.lora_expand")[0] for part in body.split("punica.lora_shrink.default")[1:]]
    assert len(between) == 2
    assert not any("cpp_fused" in part for part in between)
    assert body.count("x=buf") == 2
    assert "clone" not in body
