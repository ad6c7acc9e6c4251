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
from tests.ops.linear_emulator.prompt import PROMPT_KERNELS, emulated_prompt_shrink
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
    "all ranks": Case([3, 1, 64, 30, 40, 65, 8, 20, 17, 20], MIXED_RANKS, 176, 2, base=5),
    "more ranks than a pass": Case([260], (256,), 72, 3),
    "no multiple of a pass": Case([190, 70], (64, 72), 264, 4),
    "two products": Case([100, 160], (48, 40), 1032, 2),
    "single rows": Case([1] * 20 + [250], (8, 16, 3), 2056, 3),
    "slices that are not adapted": Case(
        [100, 90, 70], (16, 40, 8), 136, 3, options={"missing": [(0, 1), (1, 0), (1, 2), *((2, i) for i in range(3))]}
    ),
    "fewer steps than blocks": Case([60, 200], (16, 5), 72, 2, clusters=3),
    "float16": Case([150, 110], (16, 33), 520, 2, options={"dtype": torch.float16}),
}


def run(library: Path, case: Case, seed: int = 0) -> None:
    batch = case.batch()
    poison(batch)
    emulated_prompt_shrink(library, batch, num_clusters=case.clusters, seed=seed)
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
    batch.x = {"rows": batch.x[:256], "width": wide[:, :508], "start": wide[:, 4:516]}[change]
    with pytest.raises(ValueError, match="does not take"):
        emulated_prompt_shrink(library, batch)


def is_wrong(library: Path, case: Case) -> bool:
    try:
        for seed in range(3):
            run(library, case, seed)
    except (AssertionError, KernelFailed):
        return True
    return False


BREAKS = {
    "x is read before it is there": ("operand_at(x_ring.await_full())", "operand_at(x_ring.await_empty())"),
    "A is read before it is there": ("operand_at(a_ring.await_full())", "operand_at(a_ring.await_empty())"),
    "slots are given back too early": ("    await_products<0>();\n", ""),
    "slots are never given back": ("    x_ring.release();\n", ""),
    "x comes before the kernel in front ends": (
        "  PromptWalk walk(params.shrink.tables);\n  wait_for_previous();\n",
        "  PromptWalk walk(params.shrink.tables);\n",
    ),
    "sums are read before they are there": ("    await(barrier(), count_ / kMailboxes & 1);\n", ""),
    "one mailbox": ("count_ % kMailboxes * kMailBytes", "0 * kMailBytes"),
    "mail comes to a block that has not begun": (
        "  cluster.wait();\n  wait_for_previous();\n",
        "  wait_for_previous();\n",
    ),
    "mail comes while it is read": ("    named_barrier(kMailBarrier, kMultipliers);\n", ""),
    "rows go to the wrong block": ("address_in_block(to, 2 * warp + half)", "address_in_block(to, warp + 4 * half)"),
    "sources change while they are read": (
        "  named_barrier(kSourcesBarrier, kAThreads);  // those of the pass before have been read\n",
        "",
    ),
    "sources are read before they are there": ("  named_barrier(kSourcesBarrier, kAThreads);\n}", "}"),
    "ranks in another order": ("member % 8 / 2 * 4 + member / 8 * 2", "member % 8 / 2 * 2 + member / 8 * 8"),
    "columns behind the end": ("inside ? source + column : source, inside", "source + column, true"),
    "v at another pitch": (".rank_pitch = rank_pitch", ".rank_pitch = 2 * rank_pitch"),
    "rows behind the tile": ("t >= tile.rows.y || ", ""),
    "ranks that are not there": ("group.lora_rank - rank);", "4);"),
    "one pass": ("  int const left = num_groups - group;\n", "  int const left = num_groups - group; group += 1000;\n"),
    "the walk skips tiles": ("next_ += gridDim.x / kPromptClusterBlocks;", "next_ += gridDim.x;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_kernel_is_noticed(nvcc, tmp_path, name) -> None:
    text, broken = BREAKS[name]
    sources = Path(shutil.copytree(source_directory(), tmp_path / "csrc"))
    headers = [sources / "include" / "punica" / f"prompt_{name}.cuh" for name in ("shrink", "walk")]
    assert sum(header.read_text().count(text) for header in headers) == 1
    for header in headers:
        header.write_text(header.read_text().replace(text, broken))
    library = compile_kernels(nvcc, PROMPT_KERNELS, tmp_path / "broken.so", sources)
    assert any(is_wrong(library, case) for case in CASES.values())
