"""What attention on a GPU reserves and which kernels it calls, with a stand-in for FlashInfer's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from punica_core.engine.graphs import GraphSizes
from punica_core.engine.step_batch import BatchSizes
from punica_core.model import flashinfer
from punica_core.model.attention import AttentionSpec, KVRow, PagedAttention
from punica_core.model.attention_op import AttentionBatch, Lane, split_rotated
from punica_core.model.flashinfer import FlashInferAttention, workspace_bytes
from tests.support.driven_device_runner import DrivenDeviceRunner
from tests.support.driven_runner import random_prompt
from tests.support.peft_adapters import tiny_llama

SHAPES = {
    "Llama-2-7B": (32, 32, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "Llama-3.1-70B": (64, 8, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "SmolLM2-135M": (9, 3, 64),
    "Gemma-2-9B": (16, 8, 256),
    "Gemma-3-1B": (4, 1, 256),
    "24 heads to one": (48, 2, 128),
    "71 heads to one": (71, 1, 64),
}
"""Query heads, key heads and head dim."""


def planned_bytes(num_heads: int, num_kv_heads: int, head_dim: int, processors: int, seqs: int, rows: int) -> int:
    """Of the partial outputs (fp32, with a sum for each) of a captured launch: FlashInfer plans for the largest number
    of tiles into which so many sequences can divide the rows, or for twice the processors."""
    group = num_heads // num_kv_heads
    longest = (rows - seqs + 1) * group
    tile = 128 if longest > 64 and head_dim < 256 else 64 if longest > 16 else 16
    tiles = max(2 * processors // num_kv_heads, -(-rows * group // tile) + seqs - 1)
    return num_heads * tiles * tile * (head_dim + 1) * 4


@pytest.mark.parametrize("processors", [66, 108, 132])
@pytest.mark.parametrize("max_batched_tokens", [256, 8192])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_workspace_holds_the_partial_outputs_of_every_captured_step(
    shape: tuple[int, int, int], max_batched_tokens: int, processors: int
) -> None:
    for max_num_seqs in (1, 8, 100, 256):
        sizes = GraphSizes.of(max_num_seqs, max_batched_tokens)
        largest = sizes.largest
        reserved = workspace_bytes(
            *shape,
            processors,
            max_seqs=max(max_num_seqs, largest.num_decode),
            max_prompt_rows=largest.num_prompt_rows,
            max_prompts=largest.num_prompts,
        )
        steps = sizes.steps()
        lanes = [(step.num_decode, step.num_decode) for step in steps if step.num_decode]
        lanes += [(step.num_prompts, step.num_prompt_rows) for step in steps if step.num_prompts]
        needed = max(planned_bytes(*shape, processors, *lane) for lane in lanes)
        assert needed <= reserved <= 2 * needed + (2 << 20), (max_num_seqs, needed, reserved)


class RecordingModule:
    """Stands in for FlashInfer's compiled kernels: notes calls and computes nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def plan(self, *arguments: Any) -> None:
        self.calls.append("plan")

    def paged_run(self, *arguments: Any) -> None:
        self.calls.append("run")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> RecordingModule:
    stand_in = RecordingModule()
    monkeypatch.setattr(flashinfer, "_module", lambda *arguments: stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return stand_in


SPECS = (AttentionSpec(0.125), AttentionSpec(0.1, window=9), AttentionSpec(0.125, softcap=3.0))


def begun(cut: bool, head_dim: int = 64, **options: Any) -> tuple[FlashInferAttention, list[KVRow], torch.Tensor]:
    """Attention with a step of three decode rows under way, the rows, and the cache."""
    driven = DrivenDeviceRunner(tiny_llama())
    sequences = [driven.sequence(random_prompt(length, 512)) for length in (5, 40, 17)]
    driven.generate(sequences, new_tokens=1)
    batch = driven.packer.pack([driven.row(s, 1) for s in sequences], (), {}, BatchSizes(4), in_graph=True)
    cache = torch.randn(driven.kv_cache.size(0), 3, 2, 16, 2, head_dim)
    attention = FlashInferAttention(cache, 4, SPECS, 8, **options)
    attention.begin(batch.attention, cut)
    return attention, list(batch.attention.kv_rows), cache


def test_whole_contexts_are_attended_by_our_kernel_and_need_no_plan(module: RecordingModule) -> None:
    attention, rows, cache = begun(cut=False)
    for layer, spec in enumerate(SPECS):
        qkv, cos, sin = torch.randn(4, 8 * 64), torch.randn(4, 64), torch.randn(4, 64)
        query, key, value = split_rotated(qkv, cos, sin, 2, 64)
        before = cache.clone()
        found = attention.compute_rotary(layer, qkv, cos, sin, torch.zeros(16))[:3]
        expected = PagedAttention(before, rows).attend(layer, query[:3], key[:3], value[:3], spec)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(attention.compute(layer, query, key, value)[:3], expected)
        other = SPECS[(layer + 1) % 3]
        assert not torch.allclose(
            found, PagedAttention(before, rows).attend(layer, query[:3], key[:3], value[:3], other)
        )
    assert module.calls == []


@pytest.mark.parametrize(
    ("cut", "options"),
    [(True, {}), (False, {"own_kernel": False}), (False, {"head_dim": 256})],
    ids=["cut", "switched off", "wide heads"],
)
def test_else_flashinfer_plans_and_attends(module: RecordingModule, cut: bool, options: dict[str, Any]) -> None:
    attention, _, cache = begun(cut, **options)
    attention.compute(0, *(torch.randn(4, heads, cache.size(-1)) for heads in (4, 2, 2)))
    assert module.calls == ["plan", "plan", "plan", "run"]


@pytest.mark.parametrize(
    ("lengths", "own_kernel", "cut"),
    [
        ((500,), True, False),
        ((500,), False, True),
        ((520,), True, True),
        ((300, 20), False, False),
        ((2000,) * 64, True, False),
        ((2000, *(200,) * 63), True, True),
    ],
)
def test_short_and_even_contexts_are_not_cut(
    module: RecordingModule, lengths: tuple[int, ...], own_kernel: bool, cut: bool
) -> None:
    attention = FlashInferAttention(torch.zeros(1, 1, 2, 16, 8, 128), 32, SPECS[:1], 8, own_kernel=own_kernel)
    indptr = np.cumsum([0, *(-(-length // 16) for length in lengths)], dtype=np.int32)
    empty = torch.zeros(0, dtype=torch.int32)
    rows = slice(0, len(lengths))
    lane = Lane(rows, np.arange(len(lengths) + 1, dtype=np.int32), indptr, empty, empty, empty)
    batch = AttentionBatch(lane, None, empty, empty, in_graph=True, kv_rows=())
    assert attention.wants_cut(batch) == cut
