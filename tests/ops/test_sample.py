"""The sampling ops: the reference against the functions it is made of, the kernel against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from punica_core.ops import draw
from punica_core.ops.sample import ROW, greedy_tokens, pack_rows, rows_words, sample_tokens
from punica_core.protocol import SamplingParams

CPU = pytest.param("cpu", id="cpu")
GPU = pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [CPU, GPU])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

KINDS: list[dict[str, float]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.3, "top_k": 500, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 100.0, "top_p": 0.999},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1e-30},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 2.0, "top_p": 0.0},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 3.0, "top_p": 1 - 2.0**-53},
]


def params_of(count: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=1, **kind) for kind in itertools.islice(itertools.cycle(KINDS), count)]  # type: ignore[arg-type]


def points_of(count: int, seed: int = 0) -> torch.Tensor:
    """Among them the two ends."""
    points = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    points[::7], points[3::7] = 0.0, 1 - 2.0**-53
    return points


def some_logits(count: int, vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Of several kinds: spread, tied, nearly flat, all equal, one large, -inf for some or for all."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab_size, generator=generator) * 3
    for b, row in enumerate(logits):
        kind = b % 8
        if kind == 1:
            row.round_()
        elif kind == 2:
            row.mul_(1e-4)
        elif kind == 3:
            row.fill_(3.5)
        elif kind == 4:
            row[b % vocab_size] += 30
        elif kind == 5:
            row[torch.rand(vocab_size, generator=generator) < 0.5] = -torch.inf
        elif kind == 6 and b % 16 == 6:
            row.fill_(-torch.inf)
    return logits.to(dtype)


def outputs(count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned."""
    return (
        torch.full((count,), -7, dtype=torch.int64, device=device),
        torch.zeros(count, dtype=torch.bool, device=device),
    )


def records_of(params: list[SamplingParams], points: torch.Tensor, device: str) -> torch.Tensor:
    records = pack_rows(params)
    records["point"] = points.numpy()
    return torch.from_numpy(rows_words(records)).to(device)


def sampled(logits: torch.Tensor, params: list[SamplingParams], points: torch.Tensor) -> tuple[list[int], list[bool]]:
    token_ids, finite = outputs(len(logits), str(logits.device))
    sample_tokens(token_ids, finite, logits, records_of(params, points, str(logits.device)))
    return token_ids.tolist(), finite.tolist()


def expected(logits: torch.Tensor, params: list[SamplingParams], points: torch.Tensor) -> list[int]:
    """Row by row, with torch on the same device: its exp is the kernel's."""
    found = []
    for row, p, point in zip(logits.float(), params, points.to(logits.device), strict=True):
        scores = row.unsqueeze(0)
        chosen = draw.first_argmax(scores) if draw.is_greedy(p) else draw.draw(scores, [p], point.reshape(1))
        found.append(int(chosen))
    return found


def test_the_record_is_the_kernels_struct() -> None:
    assert ROW.itemsize == 32
    assert [ROW.fields[name][1] for name in ROW.names] == [0, 4, 8, 16, 24]  # type: ignore[index,union-attr]


@pytest.mark.parametrize(
    "greedy", [{}, {"temperature": 1e-50}, {"temperature": 1.0, "top_k": 1}, {"top_p": 0.1, "min_p": 0.5}], ids=str
)
def test_greedy_rows_are_packed_alike(greedy: dict[str, float]) -> None:
    (record,) = pack_rows([SamplingParams(max_tokens=1, **greedy)])  # type: ignore[arg-type]
    assert record.tolist() == (0.0, 0, 1.0, 0.0, 0)


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 4097])
@pytest.mark.parametrize("count", [1, 3, 64])
def test_tokens_are_those_of_the_draw(device: str, dtype: torch.dtype, vocab_size: int, count: int) -> None:
    logits = some_logits(count, vocab_size, dtype).to(device)
    params, points = params_of(count), points_of(count)
    tokens, finite = sampled(logits, params, points)
    assert tokens == expected(logits, params, points)
    assert all(finite)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [49152, 50257, 128256, 262144])
@pytest.mark.parametrize("count", [3, 64])
def test_large_vocabularies(dtype: torch.dtype, vocab_size: int, count: int) -> None:
    generator = torch.Generator("cuda").manual_seed(vocab_size)
    logits = (torch.randn(count, vocab_size, generator=generator, device="cuda") * 3).to(dtype)
    logits[1].fill_(2.5)
    params = params_of(count)
    for seed in range(3):
        points = points_of(count, seed)
        assert sampled(logits, params, points)[0] == expected(logits, params, points)


@pytest.mark.gpu
def test_more_rows_than_run_at_once() -> None:
    logits = torch.randn(256, 128256, generator=torch.Generator("cuda").manual_seed(1), device="cuda") * 2
    params, points = params_of(256), points_of(256)
    tokens, finite = sampled(logits, params, points)
    assert tokens == expected(logits, params, points)
    assert all(finite)


@pytest.mark.gpu
def test_a_vocabulary_that_does_not_fit_shared_memory() -> None:
    logits = torch.randn(13, 700_001, generator=torch.Generator("cuda").manual_seed(1), device="cuda") * 2
    logits[5:7] = 1.0
    params, points = params_of(13), points_of(13)
    assert sampled(logits, params, points)[0] == expected(logits, params, points)


@devices
def test_every_point_of_a_row_of_equal_logits(device: str) -> None:
    """Ties everywhere: the n-th of N equal tokens that a filter keeps lies at (n + 0.5) / N."""
    logits = torch.full((100, 20_000), 1.25, device=device)
    middle = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    for params, kept in (
        ({}, 20_000),
        ({"top_k": 100}, 100),
        ({"top_p": 0.25}, 5000),
        ({"top_k": 400, "top_p": 0.5}, 200),
    ):
        rows = [SamplingParams(max_tokens=1, temperature=1.0, **params)] * 100  # type: ignore[arg-type]
        assert sampled(logits, rows, middle)[0] == (middle * kept).long().tolist()


@devices
def test_the_last_point_below_one_takes_the_last_kept_token(device: str) -> None:
    logits = torch.full((4, 20_000), 1.25, device=device)
    kinds = [{}, {"top_k": 77}, {"top_p": 0.25}, {"top_p": 1 - 2.0**-53}]
    rows = [SamplingParams(max_tokens=1, temperature=1.0, **kind) for kind in kinds]  # type: ignore[arg-type]
    last = torch.full((4,), 1 - 2.0**-53, dtype=torch.float64)
    assert sampled(logits, rows, last)[0] == [19_999, 76, 4999, 19_999]


@devices
@pytest.mark.parametrize("vocab_size", [7, 1000, 33_000])
def test_rows_with_nan_or_inf_are_told_and_do_not_harm_others(device: str, vocab_size: int) -> None:
    logits = some_logits(40, vocab_size)
    good = logits.clone()
    broken = {1: torch.nan, 8: torch.inf, 17: torch.nan, 18: torch.inf, 39: torch.nan}
    for b, value in broken.items():
        logits[b, (b * 7919) % vocab_size] = value
    logits[17] = torch.nan
    params, points = params_of(40), points_of(40)
    tokens, finite = sampled(logits.to(device), params, points)
    assert [b for b, ok in enumerate(finite) if not ok] == list(broken)
    assert all(0 <= token < vocab_size for token in tokens)
    others = [b for b in range(40) if b not in broken]
    untouched = sampled(good.to(device), params, points)[0]
    assert [tokens[b] for b in others] == [untouched[b] for b in others]


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 1001, 33_000])
def test_greedy_tokens_are_the_first_of_the_largest(device: str, dtype: torch.dtype, vocab_size: int) -> None:
    logits = some_logits(33, vocab_size, dtype).to(device)
    logits[2, vocab_size // 2 :] = logits[2].max()
    logits[9] = -torch.inf
    logits[10] = torch.tensor([-0.0, 0.0], device=device).repeat(vocab_size)[:vocab_size]
    token_ids, finite = outputs(33, device)
    greedy_tokens(token_ids, finite, logits)
    assert token_ids.tolist() == draw.first_argmax(logits.float()).tolist()
    assert finite.all()
    logits[4, vocab_size - 1] = torch.nan
    greedy_tokens(token_ids, finite, logits)
    assert (~finite).nonzero().flatten().tolist() == [4]


@devices
def test_rows_may_lie_apart(device: str) -> None:
    """A slice of a wider tensor: rows that start on odd addresses, and neighbours that must not be read."""
    wide = torch.full((20, 5003), torch.nan, dtype=torch.bfloat16, device=device)
    wide[:, 1:5001] = some_logits(20, 5000, torch.bfloat16).to(device)
    params, points = params_of(20), points_of(20)
    tokens, finite = sampled(wide[:, 1:5001], params, points)
    assert all(finite)
    assert tokens == sampled(wide[:, 1:5001].contiguous(), params, points)[0]


@devices
def test_a_token_depends_on_its_row_alone(device: str) -> None:
    logits = some_logits(26, 9000).to(device)
    params, points = params_of(26), points_of(26)
    together = sampled(logits, params, points)[0]
    alone = [sampled(logits[b : b + 1], params[b : b + 1], points[b : b + 1])[0][0] for b in range(26)]
    assert alone == together
    assert sampled(logits.flip(0), params[::-1], points.flip(0))[0] == together[::-1]


@devices
def test_another_point_or_filter_gives_another_token(device: str) -> None:
    logits = some_logits(26, 9000).to(device)
    params, points = params_of(26), points_of(26)
    together = sampled(logits, params, points)[0]
    assert sampled(logits, params, 1 - points)[0] != together
    assert sampled(logits, [SamplingParams(max_tokens=1, temperature=1.0)] * 26, points)[0] != together


@pytest.mark.gpu
def test_draws_lie_where_the_exact_distribution_has_their_points() -> None:
    """Independent of the reference: fp64 softmax; a 32-bit exp is off by two units in the last place at most."""
    logits = torch.randn(64, 128256, generator=torch.Generator("cuda").manual_seed(2), device="cuda") * 2
    points = points_of(64)
    tokens, _ = sampled(logits, [SamplingParams(max_tokens=1, temperature=0.8)] * 64, points)
    through = (logits.double() / 0.8).softmax(dim=-1).cumsum(dim=-1)
    at = torch.tensor(tokens, device="cuda").unsqueeze(-1)
    before = torch.where(at > 0, through.gather(-1, (at - 1).clamp_min(0)), 0.0)
    point = points.cuda().unsqueeze(-1)
    assert ((before - 1e-6 <= point) & (point <= through.gather(-1, at) + 1e-6)).all()


@pytest.mark.gpu
def test_a_graph_replays_for_other_rows() -> None:
    logits = some_logits(32, 33_000, torch.bfloat16).cuda()
    params = params_of(32)
    rows = records_of(params, points_of(32), "cuda")
    token_ids, finite = outputs(32, "cuda")
    greedy_ids, greedy_finite = outputs(32, "cuda")
    sample_tokens(token_ids, finite, logits, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_tokens(token_ids, finite, logits, rows)
        greedy_tokens(greedy_ids, greedy_finite, logits)
    for seed in range(1, 6):
        points = points_of(32, seed)
        logits.copy_(some_logits(32, 33_000, torch.bfloat16, seed))
        rows.copy_(records_of(params[seed:] + params[:seed], points, "cuda"))
        graph.replay()
        assert token_ids.tolist() == sampled(logits, params[seed:] + params[:seed], points)[0]
        assert greedy_ids.tolist() == draw.first_argmax(logits.float()).tolist()
        assert finite.all()
        assert greedy_finite.all()


@devices
@pytest.mark.parametrize("op", ["sample_tokens", "greedy_tokens"])
def test_opcheck(device: str, op: str) -> None:
    logits = some_logits(9, 300).to(device)
    rows = records_of(params_of(9), points_of(9), device)
    arguments = (*outputs(9, device), logits, *((rows,) if op == "sample_tokens" else ()))
    torch.library.opcheck(getattr(torch.ops.punica, op), arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 5).double()}, "float32, bfloat16 or float16"),
        ({"logits": torch.zeros(5, 3).T}, "contiguous rows"),
        ({"logits": torch.zeros(3, 0)}, "contiguous rows"),
        ({"token_ids": torch.zeros(3, dtype=torch.int32)}, "token_ids must be contiguous torch.int64"),
        ({"token_ids": torch.zeros(2, dtype=torch.int64)}, r"token_ids must be contiguous torch.int64 \[3\]"),
        ({"finite": torch.zeros(3)}, "finite must be contiguous torch.bool"),
        ({"rows": torch.zeros(3, 5, dtype=torch.int64)}, r"rows must be contiguous int64 \[3, 4\]"),
    ],
    ids=["dtype", "stride", "empty", "ids dtype", "ids size", "finite", "rows"],
)
def test_wrong_arguments_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    token_ids, finite = outputs(3, "cpu")
    arguments = {"token_ids": token_ids, "finite": finite, "logits": torch.zeros(3, 5)}
    arguments["rows"] = torch.from_numpy(np.zeros((3, 4), np.int64))
    with pytest.raises(RuntimeError, match=message):
        sample_tokens(**(arguments | change))


def test_no_rows_are_fine() -> None:
    token_ids, finite = outputs(0, "cpu")
    sample_tokens(token_ids, finite, torch.zeros(0, 5), torch.zeros(0, 4, dtype=torch.int64))
    greedy_tokens(token_ids, finite, torch.zeros(0, 5))
