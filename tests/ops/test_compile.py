from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from punica_core import ops
from tests.support.lora_batch import make_batch, rows_of


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_a_compiled_graph_makes_no_clone_of_the_output() -> None:
    batch = make_batch(rows_of([3, 5]), ranks=[8], out_features=(48, 16))
    weight = torch.randn(64, 64)

    def copying_layer(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = (x @ weight).clone()
        base = y.clone()
        ops.lora_apply(y, x, v, batch.arena.buffer, batch.table, batch.plan.plan, batch.out_features, batch.max_rank)
        return y + base

    def layer(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        common = (batch.arena.buffer, batch.table, batch.plan.plan)
        ops.lora_apply(y, x, v, *common, batch.out_features, batch.max_rank)
        return y

    want = layer(batch.x, batch.v)
    got, code = run_and_get_code(torch.compile(layer, fullgraph=True), batch.x, batch.v)
    torch.testing.assert_close(got, want)
    assert "punica.lora_expand" in code[0]
    assert "clone" not in code[0]
    assert "cpp_fused" not in code[0]
    _, copying = run_and_get_code(torch.compile(copying_layer, fullgraph=True), batch.x, batch.v)
    assert "clone" in copying[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_a_product_is_added_in_place_and_not_to_a_copy() -> None:
    weight, x = torch.randn(64, 64), torch.randn(5, 64)

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        ops.add_product(y, x, weight)
        return y

    def copying_layer(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        base = y.clone()
        ops.add_product(y, x, weight)
        return y + base

    got, code = run_and_get_code(torch.compile(layer, fullgraph=True, dynamic=True), x)
    torch.testing.assert_close(got, layer(x))
    assert "punica.add_product" in code[0]
    assert "clone" not in code[0]
    assert "cpp_fused" not in code[0]
    _, copying = run_and_get_code(torch.compile(copying_layer, fullgraph=True, dynamic=True), x)
    assert "clone" in copying[0]
