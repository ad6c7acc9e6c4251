from __future__ import annotations

import numpy as np
import pytest
import torch

from punica_core import ops
from punica_core.bench.popularity import POPULARITIES, request_counts
from punica_core.lora.tables import ModuleWeights
from tests.support.lora_batch import MIXED_RANKS, LoraBatch, check_applied, check_overwritten, make_batch, rows_of
from tests.support.numerics import assert_as_exact_as_torch

CPU = pytest.param("cpu", torch.float32, id="cpu-fp32")
CPU_BF16 = pytest.param("cpu", torch.bfloat16, id="cpu-bf16")
GPU_BF16 = pytest.param("cuda", torch.bfloat16, id="gpu-bf16", marks=pytest.mark.gpu)
GPU_FP16 = pytest.param("cuda", torch.float16, id="gpu-fp16", marks=pytest.mark.gpu)
targets = pytest.mark.parametrize(("device", "dtype"), [CPU, CPU_BF16, GPU_BF16, GPU_FP16])


def check(batch: LoraBatch) -> None:
    for summed in (False, True):
        check_applied(batch, batch.apply(summed=summed))
    check_overwritten(batch, batch.apply(torch.full_like(batch.y, torch.nan), overwrite=True))


@targets
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize(
    ("in_features", "out_features"),
    [(176, (2048,)), (2048, (176, 64, 64)), (3424, (520,)), (2049, (2049,)), (64, (3424, 8))],
    ids=str,
)
def test_every_row_gets_its_own_adapter(device, dtype, popularity, in_features, out_features) -> None:
    counts = request_counts(popularity, 11)
    check(
        make_batch(
            rows_of(counts, base_rows=3),
            in_features=in_features,
            out_features=out_features,
            dtype=dtype,
            device=device,
        )
    )


@targets
@pytest.mark.parametrize("lora_rank", MIXED_RANKS)
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 33, 65])
def test_any_rank_and_any_number_of_rows(device, dtype, lora_rank, num_rows) -> None:
    check(make_batch(rows_of([num_rows], base_rows=1), ranks=[lora_rank], in_features=264, dtype=dtype, device=device))


@targets
@pytest.mark.parametrize("counts", [[1, 63], [63, 1], [1, 1, 61, 1], [64]], ids=str)
def test_extreme_skew(device, dtype, counts) -> None:
    check(make_batch(rows_of(counts), in_features=128, out_features=(264,), dtype=dtype, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("counts", [[600], [1, 599], [300, 5, 40, 255], [64] * 16], ids=str)
def test_prompts_of_many_rows(dtype, counts) -> None:
    batch = make_batch(
        rows_of(counts, base_rows=5), in_features=1032, out_features=(520, 264), dtype=dtype, device="cuda"
    )
    check(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("counts", "ranks", "in_features", "slices"),
    [
        ([1024], (16,), 4096, 3),
        ([700, 3, 321], (64,), 4096, 3),
        ([300, 300], (16, 64), 14336, 1),
        ([100, 64, 1, 300, 8, 17, 40, 30, 65, 128], MIXED_RANKS, 1984, 2),
        ([257], (256, 130), 1088, 4),
        ([1] * 200 + [100], (8, 16, 3), 192, 2),
        ([5000], (16,), 64, 1),
        ([1500, 900, 64], (16, 40), 1024, 3),
        ([300], (16,), 2056, 2),
    ],
    ids=str,
)
def test_prompts_of_any_rank_and_width(dtype, counts, ranks, in_features, slices) -> None:
    batch = make_batch(
        rows_of(counts, base_rows=5),
        ranks=ranks,
        in_features=in_features,
        out_features=(264, 72, 8, 40)[:slices],
        dtype=dtype,
        device="cuda",
        missing=[(1, 0)],
        num_splits=2,
    )
    check(batch)
    once = batch.apply(summed=True)
    batch.v.view(torch.int32).fill_(-1)
    assert torch.equal(batch.apply(summed=True), once)


@pytest.mark.gpu
def test_prompts_whose_rows_are_not_aligned_give_the_same() -> None:
    batch = make_batch(rows_of([600]), ranks=[16], in_features=512, dtype=torch.bfloat16, device="cuda")
    want = batch.apply(summed=True)
    storage = torch.zeros(600, 528, dtype=torch.bfloat16, device="cuda")
    exact, same = batch.expected(), batch.expected(torch.bfloat16)
    for first in (8, 4):  # what the copy engine takes, and what it does not
        x = storage[:, first : first + 512]
        x.copy_(batch.x)
        got = batch.apply(x=x, summed=True)
        assert_as_exact_as_torch(got, exact, same)
        assert torch.equal(got, want) or first == 4  # the other kernel sums in another order
        x[300:] = 0
        with pytest.raises(AssertionError):
            assert_as_exact_as_torch(batch.apply(x=x, summed=True), exact, same)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[129], [200, 40], [1, 255]], ids=str)
@pytest.mark.parametrize("lora_rank", [16, 40, 130])
def test_long_segments_in_a_step_of_few_rows(counts, lora_rank) -> None:
    check(
        make_batch(
            rows_of(counts),
            ranks=[lora_rank],
            in_features=264,
            out_features=(520,),
            dtype=torch.bfloat16,
            device="cuda",
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_segments", [300, 1000, 4096])
def test_steps_of_thousands_of_segments(num_segments) -> None:
    rows = np.arange(num_segments, dtype=np.int32) % 50
    batch = make_batch(
        rows.tolist(), ranks=(16, 3, 64), in_features=256, out_features=(264, 72), dtype=torch.bfloat16, device="cuda"
    )
    assert batch.plan.num_segments == num_segments
    check(batch)


@pytest.mark.gpu
def test_the_largest_widths() -> None:
    dtype = torch.bfloat16
    ranks = (16, 64, 7)
    check(
        make_batch(rows_of([2, 1, 9]), ranks=ranks, in_features=29568, out_features=(8192,), dtype=dtype, device="cuda")
    )
    check(
        make_batch(rows_of([2, 1, 9]), ranks=ranks, in_features=8192, out_features=(29568,), dtype=dtype, device="cuda")
    )


@targets
def test_row_gain_and_bias(device, dtype) -> None:
    batch = make_batch(
        rows_of([3, 12, 1], base_rows=2), out_features=(72, 40), dora_slots=(0, 1), dtype=dtype, device=device
    )
    check(batch)


@targets
def test_modules_that_an_adapter_does_not_target_keep_their_bits(device, dtype) -> None:
    batch = make_batch(
        rows_of([2, 3]), ranks=[16, 4], out_features=(64, 32, 32), missing=[(0, 1), (1, 0)], dtype=dtype, device=device
    )
    check(batch)
    got = batch.apply()
    assert torch.equal(got[:2, 64:96], batch.y[:2, 64:96])
    assert torch.equal(got[2:, :64], batch.y[2:, :64])


@targets
def test_columns_beside_a_strided_output_are_not_touched(device, dtype) -> None:
    batch = make_batch(rows_of([4, 4]), out_features=(48,), y_padding=16, dtype=dtype, device=device)
    storage = torch.full((8, 64), 7.0, dtype=dtype, device=device)
    storage[:, :48] = batch.y
    batch.apply(y=storage[:, :48])
    assert torch.equal(storage[:, :48], batch.apply())
    assert (storage[:, 48:] == 7).all()


@targets
def test_an_unaligned_output_takes_the_slow_path_to_the_same_bits(device, dtype) -> None:
    batch = make_batch(rows_of([4, 12]), out_features=(48,), dtype=dtype, device=device)
    storage = torch.zeros(16, 50, dtype=dtype, device=device)
    storage[:, 1:49] = batch.y
    batch.apply(y=storage[:, 1:49])
    assert torch.equal(storage[:, 1:49], batch.apply())


@targets
def test_a_step_without_adapters_changes_nothing(device, dtype) -> None:
    batch = make_batch(rows_of([3, 3]), dtype=dtype, device=device)
    batch.plan.set_rows(batch.row_slots * 0 - 1, batch.tables.slot_rank)
    assert torch.equal(batch.apply(), batch.y)


@targets
def test_empty_segments_are_allowed(device, dtype) -> None:
    batch = make_batch(rows_of([3, 5, 2]), ranks=[8, 3, 20], dtype=dtype, device=device)
    want = batch.apply()
    indptr = np.asarray([0, 0, 3, 3, 8, 10], np.int32)
    batch.plan.set_segments(indptr, np.asarray([2, 0, -1, 1, 2], np.int32), batch.tables.slot_rank)
    assert torch.equal(batch.apply(), want)


@targets
def test_the_wrong_slot_gives_a_wrong_answer(device, dtype) -> None:
    batch = make_batch(rows_of([3, 3]), ranks=[8], dtype=dtype, device=device)
    exact, same = batch.expected(), batch.expected(dtype)
    batch.plan.set_rows(batch.row_slots[::-1].copy(), batch.tables.slot_rank)
    with pytest.raises(AssertionError):
        assert_as_exact_as_torch(batch.apply(), exact, same)


@targets
def test_shrink_beside_what_follows_leaves_the_same(device, dtype) -> None:
    batch = make_batch(rows_of([3, 5]), ranks=[8, 16], dtype=dtype, device=device)
    want, got = batch.apply(), batch.y.clone()
    common = (batch.arena.buffer, batch.table, batch.plan.plan)
    ops.lora_shrink(batch.v, batch.x, *common, batch.max_rank, beside=True)
    ops.lora_expand(got, batch.v, *common, batch.out_features, batch.x.size(1), batch.max_rank, x=batch.x)
    assert torch.equal(got, want)


@targets
def test_a_step_moves_what_its_own_ranks_need_whatever_may_come(device, dtype) -> None:
    """max_rank is room; the scratch that is touched follows the adapters that take part."""
    shape = {"in_features": 2048, "out_features": (64, 40), "dtype": dtype, "device": device}
    batch = make_batch(rows_of([3, 5, 1]), ranks=[8, 5, 256], max_rank=256, **shape)
    check(batch)
    used = 16 * len(batch.x) * 2 * 8
    assert not batch.v[used:].isnan().all(), "rank 256 takes more"
    rows = np.where(batch.row_slots == 2, -1, batch.row_slots).astype(np.int32)
    batch.plan.set_rows(rows, batch.tables.slot_rank)
    batch.v.fill_(torch.nan)
    got = batch.apply()
    assert batch.v[used:].isnan().all()
    exact, same = batch.expected(), batch.expected(dtype)
    assert_as_exact_as_torch(got[:8], exact[:8], same[:8])
    assert torch.equal(got[8:], batch.y[8:])


@targets
def test_a_table_may_hold_slots_or_modules_together(device, dtype) -> None:
    batch = make_batch(rows_of([3, 5, 1]), out_features=(64, 40), dtype=dtype, device=device)
    want = batch.apply()
    assert not batch.table.is_contiguous()
    batch.table = batch.table.contiguous()
    assert torch.equal(batch.apply(), want)
    batch.table = batch.table.flip(1).contiguous()
    assert not torch.equal(batch.apply(), want)


@targets
def test_the_same_batch_twice_is_bitwise_equal(device, dtype) -> None:
    batch = make_batch(rows_of([1, 30, 9]), in_features=2048, out_features=(520,), dtype=dtype, device=device)
    assert torch.equal(batch.apply(), batch.apply())


@targets
def test_lora_embed_looks_tokens_up(device, dtype) -> None:
    vocab, width = 37, 40
    batch = make_batch(
        rows_of([4, 3], base_rows=1),
        ranks=[5, 16],
        in_features=vocab,
        out_features=(width,),
        dtype=dtype,
        device=device,
    )
    tables = type(batch.tables)(1, 2, device=device)
    arena = type(batch.arena)(1 << 14, dtype=dtype, device=device)
    tokens = torch.tensor([0, 36, 1, 5, 5, 0, 36, 20], device=device)
    exact, same = batch.y.double(), batch.y.clone()
    for slot in (0, 1):
        weights = batch.adapters[slot][0]
        assert weights is not None
        _write_embedding(tables, arena, slot, weights)
        rows = torch.from_numpy(batch.row_slots == slot).to(device)
        hidden = weights.a.T[tokens[rows]]
        exact[rows] += weights.scale * (hidden.double() @ weights.b.double().T)
        same[rows] += weights.scale * (hidden @ weights.b.T)
    got = batch.y.clone()
    for ids in (tokens, tokens.int()):
        got.copy_(batch.y)
        ops.lora_embed(batch.v, ids, arena.buffer, tables.group(0, 1), batch.plan.plan, 16)
        ops.lora_expand(got, batch.v, arena.buffer, tables.group(0, 1), batch.plan.plan, [width], 1, 16, summed=True)
        assert_as_exact_as_torch(got, exact, same)
        assert torch.equal(got[:1], batch.y[:1])


def _write_embedding(tables, arena, slot: int, weights: ModuleWeights) -> None:
    """A is [R, V] in PEFT; the op wants [V, R]: give the writer a matrix of that shape with the rank of B."""
    tables.write(slot, {0: weights}, arena)
    offset = int(tables.records[0, slot, 0])
    arena.buffer[offset : offset + weights.a.numel()] = weights.a.T.reshape(-1)


@targets
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 520), (100, 77), (2049, 264)], ids=str)
def test_segment_gemm_applies_each_segments_own_matrix(device, dtype, in_features, out_features) -> None:
    generator = torch.Generator(device).manual_seed(3)
    batch = make_batch(
        rows_of([3, 20, 70], base_rows=2),
        ranks=[1],
        in_features=in_features,
        out_features=(out_features,),
        dtype=dtype,
        device=device,
    )
    tables = type(batch.tables)(1, 3, device=device)
    arena = type(batch.arena)(3 * (out_features + 8) * (in_features + 16), dtype=dtype, device=device)
    exact, same = batch.y.double(), batch.y.clone()
    for slot in range(3):
        w = (torch.randn(out_features, in_features, generator=generator, device=device) / in_features**0.5).to(dtype)
        tables.write(slot, {0: ModuleWeights(torch.zeros(in_features, 0, dtype=dtype, device=device), w, 1.0)}, arena)
        rows = torch.from_numpy(batch.row_slots == slot).to(device)
        exact[rows] = batch.x[rows].double() @ w.double().T
        same[rows] = batch.x[rows] @ w.T
    got = batch.y.clone()
    ops.segment_gemm(got, batch.x, arena.buffer, tables.group(0, 1), batch.plan.plan)
    assert_as_exact_as_torch(got, exact, same)
    assert torch.equal(got[:2], batch.y[:2])


@targets
@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("lora_shrink", {}),
        ("lora_shrink", {"summed": True, "beside": True}),
        ("lora_expand", {}),
        ("lora_expand", {"summed": True, "overwrite": True}),
        ("lora_embed", {}),
        ("segment_gemm", {}),
    ],
    ids=["shrink", "shrink, summed", "expand", "expand, overwriting", "embed", "gemm"],
)
def test_opcheck(device, dtype, op, options) -> None:
    batch = make_batch(rows_of([3, 5], base_rows=1), ranks=[8], dtype=dtype, device=device)
    common = (batch.arena.buffer, batch.table, batch.plan.plan)
    tokens = torch.zeros(9, dtype=torch.int64, device=device)
    batch.v.zero_()
    arguments = {
        "lora_shrink": (batch.v, batch.x, *common, batch.max_rank),
        "lora_expand": (batch.y.contiguous(), batch.v, *common, [48], 64, batch.max_rank),
        "lora_embed": (batch.v, tokens, *common, batch.max_rank),
        "segment_gemm": (batch.y.contiguous(), batch.x[:, :8].contiguous(), *common),
    }[op]
    torch.library.opcheck(getattr(torch.ops.punica, op), arguments, options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"x": b.x.double()}, "one dtype"),
        (lambda b: {"x": b.x.T.contiguous().T}, "contiguous rows"),
        (lambda b: {"v": b.v[:10]}, "want at least"),
        (lambda b: {"v": b.v[1:]}, "v must start on 16 bytes"),
        (lambda b: {"table": b.table[0]}, "slices, N, 6"),
        (lambda b: {"table": torch.zeros(1, 4, 7, dtype=torch.int64)[:, :, :6]}, "whole records"),
        (lambda b: {"plan": b.plan.plan.long()}, "int32"),
        (lambda b: {"max_rank": 9}, "multiple of 8"),
        (lambda b: {"max_rank": 8}, "lora_ranks up to 16, max_rank is 8"),
        (lambda b: {"x": b.x[:2]}, "the plan has 3 rows, the step 2"),
    ],
    ids=["dtype", "stride", "scratch", "start", "table", "records", "plan", "max_rank", "ranks", "rows"],
)
def test_wrong_arguments_are_named(change, message) -> None:
    batch = make_batch(rows_of([3]), ranks=[13])
    arguments = {
        "v": batch.v,
        "x": batch.x,
        "arena": batch.arena.buffer,
        "table": batch.table,
        "plan": batch.plan.plan,
        "max_rank": batch.max_rank,
    }
    with pytest.raises(RuntimeError, match=message):
        ops.lora_shrink(**(arguments | change(batch)))


@targets
def test_rows_that_are_not_summed_cannot_be_written(device, dtype) -> None:
    batch = make_batch(rows_of([3]), ranks=[8], dtype=dtype, device=device)
    arguments = (batch.v, batch.arena.buffer, batch.table, batch.plan.plan, batch.out_features, 64, batch.max_rank)
    before = batch.y.clone()
    with pytest.raises(RuntimeError, match="overwrite needs rows that lora_shrink has summed"):
        ops.lora_expand(batch.y, *arguments, overwrite=True)
    assert torch.equal(batch.y, before)
