"""The GPU's memory, shared out by numbers: it adds up, and what cannot be is refused with what to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from punica_core.config import BLOCK_SIZE, EngineConfig
from punica_core.engine.device_memory import bytes_elsewhere, held_bytes, peak_bytes, total_bytes
from punica_core.engine.gpu_build import logits_bytes
from punica_core.engine.graphs import GraphSizes
from punica_core.engine.memory_plan import (
    ADAPTER_SHARE,
    MIN_ADAPTER_BYTES,
    MemoryDemand,
    amount,
    graph_bytes,
    plan_gpu_memory,
)
from punica_core.engine.step_batch import StepPacker
from punica_core.engine.step_limits import StepLimits
from punica_core.errors import ConfigError
from punica_core.lora.arena_writer import ArenaWriter, device_bytes
from punica_core.lora.segments import SegmentPlan
from punica_core.lora.tables import AdapterTables, Arena
from punica_core.ops.layout import row_pitch

MIB, GIB = 2**20, 2**30

BLOCK_BYTES = 2 * MIB
"""Of Llama-3.1-8B in 16 bit: 128 KiB a token."""


def demand(**changes: Any) -> MemoryDemand:
    """An 8B model on a GPU of 24 GiB, with 4.6 GiB left for adapters and KV."""
    numbers = {
        "total": 24 * GIB,
        "elsewhere": 512 * MIB,
        "weights": 15 * GIB,
        "activations": 1 * GIB,
        "workspace": 256 * MIB,
        "graphs": 256 * MIB,
        "block_bytes": BLOCK_BYTES,
        "max_model_len": 8192,
    }
    return MemoryDemand(**numbers | changes)


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(model="m", **changes)


REST = int(24 * GIB * 0.9) - 17 * GIB


def test_by_default_adapters_get_their_share_and_the_kv_cache_the_rest() -> None:
    plan = plan_gpu_memory(config(), demand())
    assert plan.budget == int(24 * GIB * 0.9)
    assert plan.adapter_bytes == int(REST * ADAPTER_SHARE)
    assert plan.num_blocks == (REST - plan.adapter_bytes) // BLOCK_BYTES
    assert plan.num_tokens == plan.num_blocks * 16
    assert 0 <= plan.spare_bytes < BLOCK_BYTES


def test_what_is_asked_for_is_given() -> None:
    plan = plan_gpu_memory(config(adapter_gpu_bytes=3 * GIB, kv_tokens=10_000), demand())
    assert (plan.adapter_bytes, plan.num_blocks) == (3 * GIB, 625)
    assert plan.spare_bytes == REST - 3 * GIB - 625 * BLOCK_BYTES


def test_without_lora_the_kv_cache_gets_all() -> None:
    plan = plan_gpu_memory(config(lora=False), demand())
    assert plan.adapter_bytes == 0
    assert plan.num_blocks == REST // BLOCK_BYTES


def test_kv_tokens_come_before_the_adapters_default_share() -> None:
    tokens = (REST - 500 * MIB) // BLOCK_BYTES * BLOCK_SIZE
    plan = plan_gpu_memory(config(kv_tokens=tokens), demand())
    assert plan.num_blocks == tokens // BLOCK_SIZE
    assert MIN_ADAPTER_BYTES < plan.adapter_bytes < int(REST * ADAPTER_SHARE)


def test_a_long_context_comes_before_the_adapters_default_share() -> None:
    tokens = (REST - 200 * MIB) // BLOCK_BYTES * BLOCK_SIZE
    plan = plan_gpu_memory(config(), demand(max_model_len=tokens))
    assert plan.num_tokens >= tokens
    assert plan.adapter_bytes < int(REST * ADAPTER_SHARE)


def refusal(settings: EngineConfig, needs: MemoryDemand) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan_gpu_memory(settings, needs)
    return caught.value


def test_weights_that_do_not_fit_are_told_with_who_else_uses_the_gpu() -> None:
    error = refusal(config(), demand(elsewhere=7 * GIB))
    assert error.param == "gpu_memory_fraction"
    assert "weights need 15.0 GiB and 7.0 GiB of GPU memory are used elsewhere" in error.message
    assert "21.6 GiB (gpu_memory_fraction 0.9 of 24.0 GiB)" in error.message
    plan_gpu_memory(config(gpu_memory_fraction=1.0), demand(elsewhere=6 * GIB))


def test_a_step_that_does_not_fit_names_the_keys_that_size_it() -> None:
    error = refusal(config(max_num_batched_tokens=8192, max_num_seqs=128), demand(activations=6 * GIB))
    assert error.param == "max_num_batched_tokens"
    assert "leave 6.1 GiB of 21.6 GiB" in error.message
    assert "a step needs 6.0 GiB" in error.message
    assert "lower max_num_batched_tokens (8192) or max_num_seqs (128)" in error.message


def suggested(pattern: str, message: str) -> int:
    found = re.search(pattern, message)
    assert found, message
    return int(found[1])


@pytest.mark.parametrize("lora", [True, False])
def test_the_context_length_suggested_is_the_longest_that_works(lora: bool) -> None:
    error = refusal(config(lora=lora), demand(max_model_len=131_072))
    assert error.param == "max_model_len"
    assert "one sequence of max_model_len 131072 tokens needs 16.0 GiB" in error.message
    tokens = suggested(r"lower max_model_len to at most (\d+)", error.message)
    assert plan_gpu_memory(config(lora=lora), demand(max_model_len=tokens)).num_tokens >= tokens
    assert refusal(config(lora=lora), demand(max_model_len=tokens + 1)).param == "max_model_len"


def test_no_context_length_is_suggested_where_none_works() -> None:
    error = refusal(config(), demand(activations=REST + GIB))
    assert error.param == "max_model_len"
    assert "to at most" not in error.message


def test_the_adapter_bytes_suggested_are_the_most_that_work() -> None:
    error = refusal(config(adapter_gpu_bytes=4 * GIB), demand())
    assert error.param == "adapter_gpu_bytes"
    assert "adapter_gpu_bytes is 4.0 GiB, but 4.6 GiB of GPU memory are left" in error.message
    assert "1.0 GiB for one sequence of full length" in error.message
    most = suggested(r"to at most (\d+)MiB", error.message) * MIB
    plan_gpu_memory(config(adapter_gpu_bytes=most), demand())
    assert refusal(config(adapter_gpu_bytes=most + MIB), demand()).param == "adapter_gpu_bytes"


@pytest.mark.parametrize("adapter_bytes", [0, GIB])
def test_the_kv_tokens_suggested_are_the_most_that_work(adapter_bytes: int) -> None:
    error = refusal(config(kv_tokens=10**6, adapter_gpu_bytes=adapter_bytes), demand())
    assert error.param == "kv_tokens"
    assert ("adapter_gpu_bytes" in error.message) == bool(adapter_bytes)
    most = suggested(r"to at most (\d+)", error.message)
    assert plan_gpu_memory(config(kv_tokens=most, adapter_gpu_bytes=adapter_bytes), demand()).num_tokens == most
    too_many = config(kv_tokens=most + BLOCK_SIZE, adapter_gpu_bytes=adapter_bytes)
    assert refusal(too_many, demand()).param == "kv_tokens"


def test_fewer_kv_tokens_than_one_sequence_may_have_are_refused() -> None:
    error = refusal(config(kv_tokens=8000), demand())
    assert error.param == "kv_tokens"
    assert "room for 8000 tokens, but one sequence may have 8192" in error.message
    plan_gpu_memory(config(kv_tokens=8192), demand())


sizes = st.integers(0, 8 * GIB)


@given(sizes, sizes, sizes, sizes, st.integers(1, 32 * MIB), st.integers(1, 40_000), sizes, st.integers(0, 40_000))
def test_a_plan_always_keeps_to_its_budget(
    weights: int, activations: int, graphs: int, elsewhere: int, block: int, longest: int, adapters: int, tokens: int
) -> None:
    needs = demand(
        weights=weights,
        activations=activations,
        graphs=graphs,
        elsewhere=elsewhere,
        block_bytes=block,
        max_model_len=longest,
    )
    try:
        plan = plan_gpu_memory(config(adapter_gpu_bytes=adapters, kv_tokens=tokens), needs)
    except ConfigError:
        assume(False)  # Hypothesis complains if few are left
    assert plan.spare_bytes >= 0
    assert plan.num_tokens >= longest
    assert plan.adapter_bytes == adapters if adapters else plan.adapter_bytes >= MIN_ADAPTER_BYTES
    assert needs.fixed + plan.adapter_bytes + plan.kv_bytes + plan.spare_bytes == int(24 * GIB * 0.9)


def test_the_lines_of_the_log_name_every_part() -> None:
    plan = plan_gpu_memory(config(), demand())
    lines = plan.describe()
    assert lines[0] == "GPU memory: 21.6 GiB of 24.0 GiB"
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "used elsewhere",
        "weights",
        "activations",
        "workspace",
        "graphs",
        "adapters",
        "KV cache",
        "spare",
    ]
    assert f"{plan.num_tokens:,} tokens" in lines[7]
    assert not any("adapters" in line for line in plan_gpu_memory(config(lora=False), demand()).describe())


def test_amounts_are_for_people() -> None:
    assert [amount(n) for n in (0, 1536 * 1024, 3 * GIB // 2)] == ["0.0 MiB", "1.5 MiB", "1.5 GiB"]
    assert graph_bytes(20, 32) == 120 * MIB


@pytest.mark.gpu
def test_the_peak_of_a_step_is_what_it_allocates_though_it_frees_it() -> None:
    device = torch.device("cuda")
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device=device)

    def step() -> None:
        for _ in range(3):
            torch.empty(128 * MIB, dtype=torch.uint8, device=device)

    step()
    assert held_bytes(device) >= kept.nbytes
    peak = peak_bytes(device, step)
    assert 128 * MIB <= peak < 160 * MIB
    assert held_bytes(device) < kept.nbytes + 128 * MIB
    assert 0 < bytes_elsewhere(device) < total_bytes(device)


def test_logits_that_outlast_their_step_are_counted() -> None:
    vocab_size = 128_256
    graphs = 256 * vocab_size * 2
    in_fp32 = 2 * graphs  # rows with logit_bias or penalties
    assert logits_bytes(256, 1, vocab_size, 2) >= graphs + in_fp32
    scored = logits_bytes(256, 2048, vocab_size, 2) - logits_bytes(256, 1, vocab_size, 2)
    assert 255 * MIB < scored < 256 * MIB, "128 MiB in 16 bits, of two steps"
    assert logits_bytes(256, 2048, vocab_size, 2) == logits_bytes(256, 100_000, vocab_size, 2)


class CountedBytes(TorchDispatchMode):
    """Bytes of what is made on the meta device, which stands for a GPU: what is made elsewhere is the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "meta":
            storage = made.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.total += storage.nbytes()
        return made


def counted(make: Callable[[], object]) -> int:
    with CountedBytes() as counter:
        kept = make()
    del kept
    return counter.total


META = torch.device("meta")


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 1, "max_num_batched_tokens": 32},
        {"max_num_seqs": 300, "max_num_batched_tokens": 8192, "max_lora_rank": 33},
        {"max_num_seqs": 256, "max_num_batched_tokens": 1000, "cuda_graphs": False},
    ],
    ids=str,
)
def test_the_buffers_of_a_step_are_counted_to_the_byte(settings: dict[str, Any], lora: bool) -> None:
    chosen = config(**settings)
    seqs, budget = chosen.max_num_seqs, chosen.max_num_batched_tokens
    captured = GraphSizes.of(seqs, budget) if chosen.cuda_graphs else GraphSizes()
    limits = StepLimits.of(chosen, captured.largest, max_model_len=131_072)

    def packer() -> object:
        sizes = {"largest": limits.largest, "max_blocks": limits.max_blocks}
        return StepPacker(META, block_size=BLOCK_SIZE, padding_block=0, **sizes)  # type: ignore[arg-type]

    def plans() -> object:
        rank = row_pitch(limits.max_rank)
        rows = SegmentPlan(limits.max_rows, max_rank=rank, device=META)
        return rows, SegmentPlan(limits.max_rows, max_rank=rank, device=META, max_segments=limits.max_segments)

    made = counted(packer) + (counted(plans) if lora else 0)
    assert limits.device_bytes(lora=lora) == made > 4 * limits.max_blocks


def test_no_step_has_more_blocks_than_there_is_room_for() -> None:
    limits = StepLimits.of(config(max_num_seqs=3), GraphSizes().largest, max_model_len=100)
    assert limits.max_blocks == 3 * 7 + 3


def test_the_adapters_tables_are_counted_to_the_byte() -> None:
    def made() -> list[object]:
        tables = AdapterTables(7, 5, device=META)
        return [tables, ArenaWriter(Arena(1024, dtype=torch.float16, device=META), tables)]

    assert counted(made) == device_bytes(7, 5) + 2 * 1024


def test_the_counting_sees_what_is_made_on_the_device_alone() -> None:
    assert counted(lambda: torch.zeros(100, device="meta")) == 400
    assert counted(lambda: [torch.zeros(100), torch.zeros(100, device="meta").view(10, 10)[2:]]) == 400
