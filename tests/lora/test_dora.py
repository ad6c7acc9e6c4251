"""Row gains against the formula of the whole matrix, whatever the chunks."""

from __future__ import annotations

import pytest
import torch

from punica_core.lora import dora
from punica_core.lora.dora import embedding_gain, row_gain


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) * shape[0]))


W, A, B, M = draw(50, 24), draw(3, 24), draw(50, 3), draw(50)
SCALE = 0.7


@pytest.mark.parametrize("chunk", [1, 24 * 7, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gain_is_the_magnitude_over_the_norm_of_each_row(
    monkeypatch: pytest.MonkeyPatch, chunk: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(dora, "CHUNK_ELEMENTS", chunk)
    w, a, b = W.to(dtype), A.to(dtype), B.to(dtype)
    seen = []
    got = row_gain(w, a, b, SCALE, M, lambda: seen.append(1))
    wanted = M.double() / torch.linalg.vector_norm(w.double() + SCALE * b.double() @ a.double(), dim=1)
    torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=0)
    assert len(seen) == -(-50 // max(1, chunk // 24))
    assert torch.equal(w, W.to(dtype)), "the base's weight was written to"


@pytest.mark.parametrize("chunk", [1, 24 * 7, 1 << 20])
def test_an_embedding_has_a_gain_for_each_column(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(dora, "CHUNK_ELEMENTS", chunk)
    got = embedding_gain(W, B.t(), A.t(), SCALE, M[:24])
    wanted = M[:24].double() / torch.linalg.vector_norm(W.double() + SCALE * B.double() @ A.double(), dim=0)
    torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=0)


def test_a_norm_that_overflows_is_no_gain_of_zero() -> None:
    huge = A.clone()
    huge[0, 3] = 3e38
    assert torch.isnan(row_gain(W, huge, B, SCALE, M)).all()
    assert torch.isnan(embedding_gain(W, B.t(), huge.t(), SCALE, M[:24])).tolist() == [i == 3 for i in range(24)]
    assert torch.isfinite(row_gain(W, A, B, SCALE, M)).all()


@pytest.mark.gpu
def test_gains_computed_on_the_gpu_are_the_cpus() -> None:
    on_gpu = row_gain(W.cuda(), A, B, SCALE, M)
    assert on_gpu.device.type == "cpu"
    torch.testing.assert_close(on_gpu, row_gain(W, A, B, SCALE, M), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        embedding_gain(W.cuda(), B.t(), A.t(), SCALE, M[:24]), embedding_gain(W, B.t(), A.t(), SCALE, M[:24])
    )


@pytest.mark.gpu
def test_many_gains_keep_no_more_gpu_memory_than_one() -> None:
    weight, a, b, magnitude = draw(4096, 1024).cuda(), draw(8, 1024), draw(4096, 8), draw(4096)
    kept = []
    for count in (1, 64):
        for _ in range(count):
            row_gain(weight, a, b, SCALE, magnitude)
        kept.append(torch.cuda.memory_reserved())
    assert kept[0] == kept[1]
