"""The logic of the fused linear layer, run on the CPU: see ``tests/ops/linear_emulator``."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from punica_core.ops.build import source_directory
from punica_core.ops.linear import LinearTile, fits_kernel
from tests.ops.linear_emulator import KERNELS, EmulatedLinear, KernelFailed, NoRoom
from tests.ops.test_lora_linear import Layer, make_layer
from tests.support.emulation import compile_kernels
from tests.support.lora_batch import rows_of


@pytest.fixture(scope="module")
def library(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(nvcc, KERNELS, tmp_path_factory.mktemp("emulated") / "linear.so")


@dataclass
class Case:
    """counts: rows of each adapter, behind `base` rows of none."""

    counts: list[int]
    tile: LinearTile
    base: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    adapted: bool = True

    def layer(self, device: str = "cpu") -> Layer:
        options = {"in_features": 256, "out_features": (128,), "dtype": torch.bfloat16, "device": device} | self.options
        layer = make_layer(rows_of(self.counts, base_rows=self.base), **options)
        if not self.adapted:
            layer.begin([-1] * len(layer.batch.x))
        return layer


def case(counts: list[int], tile: tuple[int, ...], base: int = 0, **options: Any) -> Case:
    return Case(counts, LinearTile(*tile), base, options)


CASES = {
    "one row": case([1], (8, 64, 2, 2, 6), ranks=[16]),
    "one adapter, blocks alone": case([60], (64, 64, 1, 1, 5), ranks=[16], out_features=(192,)),
    "adapters where sums will be": case([60], (64, 64, 1, 1, 5), ranks=[16], in_features=320, out_features=(192,)),
    "one adapter, blocks share K": case([33], (64, 64, 2, 2, 3), ranks=[64], in_features=1000, bias=True),
    "an adapter for each row": case([1] * 16, (16, 128, 1, 1, 4), ranks=[16], out_features=(232,)),
    "any rank": case([5, 1, 30, 2], (64, 32, 2, 2, 8), 3, ranks=[256, 130, 7, 16], out_features=(96, 40, 56)),
    "more of one adapter than a stage holds": case([3, 2], (8, 96, 2, 2, 4), ranks=[256], out_features=(96,)),
    "more rows than a stage holds": case([40], (64, 64, 1, 1, 5), ranks=[256], out_features=(64, 64)),
    "slices that begin inside a block": case([3, 4, 8], (16, 96, 1, 2, 6), 1, out_features=(104, 40, 72)),
    "slices that are not adapted": case([2, 9], (16, 64, 2, 2, 4), out_features=(64, 72), missing=[(0, 1), (1, 0)]),
    "a third of four products": case([3, 12, 1], (32, 144, 1, 1, 6), 1, in_features=512, out_features=(328, 328)),
    "four warpgroups": case([20, 30], (64, 208, 1, 1, 5), ranks=[16], out_features=(328, 104)),
    "many rows, blocks share K": case([100, 5], (128, 64, 2, 2, 3), 9, ranks=[16, 30], in_features=1000, bias=True),
    "sums where adapters were": case([100, 5], (128, 64, 2, 2, 3), 9, ranks=[16, 30], in_features=768, bias=True),
    "more rows of a large rank than a stage holds": case([70], (128, 64, 2, 1, 4), ranks=[64], out_features=(64, 64)),
    "a last block of few columns": case([4], (8, 48, 1, 2, 5), ranks=[8], out_features=(104,)),
    "sums of several splits": case([3], (8, 16, 1, 2, 5), ranks=[8], in_features=4096, out_features=(64, 64)),
    "splits that have nothing": case(
        [3], (8, 16, 1, 2, 5), ranks=[8], in_features=4096, out_features=(64, 64), missing=[(0, 1)]
    ),
    "fewer steps than blocks": case([2], (8, 64, 4, 2, 4), ranks=[16], in_features=128),
    "float16": case([7, 1], (8, 64, 2, 2, 6), 0, dtype=torch.float16),
    "nobody has an adapter": dataclasses.replace(case([1], (8, 64, 2, 2, 6), ranks=[1]), adapted=False),
    **{
        f"{rows} rows, {height} columns": case(
            [rows // 2, 1, rows // 4], (rows, height, 1, 1, 3), 1, ranks=[16, 9], out_features=(height, 40)
        )
        for rows, height in itertools.product((8, 16, 32, 64, 128), (64, 128, 224))  # a kernel each
    },
}


def run(library: Path, name: str, seed: int = 0) -> None:
    tried = CASES[name]
    layer = tried.layer()
    out = torch.full_like(layer.batch.y, torch.nan)
    EmulatedLinear(library)(layer.batch, layer.weight, layer.bias, out, tried.tile, seed=seed)
    layer.check(out)


@pytest.mark.parametrize("name", CASES)
def test_every_row_gets_the_base_and_its_own_adapter(library, name) -> None:
    run(library, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_computes_the_same(name) -> None:
    if not fits_kernel(torch.device("cuda")):
        pytest.skip("the kernel needs compute capability 9.0")
    tried = CASES[name]
    batch = (layer := tried.layer("cuda")).batch
    for _ in range(3):  # counters are left as they were found
        out = torch.full_like(batch.y, torch.nan)
        batch.v.fill_(torch.nan)
        tables = (batch.arena.buffer, batch.table, batch.plan.plan)
        sizes = (batch.out_features, batch.max_rank, list(tried.tile))
        torch.ops.punica.lora_linear_tile(out, batch.v, batch.x, layer.weight, layer.bias, *tables, *sizes)
        layer.check(out)


def test_the_order_in_which_threads_and_copies_run_changes_no_bit(library) -> None:
    tried = CASES["slices that begin inside a block"]
    results = []
    for seed in range(4):
        layer = tried.layer()
        results.append(torch.full_like(layer.batch.y, torch.nan))
        EmulatedLinear(library)(layer.batch, layer.weight, layer.bias, results[-1], tried.tile, seed=seed)
    assert all(torch.equal(result, results[0]) for result in results)
    layer.begin(np.roll(layer.batch.row_slots, 1))
    other = torch.full_like(layer.batch.y, torch.nan)
    EmulatedLinear(library)(layer.batch, layer.weight, layer.bias, other, tried.tile)
    assert not torch.equal(other, results[0])


def test_a_tile_that_does_not_fit_is_refused(library) -> None:
    layer = CASES["one row"].layer()
    out = torch.full_like(layer.batch.y, torch.nan)
    with pytest.raises(ValueError, match="no such tile"):
        EmulatedLinear(library)(layer.batch, layer.weight, layer.bias, out, LinearTile(8, 64, 2, 2, 1))


NEXT, DONE = -4, -3
"""Words of a plan: the counters of the queue and of complete units."""


@pytest.mark.parametrize(("room", "is_started"), [(3, False), (4, True)])
def test_a_gpu_without_room_for_all_blocks_at_once_does_not_start(library, room, is_started) -> None:
    tried = CASES["one row"]  # two clusters of two
    layer = tried.layer()
    out = torch.full_like(layer.batch.y, torch.nan)
    kernel = EmulatedLinear(library, room=room, device=room)
    for _ in range(2):  # as it is asked once, and later remembered
        with contextlib.nullcontext() if is_started else pytest.raises(NoRoom, match="4 blocks, room for 3"):
            kernel(layer.batch, layer.weight, layer.bias, out, tried.tile)
    assert out.isnan().all() != is_started


def with_max_rank(layer: Layer, max_rank: int) -> None:
    layer.batch.max_rank = max_rank


def with_rows(layer: Layer, num_rows: int) -> None:
    layer.batch.x = layer.batch.x[:num_rows]


def with_older_plan(layer: Layer, lora_rank: int) -> None:
    layer.batch.plan.set_rows(layer.batch.row_slots, np.full_like(layer.batch.tables.slot_rank, lora_rank))


def with_counter(layer: Layer, word: int, value: int) -> None:
    layer.batch.plan.plan[word] = value


MISUSES = {
    "max_rank below the plan's": ("one row", with_max_rank, 8),
    "fewer rows than the plan has": ("one adapter, blocks alone", with_rows, 59),
    "a larger lora_rank than when the plan was built": ("one row", with_older_plan, 8),
    "another kernel counts units": ("one row", with_counter, DONE, 2),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_that_only_the_device_can_see_stops_the_kernel(library, name) -> None:
    case, misuse, *arguments = MISUSES[name]
    layer = CASES[case].layer()
    out = torch.full_like(layer.batch.y, torch.nan)
    misuse(layer, *arguments)
    with pytest.raises(KernelFailed, match="the kernel stops"):
        EmulatedLinear(library)(layer.batch, layer.weight, layer.bias, out, CASES[case].tile)


@pytest.mark.slow
def test_nobody_waits_for_ever_for_units_that_another_kernel_has_taken(nvcc, tmp_path) -> None:
    library = compile_changed(nvcc, tmp_path, ("linear_shrink.cuh", "kMostPolls = 1 << 24", "kMostPolls = 1 << 6"))
    layer = CASES["an adapter for each row"].layer()
    with_counter(layer, NEXT, 1)
    with pytest.raises(KernelFailed, match="the kernel stops"):
        EmulatedLinear(library)(
            layer.batch, layer.weight, layer.bias, layer.batch.y, CASES["an adapter for each row"].tile
        )


@pytest.mark.slow
def test_low_rank_rows_that_were_given_up_stop_the_kernel(nvcc, tmp_path) -> None:
    library = compile_changed(nvcc, tmp_path, ("linear_shrink.cuh", "kMostPolls = 1 << 24", "kMostPolls = 1"))
    failures = []
    for name, seed in itertools.product(CASES, range(3)):
        try:
            run(library, name, seed)
        except KernelFailed as error:
            failures.append(str(error))
    assert failures
    assert all("the kernel stops" in failure for failure in failures)


def compile_changed(nvcc: str, folder: Path, change: tuple[str, str, str]) -> Path:
    """The kernels with the text in a header, which is there once, replaced by another."""
    header, text, other = change
    sources = Path(shutil.copytree(source_directory(), folder / "csrc"))
    path = sources / "include" / "punica" / header
    assert path.read_text().count(text) == 1
    path.write_text(path.read_text().replace(text, other))
    return compile_kernels(nvcc, KERNELS, folder / "changed.so", sources)


def is_wrong(library: Path, name: str) -> bool:
    try:
        for seed in range(3):
            run(library, name, seed)
    except (AssertionError, KernelFailed):
        return True
    return False


BREAKS = {
    "what products read is not there yet": ("linear_adapters.cuh", "await(full(), round_ & 1);", ""),
    "a stage is given back too early": ("linear.cuh", "await_products<1>();", ""),
    "the last products are not awaited": ("linear.cuh", "  await_products<0>();\n  if (!kAtOnce", "  if (!kAtOnce"),
    "a stage is never given back": ("linear.cuh", "  if (!kAtOnce && num_steps > 0) ring.release_last();\n", ""),
    "a stage of many rows is given back too early": (
        "linear.cuh",
        "      await_products<0>();\n      ring",
        "      ring",
    ),
    "a stage of many rows is never given back": ("linear.cuh", "      ring.release();\n    } else if", "    } else if"),
    "products read behind the memory": (
        "linear_params.h",
        "params.num_parts() * kLinearTileRows - tile.height",
        "0 * kLinearTileRows",
    ),
    "adapters are put where weights come": (
        "linear_adapters.cuh",
        "void await_adapters() const { await(start_ + offsetof(LinearStages, asked), 0); }",
        "void await_adapters() const {}",
    ),
    "nobody waits for the low-rank rows": (
        "linear_shrink.cuh",
        "load_acquire(counters.done) < total && polls < kMostPolls",
        "false",
    ),
    "the queue is not emptied": ("linear_shrink.cuh", "*counters.next = 0;", ";"),
    "the count of units is kept": ("linear_shrink.cuh", "*counters.done = 0;", ""),
    "slices without lora_rank do not count": (
        "linear_shrink.cuh",
        "bool complete = item.split == 0;",
        "bool complete = false;",
    ),
    "units without lora_rank count for each split": (
        "linear_shrink.cuh",
        "bool complete = item.split == 0;",
        "bool complete = true;",
    ),
    "splits are not added": ("shrink.cuh", "if (complete && item.splits > 1) sum_splits", "if (false) sum_splits"),
    "a unit's counter is kept": ("shrink.cuh", "if (last) *counter = 0;", ""),
    "low-rank rows are copied before they are there": (
        "linear_adapters.cuh",
        "    if (must_wait) await_hidden(shrink);\n",
        "",
    ),
    "a block's first item does not wait for the kernel in front": (
        "linear_shrink.cuh",
        "bool const first = index == static_cast<int>(blockIdx.x);",
        "bool const first = false;",
    ),
    "an item of the queue is left out": (
        "linear_shrink.cuh",
        "return static_cast<int>(gridDim.x) + drawn;",
        "return static_cast<int>(gridDim.x) + drawn + 1;",
    ),
    "x is read before it is there": (
        "linear.cuh",
        "  wait_for_previous();\n  start_next();\n#pragma",
        "#pragma",
    ),
    "the next kernel starts before the one in front has ended": (
        "linear.cuh",
        "  wait_for_previous();\n  start_next();\n#pragma",
        "  start_next();\n  wait_for_previous();\n#pragma",
    ),
    "sums are given before the ring has been read": (
        "linear.cuh",
        "  named_barrier(kSumsBarrier, kConsumers);  // the ring has been read\n",
        "",
    ),
    "columns are read before they are there": (
        "linear.cuh",
        "  named_barrier(kSumsBarrier, kConsumers);\n  store_rows",
        "  store_rows",
    ),
    "sums of other blocks are not awaited": (
        "linear.cuh",
        "    await_in_cluster(shared_address(&shared.stages.mail), 0);\n",
        "",
    ),
    "sums are sent into a ring that is read": ("linear.cuh", "      await(open, 0);\n", ""),
    "a block's own sums are where others' belong": ("linear.cuh", "(split - (split > owner))", "split"),
    "the bias of the next columns": ("linear.cuh", "bias[own + 8]", "bias[own]"),
    "sums stay where they are turned to": ("linear_add.cuh", "turn_left<4 * kTiles>(d[part]);", "(void)d[part];"),
    "rows of the other block are taken": ("linear_adapters.cuh", "max(first_row, __ldg", "max(0, __ldg"),
    "rows leave no room for columns": (
        "linear_adapters.cuh",
        "(ring.stage_bytes() - 16 * segment.row_bytes())",
        "ring.stage_bytes()",
    ),
    "ranks that are not there take part": ("linear_add.cuh", "          keep_first4(top, valid);\n", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_kernel_is_noticed(nvcc, tmp_path, name) -> None:
    library = compile_changed(nvcc, tmp_path, BREAKS[name])
    assert any(is_wrong(library, each) for each in CASES)
