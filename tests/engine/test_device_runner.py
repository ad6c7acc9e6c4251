"""The runner of GPU steps, on whatever device is here: packed tables, the SGMV ops, tokens that stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from punica_core.engine import device_runner
from punica_core.engine.graphs import GraphSizes, mixed_sizes
from punica_core.engine.step_batch import BatchSizes, exact_sizes, split_rows
from punica_core.lora.table_step import LoRAOrder
from punica_core.lora.weights import AdapterWeights, load_adapter
from punica_core.scheduler.pacing import StepSizes
from punica_core.scheduler.plan import BASE_SLOT, RowPlan, StepPlan, StepResult
from tests.support.driven_device_runner import DrivenDeviceRunner
from tests.support.driven_runner import DrivenRunner, Running, random_prompt
from tests.support.peft_adapters import adapter_ref, linear_shapes, save_peft_adapter, tiny_llama

VOCAB_SIZE = 512
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
PROMPTS = [(BASE_SLOT, 4), (BASE_SLOT, 20), (0, 7), (0, 33), (1, 1), (2, 40), (2, 3), (1, 16), (0, 15)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[int, AdapterWeights]:
    root = tmp_path_factory.mktemp("adapters")
    configs = [{"r": 3}, {"r": 8, "target_modules": ["q_proj", "v_proj"]}, {"r": 16, "target_modules": ["down_proj"]}]
    folders = [save_peft_adapter(root / str(i), seed=i, **config) for i, config in enumerate(configs)]
    shapes = linear_shapes(tiny_llama())
    return {slot: load_adapter(adapter_ref(folder), shapes, torch.float32, 256) for slot, folder in enumerate(folders)}


def generated(driven: DrivenRunner, budget: int = 1000) -> list[tuple[list[int], torch.Tensor]]:
    sequences = [driven.sequence(random_prompt(length, VOCAB_SIZE), slot) for slot, length in PROMPTS]
    driven.generate(sequences, new_tokens=6, budget=budget)
    return [(sequence.token_ids, driven.logits_of(sequence)) for sequence in sequences]


@pytest.mark.parametrize("budget", [1000, 9, 1])
def test_every_row_is_what_the_plain_runner_computes(weights: dict[int, AdapterWeights], budget: int) -> None:
    expected = generated(DrivenRunner(tiny_llama(), weights))
    for (tokens, logits), (right_tokens, right_logits) in zip(
        generated(DrivenDeviceRunner(tiny_llama(), weights), budget), expected, strict=True
    ):
        assert tokens == right_tokens
        torch.testing.assert_close(logits, right_logits, **TOLERANCE)


def test_a_runner_tells_what_it_has_captured() -> None:
    runner = DrivenDeviceRunner(tiny_llama()).runner
    assert runner.step_sizes == StepSizes(), "nothing is padded"
    captured = GraphSizes.of(max_num_seqs=8, max_num_batched_tokens=128)
    runner.graphs = SimpleNamespace(sizes=captured)  # type: ignore[assignment]
    assert runner.step_sizes == captured.step_sizes()
    assert runner.step_sizes.prompt_rows == (64, 128)


def test_the_wrong_slot_gives_other_logits(weights: dict[int, AdapterWeights]) -> None:
    prompt = random_prompt(9, VOCAB_SIZE)
    driven = DrivenDeviceRunner(tiny_llama(), weights)
    right, wrong = driven.sequence(prompt, 0), driven.sequence(prompt, 1)
    driven.step([right, wrong])
    assert not torch.allclose(driven.logits_of(right), driven.logits_of(wrong), **TOLERANCE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_compiled_code_computes_the_same(weights: dict[int, AdapterWeights]) -> None:
    expected = generated(DrivenRunner(tiny_llama(), weights))
    compiled = generated(DrivenDeviceRunner(tiny_llama(), weights, compiled=True), budget=9)
    for (tokens, logits), (right_tokens, right_logits) in zip(compiled, expected, strict=True):
        assert tokens == right_tokens
        torch.testing.assert_close(logits, right_logits, **TOLERANCE)


def pending_row(driven: DrivenRunner, sequence: Running) -> RowPlan:
    """The row after one that is in flight."""
    start = sequence.num_tokens
    blocks = tuple(sequence.block_table[: start // 16 + 1])
    return RowPlan(sequence, start, 1, blocks, driven.slots[sequence.request_id], samples=True, pending=True)


def test_pending_rows_take_the_tokens_that_the_step_before_samples(weights: dict[int, AdapterWeights]) -> None:
    driven = DrivenDeviceRunner(tiny_llama(), weights)
    sequences = [driven.sequence(random_prompt(length, VOCAB_SIZE), slot) for slot, length in ((0, 12), (1, 7), (2, 5))]
    plan = StepPlan(tuple(driven.row(sequence, 1000) for sequence in sequences))
    first = driven.runner.launch(plan)
    second = driven.runner.launch(StepPlan(tuple(pending_row(driven, s) for s in (sequences[2], sequences[0]))))
    ahead = [first.result(), second.result()]
    lockstep = DrivenDeviceRunner(tiny_llama(), weights)
    twins = [lockstep.sequence(random_prompt(length, VOCAB_SIZE), slot) for slot, length in ((0, 12), (1, 7), (2, 5))]
    plain = [lockstep.step(twins), lockstep.step([twins[0], twins[2]])]
    assert [result.sampled for result in ahead] == [result.sampled for result in plain]
    swapped = driven.runner.launch(StepPlan(tuple(pending_row(driven, s) for s in sequences[:1])))
    assert swapped.result() != plain[1]


def test_a_row_that_overflows_fails_alone(weights: dict[int, AdapterWeights]) -> None:
    from punica_core.lora.tables import ModuleWeights

    loud = {path: ModuleWeights(m.a * 1e30, m.b * 1e30, m.scale) for path, m in weights[0].modules.items()}
    driven = DrivenDeviceRunner(tiny_llama(), {**weights, 9: AdapterWeights("bad", loud, 0)})
    broken, healthy = (
        driven.sequence(random_prompt(20, VOCAB_SIZE), 9),
        driven.sequence(random_prompt(5, VOCAB_SIZE), 1),
    )
    result = driven.step([broken, healthy])
    assert set(result.failed) == {broken.request_id}
    assert set(result.sampled) == {healthy.request_id}


@pytest.mark.parametrize("num_scored", [0, 3, 15])
def test_prompts_are_scored_as_the_plain_runner_does(weights: dict[int, AdapterWeights], num_scored: int) -> None:
    """num_scored: before a preemption."""
    found = []
    for driven in (DrivenRunner(tiny_llama(), weights), DrivenDeviceRunner(tiny_llama(), weights)):
        sequence = driven.sequence(random_prompt(20, VOCAB_SIZE), 0, prompt_logprobs=2)
        sequence.num_scored = num_scored
        entries = [driven.step([sequence], budget).prompt_logprobs.get(sequence.request_id) for budget in (8, 1, 20)]
        found.append([(entry.token_id, entry.logprob) for part in entries if part for entry in part])
        assert len(found[-1]) == 19 - num_scored
    for (token_id, logprob), (right_id, right_logprob) in zip(*found, strict=True):
        assert token_id == right_id
        assert logprob == pytest.approx(right_logprob, rel=1e-4)


def test_a_sequence_admitted_anew_has_its_new_blocks(weights: dict[int, AdapterWeights]) -> None:
    driven = DrivenDeviceRunner(tiny_llama(), weights)
    sequence = driven.sequence(random_prompt(40, VOCAB_SIZE), 0)
    driven.generate([sequence], new_tokens=3)
    expected = list(sequence.token_ids)
    # Preempted: other blocks, computed again.
    sequence.block_table = list(range(100, 108))
    sequence.admissions += 1
    sequence.num_computed = 0
    del sequence.token_ids[-1]
    driven.kv_cache[:64].fill_(float("nan"))
    assert not driven.step([sequence]).failed
    assert sequence.token_ids == expected


def test_a_request_id_used_again_has_the_blocks_of_its_new_sequence(weights: dict[int, AdapterWeights]) -> None:
    driven = DrivenDeviceRunner(tiny_llama(), weights)
    driven.generate([driven.sequence(random_prompt(40, VOCAB_SIZE), 0)], new_tokens=3)
    driven.slots.clear()  # so the next sequence gets the same id
    again = driven.sequence(random_prompt(30, VOCAB_SIZE), 1)
    again.block_table = list(range(60, 68))
    driven.kv_cache[:60].fill_(float("nan"))
    driven.generate([again], new_tokens=3)
    solo = DrivenRunner(tiny_llama(), weights)
    twin = solo.sequence(random_prompt(30, VOCAB_SIZE), 1)
    solo.generate([twin], new_tokens=3)
    assert again.token_ids == twin.token_ids


@pytest.mark.parametrize("padded", [mixed_sizes(8, 64), mixed_sizes(4, 128), BatchSizes(3, 50, 2, 2)], ids=str)
def test_padding_between_and_behind_the_rows_changes_nothing(
    weights: dict[int, AdapterWeights], padded: BatchSizes
) -> None:
    logits = []
    for sizes in (None, padded):
        driven = DrivenDeviceRunner(tiny_llama(), weights)
        sequences = [driven.sequence(random_prompt(n, VOCAB_SIZE), slot) for slot, n in PROMPTS[2:7]]
        driven.generate(sequences[:3], new_tokens=2)
        decode, prompts = split_rows([driven.row(sequence, 1000) for sequence in sequences])
        assert (len(decode), len(prompts)) == (3, 2)
        with torch.inference_mode():
            used = exact_sizes(decode, prompts) if sizes is None else sizes
            batch = driven.packer.pack(decode, prompts, {}, used, in_graph=False)
            driven.attention.inner.begin(batch.attention)
            assert driven.lora is not None
            driven.lora.begin(batch.row_slots)
            logits.append(driven.forward(batch, LoRAOrder.BESIDE)[[part.first for part in batch.logits]])
    torch.testing.assert_close(logits[0], logits[1], **TOLERANCE)
    assert not torch.allclose(logits[0], logits[1].flip(0), **TOLERANCE)


def test_a_chunk_that_does_not_reach_the_end_yields_nothing() -> None:
    driven = DrivenDeviceRunner(tiny_llama())
    assert driven.step([driven.sequence(random_prompt(20, VOCAB_SIZE))], budget=8) == StepResult()


@pytest.mark.gpu
def test_a_result_is_there_when_the_device_is_done_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = DrivenDeviceRunner(tiny_llama().to("cuda", torch.bfloat16))

    def slow_forward(*arguments: Any, **options: Any) -> torch.Tensor:
        logits = driven.forward(*arguments, **options)
        torch.cuda._sleep(1_000_000_000)
        return logits

    monkeypatch.setattr(driven.runner, "_forward", slow_forward)
    pending = driven.runner.launch(StepPlan((driven.row(driven.sequence(random_prompt(20, VOCAB_SIZE)), 8),)))
    end = torch.cuda.Event()
    end.record()
    assert not end.query(), "launching waited"
    pending.result()
    assert end.query()


@pytest.mark.parametrize("budget", [8, 1000], ids=["samples nothing", "samples"])
def test_a_result_waits_for_all_that_was_queued(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """Where the adapter of a cancelled prompt gives way to others, no step may still read it."""
    told: list[str] = []

    class Mark:
        def __init__(self, device: torch.device) -> None:
            told.append("end")

        def wait(self) -> None:
            told.append("waited")

    monkeypatch.setattr(device_runner, "Mark", Mark)
    driven = DrivenDeviceRunner(tiny_llama())
    monkeypatch.setattr(driven.sampler, "launch", telling(driven.sampler.launch, told))
    pending = driven.runner.launch(StepPlan((driven.row(driven.sequence(random_prompt(20, VOCAB_SIZE)), budget),)))
    assert told == (["end"] if budget == 8 else ["sampling", "end"])
    pending.result()
    assert told[-1] == "waited"


def telling(launch: Callable[..., Any], told: list[str]) -> Callable[..., Any]:
    def launched(*arguments: Any) -> Any:
        told.append("sampling")
        return launch(*arguments)

    return launched


def test_an_empty_plan_yields_nothing() -> None:
    assert DrivenDeviceRunner(tiny_llama()).runner.execute(StepPlan()) == StepResult()


def test_warming_up_writes_nothing(weights: dict[int, AdapterWeights]) -> None:
    driven = DrivenDeviceRunner(tiny_llama(), weights)
    for order in LoRAOrder:
        driven.runner.warm_up(64, order)
    assert bool(driven.kv_cache.isnan().all())
