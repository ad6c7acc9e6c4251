"""`lora_linear` in one CUDA graph that is replayed for thousands of mixes of adapters; on a CPU the op, for some."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from punica_core.lora.segments import Int32Array
from punica_core.ops.layout import NUM_COUNTERS
from tests.ops.test_lora_linear import Layer, launched, make_layer, with_batch

NUM_SLOTS = 24
FEW_RANKS = (1, 64, 8, 16, 33, 5)
MANY_RANKS = (1, 32, 8, 16, 24, 5)
"""Of steps of more than 64 rows."""
THREE, TWO = (264, 32, 72), (520, 72)
"""Widths of slices; steps of more than 64 rows have two at most."""


def draw_rows(generator: np.random.Generator, num_rows: int, least_rows: int, most_adapters: int) -> Int32Array:
    """The slots of a step's rows, padding included: how many rows and adapters, how skewed these are and how many rows
    have none is random."""
    count = int(generator.integers(least_rows, num_rows + 1))
    adapters = generator.permutation(NUM_SLOTS)[: generator.integers(1, most_adapters + 1)]
    chosen = generator.random(count) ** generator.choice([1.0, 4.0]) * len(adapters)
    step = adapters[chosen.astype(np.int64)]
    step[generator.random(count) < generator.choice([0.0, 0.1, 0.9])] = -1
    rows = np.full(num_rows, -1, np.int32)
    rows[:count] = np.sort(step)
    return rows


def replayable(layer: Layer, out: Tensor) -> Callable[[], object]:
    """What computes the step begun last into `out`: the replay of a graph, or on a CPU the op."""
    if not out.is_cuda:
        return lambda: layer.run(out)
    layer.run(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run(out)
    return graph.replay


@pytest.mark.parametrize(
    ("num_rows", "least_rows", "most_adapters", "ranks", "out_features"),
    [
        (8, 1, 8, FEW_RANKS, THREE),
        (16, 1, 16, FEW_RANKS, THREE),
        (32, 1, 16, FEW_RANKS, THREE),
        (64, 1, 16, FEW_RANKS, THREE),
        (128, 65, 12, MANY_RANKS, TWO),
    ],
    ids=["8 rows", "16 rows", "32 rows", "64 rows", "128 rows"],
)
@pytest.mark.parametrize(
    ("device", "num_mixes", "between_checks"),
    [("cpu", 30, 10), pytest.param("cuda", 10_000, 250, marks=pytest.mark.gpu)],
    ids=["cpu", "gpu"],
)
def test_ten_thousand_random_mixes(
    device: str,
    num_mixes: int,
    between_checks: int,
    num_rows: int,
    least_rows: int,
    most_adapters: int,
    ranks: Sequence[int],
    out_features: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles = launched(monkeypatch)
    all_slots = np.arange(NUM_SLOTS).repeat(-(-num_rows // NUM_SLOTS)).tolist()
    layer = make_layer(all_slots, ranks=ranks, out_features=out_features, device=device)
    layer = with_batch(layer, x=layer.batch.x[:num_rows], y=layer.batch.y[:num_rows])
    generator = np.random.default_rng(num_rows)
    layer.begin(draw_rows(generator, num_rows, least_rows, most_adapters))
    out = torch.empty_like(layer.batch.y)
    replay = replayable(layer, out)
    if device == "cuda":
        assert [tile and tile.rows for tile in tiles] == [num_rows] * 2, "the kernel is what is tested"
    finite = torch.ones((), dtype=torch.bool, device=device)
    for index in range(1, num_mixes + 1):
        layer.begin(draw_rows(generator, num_rows, least_rows, most_adapters))
        out.fill_(torch.nan)
        replay()
        finite &= out.isfinite().all()
        if index % between_checks == 0:
            assert not layer.batch.plan.plan[-NUM_COUNTERS:].any()
            assert torch.equal(out, layer.run())
            layer.check(out)
    assert finite
    layer.begin([0] * num_rows)
    replay()
    layer.check(out)
    layer.begin([1] * num_rows)
    with pytest.raises(AssertionError):
        layer.check(out)
