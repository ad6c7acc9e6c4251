from __future__ import annotations

import numpy as np
import pytest
import torch

from punica_core import ops
from tests.support.lora_batch import LoraBatch, make_batch, rows_of
from tests.support.numerics import assert_as_exact_as_torch

pytestmark = pytest.mark.gpu

NUM_ROWS = 40
RANKS = (16, 1, 33, 64, 8)


def captured(batch: LoraBatch, *, summed: bool = False) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    out = batch.y.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        batch.apply(y=out, summed=summed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.apply(y=out, summed=summed)
    return graph, out


def batch_of(dtype: torch.dtype = torch.bfloat16) -> LoraBatch:
    slots = rows_of([1] * NUM_ROWS)
    return make_batch(slots, ranks=RANKS, in_features=1024, out_features=(264, 64), dtype=dtype, device="cuda")


def draw_rows(generator: np.random.Generator, num_rows: int = NUM_ROWS) -> np.ndarray:
    """Any mix: how many adapters, how skewed, and where rows without adapter stand are random."""
    num_adapters = int(generator.integers(1, NUM_ROWS + 1))
    weights = generator.random(num_adapters) ** generator.uniform(0.5, 8)
    rows = generator.choice(num_adapters, num_rows, p=weights / weights.sum())
    rows[generator.random(num_rows) < generator.choice([0.0, 0.1, 0.9])] = -1
    return np.sort(rows).astype(np.int32)


def test_one_graph_replays_any_mix_with_the_bits_of_eager() -> None:
    batch = batch_of()
    graph, out = captured(batch)
    generator = np.random.default_rng(0)
    for _ in range(50):
        batch.row_slots = draw_rows(generator)
        batch.plan.set_rows(batch.row_slots, batch.tables.slot_rank)
        want = batch.apply()
        out.copy_(batch.y)
        graph.replay()
        assert torch.equal(out, want)
    assert_as_exact_as_torch(out, batch.expected(), batch.expected(out.dtype))


def test_one_graph_of_prompts_replays_any_mix_with_the_bits_of_eager() -> None:
    num_rows = 700
    slots = (np.arange(num_rows) * NUM_ROWS // num_rows).tolist()
    batch = make_batch(
        slots, ranks=RANKS, in_features=1088, out_features=(264, 64), dtype=torch.bfloat16, device="cuda", num_splits=2
    )
    graph, out = captured(batch, summed=True)
    generator = np.random.default_rng(2)
    for _ in range(50):
        step_rows = int(generator.integers(1, num_rows + 1))
        drawn = draw_rows(generator, step_rows)
        batch.plan.set_rows(drawn, batch.tables.slot_rank)
        batch.row_slots = np.concatenate([drawn, np.full(num_rows - step_rows, -1, np.int32)])
        want = batch.apply(summed=True)
        batch.v.view(torch.int32).fill_(-1)
        out.copy_(batch.y)
        graph.replay()
        assert torch.equal(out, want)
        assert_as_exact_as_torch(out, batch.expected(), batch.expected(out.dtype))


def test_rows_beyond_the_step_keep_their_bits_under_a_padded_graph() -> None:
    batch = batch_of()
    graph, out = captured(batch)
    batch.plan.set_rows(batch.row_slots[:5].copy(), batch.tables.slot_rank)
    out.copy_(batch.y)
    graph.replay()
    assert torch.equal(out[5:], batch.y[5:])
    assert not torch.equal(out[:5], batch.y[:5])


@pytest.mark.parametrize("between", [False, True], ids=["product", "product and more"])
def test_a_product_beside_shrink_changes_no_bit(between: bool) -> None:
    batch = batch_of()
    weight = torch.randn(batch.y.size(1), batch.x.size(1), dtype=batch.x.dtype, device="cuda") / 32
    common = (batch.arena.buffer, batch.table, batch.plan.plan)
    out = torch.empty_like(batch.y)

    def layer(*, beside: bool) -> None:
        ops.lora_shrink(batch.v, batch.x, *common, batch.max_rank, beside=beside)
        torch.mm(batch.x, weight.t(), out=out)
        if between:
            out.add_(1).mul_(2)
        x = batch.x if beside else None
        ops.lora_expand(out, batch.v, *common, batch.out_features, batch.x.size(1), batch.max_rank, x=x)

    graphs = []
    for beside in (False, True):
        layer(beside=beside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                layer(beside=beside)
        graphs.append(graph)
    graphs[0].replay()
    want = out.clone()
    assert not torch.equal(want, batch.x @ weight.t())
    for _ in range(20):
        batch.v.fill_(torch.nan)
        out.fill_(torch.nan)
        graphs[1].replay()
        assert torch.equal(out, want)


def test_ten_thousand_random_mixes_do_not_hang() -> None:
    batch = batch_of()
    graph, out = captured(batch)
    generator = np.random.default_rng(1)
    mixes = [draw_rows(generator) for _ in range(500)]
    finite = torch.ones((), dtype=torch.bool, device="cuda")
    for index in range(10_000):
        batch.plan.set_rows(mixes[index % len(mixes)], batch.tables.slot_rank)
        out.copy_(batch.y)
        graph.replay()
        finite &= out.isfinite().all()
    torch.cuda.synchronize()
    assert finite


def test_back_to_back_groups_share_one_scratch() -> None:
    batch = batch_of()
    other = make_batch(
        rows_of([NUM_ROWS]), ranks=[128], in_features=512, out_features=(512,), device="cuda", dtype=torch.bfloat16
    )
    want, other_want = batch.apply(), other.apply()
    scratch = torch.full((max(batch.v.numel(), other.v.numel()),), torch.nan, device="cuda")
    batch.v, other.v = scratch[: batch.v.numel()], scratch[: other.v.numel()]
    torch.cuda.synchronize()
    results = [(batch.apply(), other.apply()) for _ in range(50)]
    for got, other_got in results:
        assert torch.equal(got, want)
        assert torch.equal(other_got, other_want)
