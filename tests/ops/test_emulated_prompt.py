"""The logic of shrink for prompts, run on the CPU: see ``tests/ops/linear_emulator``."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from punica_core.ops.build import source_directory
from punica_core.ops.layout import Header, row_pitch
from tests.ops.linear_emulator import KernelFailed
from tests.ops.linear_emulator.prompt import (
    LARGE_CLUSTER,
    PROMPT_KERNELS,
    SMALL_CLUSTER,
    PromptRoom,
    emulated_prompt_shrink,
)
from tests.support.emulation import compile_kernels
from tests.support.lora_batch import MIXED_RANKS, LoraBatch, make_batch, rows_of
from tests.support.numerics import assert_as_exact_as_torch


@pytest.fixture(scope="module")
def library(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(nvcc, PROMPT_KERNELS, tmp_path_factory.mktemp("emulated") / "prompt.so")


@dataclass
class Case:
    """counts: rows of each adapter, behind `base` rows of none."""

    counts: list[int]
    ranks: tuple[int, ...]
    in_features: int
    slices: int = 1
    base: int = 0
    clusters: int = 2
    blocks: int = LARGE_CLUSTER
    options: dict[str, Any] = field(default_factory=dict)

    def batch(self) -> LoraBatch:
        options = {"dtype": torch.bfloat16, "num_splits": 2} | self.options
        return make_batch(
            rows_of(self.counts, base_rows=self.base),
            ranks=self.ranks,
            in_features=self.in_features,
            out_features=(8,) * self.slices,
            **options,
        )


CASES = {
    "one adapter": Case([270], (16,), 512),
    "as q, k and v": Case([257], (16,), 4096, 3, clusters=1),
    "as down": Case([40, 217], (16,), 14336, clusters=1),
    "all ranks": Case([3, 1, 64, 30, 40, 65, 8, 20, 17, 20], MIXED_RANKS, 192, 2, base=5),
    "more ranks than a pass": Case([260], (256,), 64, 3),
    "no multiple of a pass": Case([190, 70], (64, 72), 320, 4),
    "two products": Case([100, 160], (48, 40), 1088, 2),
    "single rows": Case([1] * 20 + [250], (8, 16, 3), 1984, 3),
    "slices that are not adapted": Case(
        [100, 90, 70], (16, 40, 8), 128, 3, options={"missing": [(0, 1), (1, 0), (1, 2), *((2, i) for i in range(3))]}
    ),
    "fewer steps than blocks": Case([60, 200], (16, 5), 128, 2, clusters=3),
    "small clusters": Case([150, 5, 102], (48, 64, 130), 576, 3, blocks=SMALL_CLUSTER),
    "small clusters of one group": Case([150, 3, 104], (16, 5), 320, blocks=SMALL_CLUSTER, clusters=3),
    "float16": Case([150, 110], (16, 33), 576, 2, options={"dtype": torch.float16}),
}


def run(library: Path, case: Case, seed: int = 0) -> None:
    batch = case.batch()
    poison(batch)
    emulated_prompt_shrink(library, batch, num_clusters=case.clusters, cluster_blocks=case.blocks, seed=seed)
    check(batch)


def poison(batch: LoraBatch) -> None:
    batch.v.view(torch.int32).fill_(-1)  # not a number in halves, too


def hidden_rows(batch: LoraBatch) -> Tensor:
    """[T, slices, rank pitch]."""
    pitch, slices = int(batch.plan.plan[Header.RANK_PITCH]), len(batch.out_features)
    return batch.v.view(batch.x.dtype)[: len(batch.x) * slices * pitch].view(len(batch.x), slices, pitch)


def check(batch: LoraBatch) -> None:
    """That rows are low-rank rows of their adapters, zero up to a multiple of 8, and nothing else is written."""
    hidden = hidden_rows(batch)
    touched = torch.zeros_like(hidden, dtype=torch.bool)
    for slot, modules in batch.adapters.items():
        rows = torch.from_numpy(np.flatnonzero(batch.row_slots == slot))
        for index, module in enumerate(modules):
            if module is None:
                continue
            lora_rank = len(module.a)
            got = hidden[rows, index, :lora_rank]
            want = batch.x[rows].double() @ module.a.double().T
            assert_as_exact_as_torch(got, want, batch.x[rows] @ module.a.T)
            assert not hidden[rows, index, lora_rank : row_pitch(lora_rank)].any()
            touched[rows, index, : row_pitch(lora_rank)] = True
    assert hidden[~touched].isnan().all()
    assert batch.v[hidden.numel() // 2 :].isnan().all()


@pytest.mark.parametrize("name", CASES)
def test_every_row_gets_its_own_adapter(library, name) -> None:
    run(library, CASES[name])


def test_the_order_in_which_threads_and_copies_run_changes_no_bit(library) -> None:
    results = []
    for seed in range(4):
        batch = CASES["two products"].batch()
        poison(batch)
        emulated_prompt_shrink(library, batch, seed=seed)
        results.append(batch.v.view(torch.int32).clone())
    assert all(torch.equal(result, results[0]) for result in results)
    batch.plan.set_rows(np.roll(batch.row_slots, 1), batch.tables.slot_rank)
    emulated_prompt_shrink(library, batch)
    assert not torch.equal(batch.v.view(torch.int32), results[0])


def test_a_row_that_is_not_a_number_stays_alone(library) -> None:
    batch = CASES["one adapter"].batch()
    emulated_prompt_shrink(library, batch)
    want = hidden_rows(batch).clone()
    batch.x[70] = torch.nan
    emulated_prompt_shrink(library, batch)
    got = hidden_rows(batch)
    assert got[70].isnan().all()
    others = torch.arange(len(got)) != 70
    assert torch.equal(got[others], want[others])


def test_a_plan_of_fewer_rows_than_x_has(library) -> None:
    batch = CASES["one adapter"].batch()
    batch.row_slots[100:] = -1
    batch.plan.set_rows(batch.row_slots[:120], batch.tables.slot_rank)
    poison(batch)
    emulated_prompt_shrink(library, batch)
    check(batch)


@pytest.mark.parametrize("change", ["rows", "width", "start"])
def test_what_the_kernel_does_not_take_is_refused(library, change) -> None:
    batch = CASES["one adapter"].batch()
    wide = torch.zeros(270, 520, dtype=torch.bfloat16)
    batch.x = {"rows": batch.x[:256], "width": wide[:, :504], "start": wide[:, 4:516]}[change]
    with pytest.raises(ValueError, match="does not take"):
        emulated_prompt_shrink(library, batch)


@pytest.mark.parametrize(
    ("room", "num_rows", "clusters"),
    [
        ((30, 62), 1984, (8, 30)),
        ((30, 62), 1985, (4, 62)),
        ((40, 80), 300, (8, 33)),
        ((0, 14), 300, (4, 14)),
        ((3, 0), 5000, (8, 3)),
        ((0, 0), 300, (4, 0)),
    ],
    ids=str,
)
def test_clusters_are_of_a_size_that_the_gpu_has_room_for(library, room, num_rows, clusters) -> None:
    gpu = PromptRoom(library)
    device = 1000 + gpu.times_asked
    gpu.set(*room)
    assert gpu.clusters(num_rows, device) == clusters


def test_each_gpu_is_asked_once(library) -> None:
    gpu = PromptRoom(library)
    first, second = 2000 + gpu.times_asked, 3000 + gpu.times_asked
    gpu.set(30, 62)
    assert gpu.clusters(300, first) == (8, 30)
    gpu.set(0, 5)
    asked = gpu.times_asked
    assert gpu.clusters(300, first) == (8, 30)
    assert gpu.times_asked == asked
    assert gpu.clusters(300, second) == (4, 5)
    assert gpu.clusters(300, first) == (8, 30)


@pytest.mark.parametrize("misuse", ["max_rank", "rows", "older plan"])
def test_misuse_that_only_the_device_can_see_stops_the_kernel(library, misuse) -> None:
    batch = CASES["no multiple of a pass"].batch()
    if misuse == "max_rank":
        batch.max_rank = 64
    elif misuse == "rows":
        batch.x = batch.x[:-1]
    else:
        batch.plan.set_rows(batch.row_slots, np.minimum(batch.tables.slot_rank, 64))
    with pytest.raises(KernelFailed, match="the kernel stops"):
        emulated_prompt_shrink(library, batch)


def is_wrong(library: Path, case: Case) -> bool:
    try:
        for seed in range(3):
            run(library, case, seed)
    except (AssertionError, KernelFailed):
        return True
    return False


BREAKS = {
    "a stage is read before it is there": ("    ring.await_full();\n", ""),
    "stages are given back too early": ("    await_products<0>();\n", ""),
    "stages are never given back": ("    if (threadIdx.x % 32 == 0) arrive(ring.empty());\n", ""),
    "x comes while it is read": (
        "        ring.await_empty();\n        if (lane == 0) arrive_for(ring.full(), boxes",
        "        if (lane == 0) arrive_for(ring.full(), boxes",
    ),
    "x comes before the kernel in front ends": (
        "  PromptWalk<kBlocks> walk(params.shrink.tables);\n  wait_for_previous();\n",
        "  PromptWalk<kBlocks> walk(params.shrink.tables);\n",
    ),
    "A starts in another row": ("          ++row;\n", ""),
    "A starts in another column": ("params.a_shift) / kStartElements", "0) / kStartElements"),
    "rows of another slice": ("of_last >= 0 && of_first == of_last", "of_last >= 0"),
    "what lies behind the arena": (
        "int64_t const behind = kPromptColumns - kStartElements;",
        "int64_t const behind = 0;",
    ),
    "sums are read before they are there": ("    mail.await_there();\n", ""),
    "mail comes to a block that has not begun": (
        "  cluster.wait();\n  wait_for_previous();\n",
        "  wait_for_previous();\n",
    ),
    "mail comes while it is read": ("    mail.await_read();\n", ""),
    "a block ends before the others": ("  mail.await_read();  // nobody arrives at a block that has ended\n", ""),
    "rows go to the wrong block": ("int const octet = 2 * warp + half;", "int const octet = warp + 4 * half;"),
    "ranks in another order": ("quad % 2 * 32 + quad / 2 * 8", "quad % 2 * 32 + quad / 2 * 16"),
    "v at another pitch": (".rank_pitch = own.rank_pitch", ".rank_pitch = 2 * own.rank_pitch"),
    "rows behind the tile": (" || t >= tile.rows.y", ""),
    "ranks that are not there": ("group.lora_rank - rank);", "4);"),
    "one pass": ("int const left = num_groups - group;\n", "int const left = num_groups - group; group += 1000;\n"),
    "the walk skips tiles": ("next_ += gridDim.x / kBlocks;", "next_ += gridDim.x;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_kernel_is_noticed(nvcc, tmp_path, name) -> None:
    text, broken = BREAKS[name]
    sources = Path(shutil.copytree(source_directory(), tmp_path / "csrc"))
    names = ("shrink.cuh", "memory.cuh", "walk.cuh", "params.h")
    headers = [sources / "include" / "punica" / f"prompt_{name}" for name in names]
    assert sum(header.read_text().count(text) for header in headers) == 1
    for header in headers:
        header.write_text(header.read_text().replace(text, broken))
    library = compile_kernels(nvcc, PROMPT_KERNELS, tmp_path / "broken.so", sources)
    assert any(is_wrong(library, case) for case in CASES.values())
