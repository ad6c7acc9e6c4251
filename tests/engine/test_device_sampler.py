"""Sampling on the device: the tokens and logprobs of `Sampler`, queued without waiting."""

from __future__ import annotations

import pytest
import torch

from punica_core.engine.device_sampler import DeviceSampler, scratch_bytes
from punica_core.engine.logprobs import _top_ids, ranked_top_ids
from punica_core.engine.sampler import Sampler
from punica_core.engine.transfers import Download
from punica_core.scheduler.plan import RowPlan, SampledToken
from tests.engine.test_sampler import mixed_rows, peaked_logits
from tests.support.sampling import next_row, sampling_row

VOCAB_SIZE = 2049
EOS = (0, 7)
PENALTIES = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.2}

CPU = pytest.param("cpu", id="cpu")
GPU = pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [CPU, GPU])


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        from punica_core.ops import cuda

        cuda.load()


def samplers() -> tuple[DeviceSampler, Sampler]:
    return DeviceSampler(VOCAB_SIZE, EOS, seed=5), Sampler(VOCAB_SIZE, EOS, seed=5)


def some_logits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.stack([peaked_logits(VOCAB_SIZE, 1000 * seed + b) for b in range(count)])


def all_kinds(count: int) -> list[RowPlan]:
    """Filters, penalties, bias, min_tokens, logprobs, seeds, and none of them."""
    extra: list[dict[str, object]] = [
        {},
        {"logprobs": 3},
        {"logit_bias": {5: 8.0, 7: 9.0, VOCAB_SIZE + 3: 1.0}, "logprobs": 0},
        {"min_tokens": 9, "stop_token_ids": (11, 12)},
        {"logprobs": 20, **PENALTIES},
        {"seed": 77},
    ]
    return [sampling_row(**({**extra[i % len(extra)], **row})) for i, row in enumerate(mixed_rows(count))]


def assert_same(got: list[SampledToken | None], want: list[SampledToken]) -> None:
    assert [token and token.token_id for token in got] == [token.token_id for token in want]
    for one, other in zip(got, want, strict=True):
        assert one is not None
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.token_id == one.token_id
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
            assert [token_id for token_id, _ in one.logprobs.top] == [token_id for token_id, _ in other.logprobs.top]
            values = [value for _, value in other.logprobs.top]
            assert [value for _, value in one.logprobs.top] == pytest.approx(values, abs=1e-5)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_kinds_of_rows_get_the_samplers_tokens(device: str, dtype: torch.dtype) -> None:
    on_device, sampler = samplers()
    logits, rows = some_logits(60).to(dtype), all_kinds(60)
    before = logits.clone()
    moved = logits.to(device)
    pending = on_device.launch(moved, rows)
    want = sampler.sample(logits.float(), rows)
    assert_same(pending.result(), want)
    assert pending.token_ids.tolist() == [token.token_id for token in want]
    assert torch.equal(moved.cpu(), before)


@devices
@pytest.mark.parametrize("sampling", [{}, {"logprobs": 2}, {"min_tokens": 5}, {"temperature": 0.9}], ids=str)
def test_rows_of_one_kind(device: str, sampling: dict[str, object]) -> None:
    on_device, sampler = samplers()
    logits, rows = some_logits(9), [sampling_row(i, **sampling) for i in range(9)]
    assert_same(on_device.launch(logits.to(device), rows).result(), sampler.sample(logits, rows))


@devices
def test_many_steps_of_rows_that_come_and_go(device: str) -> None:
    """Rows packed once are used for many steps; a change of rows, or of their order, must be noticed."""
    on_device, sampler = samplers()
    rows = all_kinds(24)
    generator = torch.Generator().manual_seed(4)
    for step in range(30):
        logits = some_logits(len(rows), step)
        want = sampler.sample(logits, rows)
        assert_same(on_device.launch(logits.to(device), rows).result(), want)
        for row, token in zip(rows, want, strict=True):
            row.sequence.token_ids.append(token.token_id)
        rows = [next_row(row.sequence) for row in rows]
        if step % 5 == 3:
            order = torch.randperm(len(rows), generator=generator).tolist()
            rows = [rows[b] for b in order][: len(rows) - 1] + all_kinds(1)


@devices
def test_only_rows_with_unusable_logits_are_reported(device: str) -> None:
    on_device, sampler = samplers()
    logits, rows = some_logits(30), all_kinds(30)
    broken = {3: torch.nan, 8: torch.inf, 10: torch.nan, 21: torch.nan}
    spoiled = logits.clone()
    for b, value in broken.items():
        spoiled[b, [0, 7, 100]] = value
    pending = on_device.launch(spoiled.to(device), rows)
    got, want = pending.result(), sampler.sample(logits, rows)
    assert [b for b, token in enumerate(got) if token is None] == list(broken)
    others = [b for b in range(30) if b not in broken]
    assert_same([got[b] for b in others], [want[b] for b in others])
    assert all(0 <= token_id < VOCAB_SIZE for token_id in pending.token_ids.tolist())


@devices
def test_no_rows(device: str) -> None:
    assert samplers()[0].launch(torch.empty(0, VOCAB_SIZE, device=device), []).result() == []


@devices
@pytest.mark.parametrize("top", [1, 5, 20])
def test_ranking_without_a_wait_orders_ties_alike(device: str, top: int) -> None:
    logits = some_logits(40).round_()
    logits[1] = 0.0
    logits[2] = -torch.inf
    logits[3] = torch.tensor([-0.0, 0.0]).repeat(VOCAB_SIZE)[:VOCAB_SIZE]
    assert torch.equal(ranked_top_ids(logits.to(device), top).cpu(), _top_ids(logits, top))


@devices
def test_prompt_logprobs_are_the_samplers(device: str) -> None:
    on_device, sampler = samplers()
    logits = some_logits(70)
    got = on_device.prompt_logprobs(logits.to(device), range(70), top=3)
    for one, other in zip(got, sampler.prompt_logprobs(logits, range(70), top=3), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


@pytest.mark.gpu
def test_a_launch_never_waits_for_the_device() -> None:
    on_device, sampler = samplers()
    logits, rows = some_logits(60), all_kinds(60)
    moved = logits.cuda()
    on_device.launch(moved, rows).result()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            moved[0, 0].item()
        pending = on_device.launch(moved, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(pending.result(), sampler.sample(logits, rows))


@pytest.mark.gpu
def test_steps_queued_behind_a_slow_device_do_not_mix() -> None:
    """Twenty launches before the first may run: nothing of a later step's uploads reaches an earlier one."""
    on_device, sampler = samplers()
    steps = [(some_logits(60, step), all_kinds(60)[step:]) for step in range(20)]
    steps = [(logits[: len(rows)], rows) for logits, rows in steps]
    moved = [logits.cuda() for logits, _ in steps]
    for logits, (_, rows) in zip(moved, steps, strict=True):
        on_device.launch(logits, rows).result()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    pending = [on_device.launch(logits, rows) for logits, (_, rows) in zip(moved, steps, strict=True)]
    for (logits, rows), samples in zip(steps, pending, strict=True):
        assert_same(samples.result(), sampler.sample(logits, rows))


@pytest.mark.gpu
def test_a_download_is_read_when_it_has_arrived() -> None:
    source = torch.zeros(1000, device="cuda")
    torch.cuda._sleep(200_000_000)
    download = Download([source.add_(1), source * 2])
    source.add_(5)
    assert [int(tensor.sum()) for tensor in download.wait()] == [1000, 2000]


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [{"logit_bias": {5: 1.0}}, {"logprobs": 20}], ids=["edits", "logprobs"])
@pytest.mark.parametrize(("count", "vocab_size"), [(1, 262144), (8, 49152), (256, 49152), (100, 262144)])
def test_a_launch_takes_no_more_memory_than_said(sampling: dict[str, object], count: int, vocab_size: int) -> None:
    sampler = DeviceSampler(vocab_size, EOS, seed=0)
    rows = [sampling_row(i, temperature=1.0, **sampling) for i in range(count)]
    logits = torch.randn(count, vocab_size, device="cuda").bfloat16()
    sampler.launch(logits, rows).result()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sampler.launch(logits, rows).result()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= scratch_bytes(count, vocab_size) + (1 << 20)
