"""The logic of the sampling kernels without a GPU: threads as fibers, one cluster at a time."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from punica_core.ops import draw
from punica_core.ops.build import source_directory
from punica_core.ops.sample import pack_rows, rows_words
from punica_core.protocol import SamplingParams
from tests.ops.sample_emulator import DTYPES, KERNELS, EmulatedKernels
from tests.support.emulation import compile_kernels

VOCAB_SIZES = (1, 2, 7, 31, 33, 64, 300, 1000, 2049, 4097, 9001)
KINDS = ("spread", "tied", "flat", "equal", "peaked", "some -inf", "all -inf", "wide", "zeros")


@pytest.fixture(scope="session")
def kernels(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernels:
    return EmulatedKernels(compile_kernels(nvcc, KERNELS, tmp_path_factory.mktemp("emulated") / "sample.so"))


class Case:
    """Three rows with random logits, parameters and points; the kernel's choice and the one it should make."""

    def __init__(self, seed: int, vocab_size: int | None = None, kind: str | None = None) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.vocab_size = vocab_size or self.random.choice(VOCAB_SIZES)
        self.num_blocks = self.random.choice([n for n in (1, 2, 4, 8) if n == 1 or self.vocab_size > 64 * n])
        self.kind = kind or self.random.choice(KINDS)
        dtype = self.random.choice(DTYPES)
        # Rows that start on any address, between numbers that must not be read.
        padding = self.random.choice([0, 0, 1, 3, 8])
        around = torch.full((3, padding + self.vocab_size + 1), torch.nan, dtype=dtype)
        self.logits = around[:, padding : padding + self.vocab_size]
        self.logits.copy_(self._logits())
        self.params = [self._params() for _ in range(3)]
        self.points = torch.tensor([self._point() for _ in range(3)], dtype=torch.float64)

    def _logits(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        logits = torch.randn(3, self.vocab_size, generator=generator) * self.random.choice([0.1, 1.0, 3.0, 10.0])
        if self.kind == "tied":
            logits = (logits * self.random.choice([0.3, 1.0, 4.0])).round()
        elif self.kind == "flat":
            logits *= 1e-4
        elif self.kind == "equal":
            logits.fill_(3.5)
        elif self.kind == "peaked":
            logits[:, self.random.randrange(self.vocab_size)] += 30
        elif self.kind == "some -inf":
            logits[torch.rand(logits.shape, generator=generator) < 0.5] = -torch.inf
        elif self.kind == "all -inf":
            logits.fill_(-torch.inf)
        elif self.kind == "wide":
            logits *= 1e3
        elif self.kind == "zeros":  # of both signs, which are equal
            logits *= 0
        return logits

    def _params(self) -> SamplingParams:
        choice = self.random.choice
        size = self.vocab_size
        return SamplingParams(
            max_tokens=1,
            temperature=choice([0.0, 1.0, 1.0, 0.7, 3.0, 100.0, 1e-6, 1e-30]),
            top_k=choice([0, 0, 1, 2, 5, 40, 64, 65, max(1, size // 2), max(1, size - 1), size, size + 5]),
            top_p=choice([1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.95, 0.999999, 1 - 2.0**-53]),
            min_p=choice([0.0, 0.0, 0.0, 0.05, 0.3, 1.0]),
        )

    def _point(self) -> float:
        return self.random.choice([0.0, 1 - 2.0**-53, self.random.random(), self.random.random()])

    def run(self, kernels: EmulatedKernels) -> list[int]:
        records = pack_rows(self.params)
        records["point"] = self.points.numpy()
        rows = torch.from_numpy(rows_words(records))
        token_ids, finite = kernels.sample(
            self.logits, rows, cached=self.random.random() < 0.5, num_blocks=self.num_blocks, seed=self.seed
        )
        assert finite == [True] * 3
        return token_ids

    def expected(self, kernels: EmulatedKernels) -> list[int]:
        return [self._expected(kernels, b) for b in range(3)]

    def _expected(self, kernels: EmulatedKernels, b: int) -> int:
        params, scores = self.params[b], self.logits[b].float().contiguous()
        if draw.is_greedy(params):
            return int(draw.first_argmax(scores.unsqueeze(0)))
        weights = kernels.weights(scores, params.temperature).unsqueeze(0)
        return int(draw.inverse_cdf(draw.filter_weights(weights, [params]), self.points[b : b + 1]))

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.kind}, V {self.vocab_size}, {self.num_blocks} blocks, {self.params}"


@pytest.mark.parametrize("part", range(4))
def test_random_rows_get_the_tokens_of_the_reference(kernels: EmulatedKernels, part: int) -> None:
    for seed in range(40 * part, 40 * part + 40):
        case = Case(seed)
        assert case.run(kernels) == case.expected(kernels), str(case)


def test_ties_across_blocks(kernels: EmulatedKernels) -> None:
    for seed in range(12):
        case = Case(seed, vocab_size=9001, kind=("equal", "tied", "flat")[seed % 3])
        assert case.run(kernels) == case.expected(kernels), str(case)


def test_the_weights_are_those_of_torch_but_for_exp(kernels: EmulatedKernels) -> None:
    scores = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 5
    got = kernels.weights(scores, 0.7)
    want = draw.fixed_point_weights(scores.unsqueeze(0), [0.7])[0]
    assert int(got.max()) == 1 << draw.WEIGHT_BITS
    assert ((got - want).abs() <= want.double() * 2.0**-22 + 1).all()


@pytest.mark.parametrize("num_blocks", [1, 8])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_unusable_rows_are_told(kernels: EmulatedKernels, value: float, num_blocks: int) -> None:
    case = Case(3, vocab_size=1000, kind="spread")
    logits = case.logits.float()
    logits[1, 987] = value
    rows = torch.from_numpy(rows_words(pack_rows([SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)] * 3)))
    for records in (rows, None):
        token_ids, finite = kernels.sample(logits, records, cached=True, num_blocks=num_blocks, seed=0)
        assert finite == [True, False, True]
        assert all(0 <= token_id < 1000 for token_id in token_ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_blocks", [1, 4])
def test_greedy_tokens(kernels: EmulatedKernels, dtype: torch.dtype, num_blocks: int) -> None:
    for seed, kind in enumerate(KINDS):
        logits = Case(seed, vocab_size=1001, kind=kind).logits.to(dtype)
        token_ids, finite = kernels.sample(logits, None, cached=False, num_blocks=num_blocks, seed=seed)
        assert token_ids == draw.first_argmax(logits.float()).tolist()
        assert all(finite)


BROKEN = [
    ("sample.cuh", "shared) + 1;", "shared);"),
    ("sample.cuh", "sync(cluster);  // histograms.lead is complete", "__syncthreads();"),
    ("sample.cuh", "return shared.tie_end;", "return 1 << 22;"),
    ("sample_cut.cuh", "bin.own.count == 1 ||", "bin.own.count <= 2 ||"),
    ("sample_cut.cuh", "(reach - bin.heavier.sum + weight - 1) / weight", "(reach - bin.heavier.sum) / weight + 1"),
    ("sample_row.cuh", "logit + 0.f", "logit"),
    ("block_sums.cuh", "if (lane >= offset)", "if (lane > offset)"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("header", "line", "broken"), BROKEN, ids=[new for _, _, new in BROKEN])
def test_a_broken_kernel_is_noticed(nvcc: str, tmp_path: Path, header: str, line: str, broken: str) -> None:
    sources = Path(shutil.copytree(source_directory(), tmp_path / "csrc"))
    path = sources / "include" / "punica" / header
    assert path.read_text().count(line) == 1
    path.write_text(path.read_text().replace(line, broken))
    kernels = EmulatedKernels(compile_kernels(nvcc, KERNELS, tmp_path / "broken.so", sources))
    cases = [*map(Case, range(160)), *(Case(seed, 9001, ("equal", "tied", "flat")[seed % 3]) for seed in range(12))]
    assert not all(_passes(case, kernels) for case in cases)


def _passes(case: Case, kernels: EmulatedKernels) -> bool:
    try:
        return case.run(kernels) == case.expected(kernels)
    except (RuntimeError, AssertionError):
        return False
