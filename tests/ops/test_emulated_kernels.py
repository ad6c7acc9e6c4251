"""The logic of shrink, embed and expand, run on the CPU: see ``tests/ops/emulator``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from punica_core.ops.build import source_directory
from punica_core.ops.layout import Field
from tests.ops.emulator import KERNELS, EmulatedKernels
from tests.support.emulation import compile_kernels
from tests.support.lora_batch import MIXED_RANKS, LoraBatch, check_applied, check_overwritten, make_batch, rows_of

STOPPED = "CUDA error 719"  # cudaErrorLaunchFailure


@pytest.fixture(scope="module")
def library(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(nvcc, KERNELS, tmp_path_factory.mktemp("emulated") / "kernels.so")


def check(kernels: EmulatedKernels, batch: LoraBatch) -> None:
    for summed in (False, True):
        check_applied(batch, kernels.apply(batch, summed=summed))
    check_overwritten(batch, kernels.apply(batch, torch.full_like(batch.y, torch.nan), overwrite=True))


CASES = {
    "one row": ([1], [16], 512, (256,)),
    "all ranks": ([1, 2, 9, 17, 4, 1, 1, 3, 8, 1], MIXED_RANKS, 264, (520, 72)),
    "skewed": ([1, 33, 1, 70], (33, 256, 8, 64), 136, (264, 136, 8)),
    "the most rows of a decode step": ([130, 66, 40], [40], 128, (328,)),
    "sums of several splits": ([5], (16,), 8200, (72,)),
    "sums of several units": ([5, 3, 20], (16, 40, 8), 8200, (72, 40)),
    "unaligned": ([3, 12], (20, 5), 100, (77, 50)),
    "prompts": ([200, 3, 40, 33], (16, 64, 3, 130), 64, (200, 72)),
    "an unaligned prompt": ([270], [48], 64, (77,)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_row_gets_its_own_adapter(library, case) -> None:
    counts, ranks, in_features, out_features = CASES[case]
    batch = make_batch(
        rows_of(counts, base_rows=2),
        ranks=ranks,
        in_features=in_features,
        out_features=out_features,
        dtype=torch.bfloat16,
        dora_slots=(1,),
        missing=[(2, 0)],
        max_rank=256,
    )
    check(EmulatedKernels(library), batch)


def test_float16_and_modules_that_are_not_targets(library) -> None:
    batch = make_batch(
        rows_of([2, 9]), ranks=[16, 40], out_features=(64, 72), missing=[(0, 1), (1, 0)], dtype=torch.float16
    )
    kernels = EmulatedKernels(library)
    check(kernels, batch)
    assert torch.equal(kernels.apply(batch)[:2, 64:], batch.y[:2, 64:])


@pytest.mark.parametrize("summed", [False, True])
def test_scratch_is_touched_as_far_as_the_ranks_of_the_step_need(library, summed) -> None:
    batch = make_batch(
        rows_of([3, 5]), ranks=[8, 5], in_features=8200, out_features=(64, 40), dtype=torch.bfloat16, max_rank=256
    )
    check_applied(batch, EmulatedKernels(library).apply(batch, summed=summed))
    split = len(batch.x) * 2 * 256
    hidden = split // 2 if summed else 0
    for room, share in ((batch.v[:hidden], 1 / 2), (batch.v[hidden:], 16)):
        touched = int(share * split) * 8 // 256
        assert room[touched:].isnan().all()
        assert room.numel() == 0 or not room[:touched].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_embed_looks_tokens_up(library, dtype, ids) -> None:
    vocab = 37
    batch = make_batch(
        rows_of([4, 3, 20, 2], base_rows=1),
        ranks=[5, 16, 70, 8],
        in_features=vocab,
        out_features=(72,),
        dtype=dtype,
        missing=[(3, 0)],
    )
    for slot, (weights,) in batch.adapters.items():  # A as the kernel wants it: [V, R]
        if weights is not None:
            start = int(batch.tables.records[0, slot, Field.A_OFFSET])
            batch.arena.buffer[start : start + weights.a.numel()] = weights.a.T.reshape(-1)
    tokens = torch.arange(len(batch.x), dtype=ids) * 7 % vocab
    kernels = EmulatedKernels(library)
    got = kernels.embed(batch, tokens)
    batch.x = torch.eye(vocab, dtype=dtype)[tokens.long()]
    check_applied(batch, got)
    with pytest.raises(AssertionError):
        check_applied(batch, kernels.embed(batch, tokens.flip(0).contiguous()))


def test_records_may_lie_slot_by_slot_or_module_by_module(library) -> None:
    batch = make_batch(rows_of([3, 5, 1]), out_features=(64, 40), dtype=torch.bfloat16)
    want = EmulatedKernels(library).apply(batch)
    assert not batch.table.is_contiguous()
    batch.table = batch.table.contiguous()
    assert torch.equal(EmulatedKernels(library).apply(batch), want)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("misuse", ["max_rank", "rows"])
def test_a_plan_that_the_scratch_has_no_room_for_stops_the_kernels(library, misuse, summed) -> None:
    batch = make_batch(rows_of([3, 5]), ranks=[8, 40], dtype=torch.bfloat16)
    if misuse == "max_rank":
        batch.max_rank = 32
    else:
        batch.x = batch.x[:7]
    with pytest.raises(RuntimeError, match=STOPPED):
        EmulatedKernels(library).apply(batch, summed=summed)
    with pytest.raises(RuntimeError, match=STOPPED):
        EmulatedKernels(library).embed(batch, torch.zeros(len(batch.x), dtype=torch.int32))


def is_wrong(library: Path, case: str) -> bool:
    try:
        test_every_row_gets_its_own_adapter(library, case)
    except (AssertionError, RuntimeError):
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "text", "broken"),
    [
        ("shrink.cuh", "return row * item.rank_pitch", "return row * 256"),
        ("expand_walk.cuh", "params.tables.slices * work.rank_pitch", "params.tables.slices * 256"),
        ("shrink.cuh", "first + i < item.splits", "first + i < item.splits - 1"),
        ("shrink.cuh", "if (last) *counter = 0;", ""),
        ("shrink.cuh", "item.counter = index / splits;", "item.counter = 0;"),
        ("shrink.cuh", "if (must_wait) wait_and_release(params);  // this warp had no step", ""),
        ("expand_write.cuh", "blank_tiles<T, kAligned>(params);\n}", "}"),
        ("expand_walk.cuh", "(!kAll && item.record.lora_rank == 0)", "item.record.lora_rank == 0"),
    ],
    ids=[
        "v written",
        "v read",
        "splits",
        "counters kept",
        "counters shared",
        "no wait",
        "rows of the base kept",
        "slices without lora_rank kept",
    ],
)
def test_a_broken_kernel_is_noticed(nvcc, tmp_path, header, text, broken) -> None:
    sources = Path(shutil.copytree(source_directory(), tmp_path / "csrc"))
    path = sources / "include" / "punica" / header
    assert text in path.read_text()
    path.write_text(path.read_text().replace(text, broken))
    library = compile_kernels(nvcc, KERNELS, tmp_path / "broken.so", sources)
    assert any(is_wrong(library, case) for case in CASES)
