"""The newest token of each sequence attends to its own tokens in the cache, and to nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from punica_core import ops
from punica_core.ops.build import source_directory
from tests.ops.emulator.decode import DECODE_KERNELS, emulated_decode_attention
from tests.support.emulation import compile_kernels
from tests.support.numerics import assert_as_exact_as_torch

LAYERS, LAYER, BLOCK_SIZE = 3, 1, 16
LENGTHS = (1, 15, 16, 17, 31, 64, 65, 200, 128, 600)
DTYPES = [torch.bfloat16, torch.float16]
CASES: dict[str, dict[str, Any]] = {
    "grouped 128": {"heads": 8, "kv_heads": 2, "head_dim": 128},
    "multi-head 64": {"heads": 3, "kv_heads": 3, "head_dim": 64},
    "eight heads a group": {"heads": 8, "kv_heads": 1, "head_dim": 128},
    "seven heads a group": {"heads": 14, "kv_heads": 2, "head_dim": 64},
    "window": {"heads": 4, "kv_heads": 1, "head_dim": 64, "window": 37},
    "window of a block": {"heads": 4, "kv_heads": 1, "head_dim": 64, "window": 16},
    "soft cap": {"heads": 4, "kv_heads": 2, "head_dim": 64, "softcap": 2.0},
}


class Case:
    """Sequences whose blocks lie in any order; whatever in the cache is not theirs is NaN, and so is the output."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int = 0,
        softcap: float = 0.0,
        lengths: tuple[int, ...] = LENGTHS,
        device: str = "cpu",
    ):
        self.options = {"window": window, "softcap": softcap}
        self.lengths = lengths
        generator = torch.Generator().manual_seed(heads + head_dim)
        counts = torch.tensor([-(-length // BLOCK_SIZE) for length in lengths])
        num_blocks = int(counts.sum()) + 3
        indices = torch.randperm(num_blocks, generator=generator)[: int(counts.sum())]
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        self.cache = torch.full((num_blocks, LAYERS, 2, BLOCK_SIZE, kv_heads, head_dim), torch.nan, dtype=dtype)
        self.scaling = head_dim**-0.5
        self.tokens = []
        for seq, length in enumerate(lengths):
            blocks = indices[ends[seq] : ends[seq + 1]]
            tokens = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype)
            self.tokens.append(tokens)
            for at in range(length):
                self.cache[blocks[at // BLOCK_SIZE], LAYER, :, at % BLOCK_SIZE] = tokens[:, at]
        self.query = 2 * torch.randn(len(lengths), heads, head_dim, generator=generator).to(dtype)
        last = [(length - 1) % BLOCK_SIZE + 1 for length in lengths]
        self.tables = [table.to(torch.int32) for table in (ends, indices, torch.tensor(last))]
        self.out = torch.full_like(self.query, torch.nan)
        self.cache, self.query, self.out = (t.to(device) for t in (self.cache, self.query, self.out))
        self.tables = [table.to(device) for table in self.tables]

    def run(self, decode_attention: Callable[..., None]) -> None:
        decode_attention(self.out, self.query, self.cache, *self.tables, LAYER, self.scaling, **self.options)

    def wanted(self, dtype: torch.dtype) -> Tensor:
        """As torch computes it in `dtype`, a sequence and a head at a time."""
        out = []
        for tokens, query in zip(self.tokens, self.query.cpu(), strict=True):
            keys, values = tokens.to(dtype)
            group = query.size(0) // keys.size(1)
            rows = []
            for head in range(query.size(0)):
                scores = keys[:, head // group] @ query[head].to(dtype) * self.scaling
                if self.options["softcap"]:
                    scores = self.options["softcap"] * torch.tanh(scores / self.options["softcap"])
                if self.options["window"]:
                    scores[: -self.options["window"]] = -torch.inf
                rows.append(scores.softmax(0) @ values[:, head // group])
            out.append(torch.stack(rows))
        return torch.stack(out)

    def check(self) -> None:
        assert_as_exact_as_torch(self.out.cpu(), self.wanted(torch.float64), self.wanted(self.out.dtype))


@pytest.fixture(scope="module")
def library(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(nvcc, DECODE_KERNELS, tmp_path_factory.mktemp("emulated") / "decode.so")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_each_sequence_attends_to_its_tokens(case: str, dtype: torch.dtype, device: str) -> None:
    made = Case(dtype, **CASES[case], device=device)
    made.run(ops.decode_attention)
    made.check()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_many_and_long_sequences(case: str) -> None:
    lengths = (*(1 + 97 * i % 300 for i in range(150)), 4000)
    made = Case(torch.bfloat16, **CASES[case], lengths=lengths, device="cuda")
    made.run(ops.decode_attention)
    made.check()


@pytest.mark.parametrize("warps", [16, 8, 4, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_does_what_its_reference_does(library: Path, case: str, dtype: torch.dtype, warps: int) -> None:
    made = Case(dtype, **CASES[case])
    num_blocks = made.query.size(0) * made.cache.size(4)
    num_sms = {16: num_blocks, 8: -(-num_blocks // 2), 4: -(-num_blocks // 4), 2: num_blocks // 5}[warps]
    made.run(partial(emulated_decode_attention, library, num_sms))
    made.check()


def test_ids_of_more_than_32_blocks_a_warp(library: Path) -> None:
    made = Case(torch.bfloat16, heads=1, kv_heads=1, head_dim=64, lengths=(32 * 8 * BLOCK_SIZE + 70, 5))
    made.run(partial(emulated_decode_attention, library, 1))
    made.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "broken", "num_sms"),
    [
        ("first + behind < valid", "first >= 0", 2),
        ("range.sees(token + i / 2 * 8) ? ", "true ? ", 2),
        ("sums.total[head] * shrink +", "sums.total[head] +", 2),
        ("tile[head + 2] *= shrink;", "", 2),
        ("if (index % 32 == 0)", "if (index == 0)", 2),
        ("shared.largest[slot][head] - largest)", "shared.largest[0][head] - largest)", 2),
        ("  wait_for_previous();\n", "", 2),
        ("sums.total[head] *= own_share;", "", 1000),
        ("if (warp < 8) absorb(sums, shared, warp);", "", 1000),
        ("if (other == -INFINITY) continue;", "", 1000),
    ],
    ids=[
        "values behind the end",
        "scores behind the end",
        "total",
        "rescaling",
        "block ids",
        "merging",
        "no wait",
        "total of two warps",
        "half the warps",
        "warps without tokens",
    ],
)
def test_a_broken_kernel_is_noticed(nvcc: str, tmp_path: Path, text: str, broken: str, num_sms: int) -> None:
    sources = Path(shutil.copytree(source_directory(), tmp_path / "csrc"))
    path = sources / "include" / "punica" / "decode_attention.cuh"
    assert text in path.read_text()
    path.write_text(path.read_text().replace(text, broken))
    library = compile_kernels(nvcc, DECODE_KERNELS, tmp_path / "broken.so", sources)
    made = Case(torch.bfloat16, heads=2, kv_heads=1, head_dim=64, lengths=(*LENGTHS, 2200))  # 137 blocks

    def run_and_check() -> None:
        made.run(partial(emulated_decode_attention, library, num_sms))
        made.check()

    with pytest.raises((AssertionError, RuntimeError)):
        run_and_check()


@pytest.mark.gpu
def test_a_replayed_graph_sees_the_token_that_was_appended_before() -> None:
    made = Case(torch.bfloat16, **CASES["grouped 128"], device="cuda")
    last_blocks = made.tables[1][made.tables[0][1:].long() - 1].long()
    kv_slots = (last_blocks * BLOCK_SIZE + made.tables[2] - 1).to(torch.int32)
    newest = torch.stack([tokens[:, -1] for tokens in made.tokens]).cuda()
    graph = torch.cuda.CUDAGraph()
    made.run(ops.decode_attention)
    with torch.cuda.graph(graph):
        ops.kv_append(made.cache, newest[:, 0].contiguous(), newest[:, 1].contiguous(), kv_slots, LAYER)
        made.run(ops.decode_attention)
    wanted = made.out.clone()
    for _ in range(20):
        made.out.fill_(torch.nan)
        made.cache[last_blocks, LAYER, :, made.tables[2].long() - 1] = torch.nan
        graph.replay()
        assert torch.equal(made.out, wanted)


def test_other_shapes_are_refused() -> None:
    made = Case(torch.bfloat16, **CASES["grouped 128"])
    for index, name in enumerate(("kv_indptr", "kv_indices", "last_block_len")):
        tables = [table.long() if i == index else table for i, table in enumerate(made.tables)]
        with pytest.raises(RuntimeError, match=f"{name} must be 1-D int32"):
            ops.decode_attention(made.out, made.query, made.cache, *tables, LAYER, made.scaling)
    with pytest.raises(RuntimeError, match=r"query must be contiguous \[B, H, D\]"):
        ops.decode_attention(made.out[:, :3], made.query[:, :3], made.cache, *made.tables, LAYER, made.scaling)
    three = made.out[:, :3].contiguous(), made.query[:, :3].contiguous()
    with pytest.raises(RuntimeError, match="multiple of K heads"):
        ops.decode_attention(*three, made.cache, *made.tables, LAYER, made.scaling)
    with pytest.raises(RuntimeError, match="layer is 3"):
        ops.decode_attention(made.out, made.query, made.cache, *made.tables, 3, made.scaling)


def test_opcheck() -> None:
    made = Case(torch.bfloat16, **CASES["grouped 128"], lengths=(5, 17))
    arguments = (made.out.zero_(), made.query, made.cache.nan_to_num(), *made.tables, LAYER, made.scaling)
    torch.library.opcheck(torch.ops.punica.decode_attention.default, arguments)
