"""Segmented LoRA equals the plain mathematics of each row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from punica_core import ops
from punica_core.lora.layers import LinearGroup, StepLoRA
from punica_core.lora.plan import Segment, build_segments
from punica_core.lora.segmented import SegmentedLoRA
from punica_core.lora.segments import SegmentPlan
from punica_core.lora.tables import AdapterTables, Arena, ModuleWeights, num_module_elements
from punica_core.lora.weights import AdapterWeights

GROUPS = (LinearGroup(0, ("q", "k", "v"), 24, (24, 8, 8)), LinearGroup(1, ("o",), 24, (24,)))
CPU = torch.device("cpu")
RANKS = (1, 2, 3, 5, 8, 16, 33, 64)


def adapter(
    index: int, rank: int, paths: str = "qkvo", *, size: float = 1.0, gains: str = "", biases: str = ""
) -> AdapterWeights:
    """gains, biases: the modules that have a row gain, a bias."""
    generator = torch.Generator().manual_seed(index)
    widths = {"q": 24, "k": 8, "v": 8, "o": 24}
    modules = {
        path: ModuleWeights(
            size * torch.randn(rank, 24, generator=generator),
            size * torch.randn(widths[path], rank, generator=generator),
            0.5 + index,
            torch.randn(widths[path], generator=generator) if path in gains else None,
            torch.randn(widths[path], generator=generator) if path in biases else None,
        )
        for path in paths
    }
    return AdapterWeights(f"key{index}", modules, 0)


GAINS = {2: "qo", 5: "k", 7: "qkvo"}
BIASES = {2: "vo", 5: "q", 4: "o"}
ADAPTERS = [
    adapter(i, rank, "qkvo" if i % 3 else "qv", gains=GAINS.get(i, ""), biases=BIASES.get(i, ""))
    for i, rank in enumerate(RANKS)
]


def segments_of(*runs: tuple[int, int]) -> tuple[Segment, ...]:
    return build_segments(runs, lambda slot: ADAPTERS[slot])


def expected(group: LinearGroup, x: torch.Tensor, y: torch.Tensor, segments: tuple[Segment, ...]) -> torch.Tensor:
    """Row by row in float64."""
    out = y.double()
    for segment in segments:
        for row in range(segment.start, segment.end):
            offset = 0
            for path, width in zip(group.paths, group.out_features, strict=True):
                module = segment.adapter.modules.get(path)
                if module is not None:
                    delta = x[row].double() @ module.a.double().T @ module.b.double().T
                    part = out[row, offset : offset + width]
                    part += module.scale * delta
                    if module.row_gain is not None:
                        part *= module.row_gain.double()
                    if module.bias is not None:
                        part += module.bias.double()
                offset += width
    return out.float()


def step_of(segments: tuple[Segment, ...]) -> StepLoRA:
    step = SegmentedLoRA(GROUPS, 1 << 30, CPU).step(segments)
    assert step is not None
    return step


MIXES = [
    ((-1, 4), (0, 1), (1, 1), (2, 3), (3, 0), (4, 1)),
    ((0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1)),
    ((4, 6),),
    ((-1, 1), (5, 5)),
    ((2, 2), (-1, 3), (1, 2)),
    ((7, 12), (0, 1)),
]


@pytest.mark.parametrize("runs", MIXES)
@pytest.mark.parametrize("group", GROUPS, ids=["qkv", "o"])
def test_every_row_gets_its_own_adapter(group: LinearGroup, runs: tuple[tuple[int, int], ...]) -> None:
    rows = sum(count for _, count in runs)
    x, y = torch.randn(rows, 24), torch.randn(rows, sum(group.out_features))
    segments = segments_of(*runs)
    wanted = expected(group, x, y, segments)
    got = y.clone()
    step_of(segments).add(group, x, got)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(got, y)


def sgmv(group: LinearGroup, x: torch.Tensor, y: torch.Tensor, row_slots: list[int]) -> None:
    """What the SGMV op, which is the specification, adds to y."""
    modules = [
        {index: adapter.modules[path] for index, path in enumerate(group.paths) if path in adapter.modules}
        for adapter in ADAPTERS
    ]
    arena = Arena(sum(num_module_elements(m) for of_slot in modules for m in of_slot.values()), dtype=torch.float32)
    tables = AdapterTables(len(group.paths), len(ADAPTERS))
    for slot, of_slot in enumerate(modules):
        tables.write(slot, of_slot, arena)
    plan = SegmentPlan(len(row_slots), max_rank=64)
    plan.set_rows(np.array(row_slots, np.int32), tables.slot_rank)
    scratch = torch.empty(len(row_slots) * 64 * len(group.paths))
    table = tables.group(0, len(group.paths))
    ops.lora_apply(y, x, scratch, arena.buffer, table, plan.plan, list(group.out_features), 64)


@pytest.mark.parametrize("runs", MIXES)
@pytest.mark.parametrize("group", GROUPS, ids=["qkv", "o"])
def test_it_equals_the_sgmv_op(group: LinearGroup, runs: tuple[tuple[int, int], ...]) -> None:
    row_slots = [slot for slot, count in runs for _ in range(count)]
    x, y = torch.randn(len(row_slots), 24), torch.randn(len(row_slots), sum(group.out_features))
    wanted, got = y.clone(), y.clone()
    sgmv(group, x, wanted, row_slots)
    step_of(segments_of(*runs)).add(group, x, got)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(got, y)


def test_rows_without_adapter_are_bitwise_unchanged_between_and_around_segments() -> None:
    segments = segments_of((-1, 2), (2, 2), (-1, 3), (1, 2), (-1, 1))
    x, y = torch.randn(10, 24), torch.randn(10, 40)
    base_rows = [0, 1, 4, 5, 6, 9]
    got = y.clone()
    step_of(segments).add(GROUPS[0], x, got)
    assert torch.equal(got[base_rows], y[base_rows])


def test_an_adapter_that_overflows_changes_no_other_row() -> None:
    huge = adapter(0, 4, size=1e25)
    segments = (Segment(1, 2, huge), Segment(2, 3, ADAPTERS[1]))
    x, y = torch.randn(3, 24), torch.randn(3, 40)
    wanted = expected(GROUPS[0], x, y, segments[1:])
    got = y.clone()
    step_of(segments).add(GROUPS[0], x, got)
    torch.testing.assert_close(got[[0, 2]], wanted[[0, 2]], rtol=1e-4, atol=1e-3)
    assert not torch.isfinite(got[1]).all()


def test_a_step_without_adapters_adds_nothing() -> None:
    assert SegmentedLoRA(GROUPS, 0, CPU).step(segments_of((-1, 5))) is None


def test_neighbouring_runs_of_one_slot_are_one_segment_and_empty_ones_none() -> None:
    segments = segments_of((-1, 2), (0, 1), (0, 3), (1, 0), (2, 1))
    assert [(s.start, s.end, s.adapter.key) for s in segments] == [(2, 6, "key0"), (6, 7, "key2")]


def test_what_is_kept_of_past_adapters_stays_within_its_budget() -> None:
    unbounded, bounded = SegmentedLoRA(GROUPS, 1 << 30, CPU), SegmentedLoRA(GROUPS, 20_000, CPU)
    for lora in (unbounded, bounded):
        for slot in range(6):
            lora.step(segments_of((slot, 1)))
    assert unbounded.nbytes > 20_000
    assert 0 < bounded.nbytes <= 20_000


def test_an_adapter_that_was_dropped_and_comes_back_computes_the_same() -> None:
    lora = SegmentedLoRA(GROUPS, 0, CPU)
    x, y = torch.randn(2, 24), torch.randn(2, 40)
    results = []
    for slots in ((1, 2), (4, 5), (1, 2)):
        got = y.clone()
        step = lora.step(segments_of(*((slot, 1) for slot in slots)))
        assert step is not None
        step.add(GROUPS[0], x, got)
        results.append(got)
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])


def test_slices_that_share_their_a_shrink_once() -> None:
    apart = adapter(1, 5)
    q, k = apart.modules["q"], apart.modules["k"]
    shared = AdapterWeights("shared", {"q": q, "k": ModuleWeights(q.a, k.b, k.scale)}, 0)
    copied = AdapterWeights("copied", {"q": q, "k": ModuleWeights(q.a.clone(), k.b, k.scale)}, 0)
    x, y = torch.randn(2, 24), torch.randn(2, 40)
    results, sizes = [], []
    for weights in (shared, copied):
        lora = SegmentedLoRA(GROUPS, 1 << 30, CPU)
        got = y.clone()
        step = lora.step((Segment(0, 2, weights),))
        assert step is not None
        step.add(GROUPS[0], x, got)
        results.append(got)
        sizes.append(lora.nbytes)
    torch.testing.assert_close(results[0], results[1])
    assert sizes[1] - sizes[0] == q.a.nbytes
    assert not torch.allclose(results[0], y)
