"""Stacked and segmented LoRA equal the plain mathematics of each row."""

from __future__ import annotations

import pytest
import torch

from punica_core.lora.layers import LinearGroup
from punica_core.lora.plan import Segment, build_segments
from punica_core.lora.stacked import SegmentedStep, StackedLoRA, StackedStep
from punica_core.lora.weights import AdapterWeights, ModuleWeights

GROUPS = (LinearGroup(0, ("q", "k", "v"), 24, (24, 8, 8)), LinearGroup(1, ("o",), 24, (24,)))
RANKS = (1, 2, 3, 5, 8, 16, 33, 64)


def adapter(index: int, rank: int, paths: str = "qkvo", gain: float = 1.0) -> AdapterWeights:
    generator = torch.Generator().manual_seed(index)
    widths = {"q": 24, "k": 8, "v": 8, "o": 24}
    modules = {
        path: ModuleWeights(
            gain * torch.randn(rank, 24, generator=generator),
            gain * torch.randn(widths[path], rank, generator=generator),
            0.5 + index,
        )
        for path in paths
    }
    return AdapterWeights(f"key{index}", modules, 0)


ADAPTERS = [adapter(i, rank, "qkvo" if i % 3 else "qv") for i, rank in enumerate(RANKS)]


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
                    out[row, offset : offset + width] += module.scale * delta
                offset += width
    return out.float()


def steps_of(segments: tuple[Segment, ...]) -> list[object]:
    """Both ways to compute a step: from the stack, and by segments."""
    lora = StackedLoRA(GROUPS, 1 << 30)
    stacked = [lora.step(segments) for _ in range(2)][-1]
    return [stacked, SegmentedStep(segments)]


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
    for step in steps_of(segments):
        got = y.clone()
        step.add(group, x, got)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
        assert not torch.allclose(got, y)


def test_both_ways_were_tried() -> None:
    stacked, segmented = steps_of(segments_of(*MIXES[0]))
    assert isinstance(stacked, StackedStep)
    assert isinstance(segmented, SegmentedStep)


def test_rows_without_adapter_are_bitwise_unchanged_between_and_around_segments() -> None:
    segments = segments_of((-1, 2), (2, 2), (-1, 3), (1, 2), (-1, 1))
    x, y = torch.randn(10, 24), torch.randn(10, 40)
    base_rows = [0, 1, 4, 5, 6, 9]
    for step in steps_of(segments):
        got = y.clone()
        step.add(GROUPS[0], x, got)
        assert torch.equal(got[base_rows], y[base_rows])


def test_an_adapter_that_overflows_changes_no_other_row() -> None:
    huge = adapter(0, 4, gain=1e25)
    segments = (Segment(1, 2, huge), Segment(2, 3, ADAPTERS[1]))
    x, y = torch.randn(3, 24), torch.randn(3, 40)
    wanted = expected(GROUPS[0], x, y, segments[1:])
    for step in steps_of(segments):
        got = y.clone()
        step.add(GROUPS[0], x, got)
        torch.testing.assert_close(got[[0, 2]], wanted[[0, 2]], rtol=1e-4, atol=1e-3)
        assert not torch.isfinite(got[1]).all()


def test_a_step_without_adapters_adds_nothing() -> None:
    assert StackedLoRA(GROUPS, 0).step(segments_of((-1, 5))) is None


def test_neighbouring_runs_of_one_slot_are_one_segment_and_empty_ones_none() -> None:
    segments = segments_of((-1, 2), (0, 1), (0, 3), (1, 0), (2, 1))
    assert [(s.start, s.end, s.adapter.key) for s in segments] == [(2, 6, "key0"), (6, 7, "key2")]


def test_a_set_of_adapters_is_stacked_when_it_stays() -> None:
    lora = StackedLoRA(GROUPS, 1 << 30)
    one, two = segments_of((0, 1), (1, 1)), segments_of((2, 1), (3, 1))
    kinds = [type(lora.step(segments)) for segments in (one, two, one, one, two, one)]
    assert kinds == [SegmentedStep] * 3 + [StackedStep, SegmentedStep, StackedStep]


def test_stacks_stay_within_their_budget() -> None:
    unbounded, bounded = StackedLoRA(GROUPS, 1 << 30), StackedLoRA(GROUPS, 20_000)
    for lora in (unbounded, bounded):
        for slot in range(6):
            for _ in range(2):
                lora.step(segments_of((slot, 1)))
    assert unbounded.nbytes > 20_000
    assert 0 < bounded.nbytes <= 20_000


def test_many_rows_of_many_adapters_are_not_stacked() -> None:
    wide = (LinearGroup(0, ("o",), 24, (24,)),)
    lora = StackedLoRA(wide, 1 << 30)
    few, many = (segments_of(*((slot, rows) for slot in range(8))) for rows in (1, 4000))
    assert isinstance([lora.step(few) for _ in range(2)][-1], StackedStep)
    assert isinstance([lora.step(many) for _ in range(2)][-1], SegmentedStep)
