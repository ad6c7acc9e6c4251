"""The runner: mixed adapters equal PEFT row by row; one row's faults stay its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from punica_core.lora import threads
from punica_core.lora.weights import AdapterWeights, load_adapter
from punica_core.scheduler.plan import BASE_SLOT, StepPlan, StepResult
from tests.support.driven_runner import DrivenRunner, random_prompt
from tests.support.peft_adapters import adapter_ref, linear_shapes, peft_logits, save_peft_adapter, tiny_llama

VOCAB_SIZE = 512
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

ADAPTERS = {
    "all": {"r": 3, "lora_alpha": 7},
    "attention": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 16, "target_modules": ["down_proj", "k_proj", "gate_proj"], "use_rslora": True},
    "one_layer": {"r": 1, "layers_to_transform": [1]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [save_peft_adapter(root / name, seed=i, **config) for i, (name, config) in enumerate(ADAPTERS.items())]


@pytest.fixture(scope="module")
def weights(folders: list[Path]) -> dict[int, AdapterWeights]:
    shapes = linear_shapes(tiny_llama())
    return {slot: load_adapter(adapter_ref(folder), shapes, torch.float32, 256) for slot, folder in enumerate(folders)}


def expected_logits(folders: list[Path], slot: int, token_ids: list[int]) -> torch.Tensor:
    if slot != BASE_SLOT:
        return peft_logits(folders[slot], token_ids)
    with torch.inference_mode():
        return tiny_llama()(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("budget", [1000, 9])
def test_all_adapters_and_the_base_in_one_batch_equal_peft(
    folders: list[Path], weights: dict[int, AdapterWeights], budget: int
) -> None:
    driven = DrivenRunner(tiny_llama(), weights)
    prompts = [(BASE_SLOT, 4), (BASE_SLOT, 20), (0, 7), (0, 33), (1, 5), (2, 40), (2, 3), (3, 12)]
    sequences = [(driven.sequence(random_prompt(length, VOCAB_SIZE), slot), slot) for slot, length in prompts]
    driven.generate([sequence for sequence, _ in sequences], new_tokens=6, budget=budget)
    for sequence, slot in sequences:
        expected = expected_logits(folders, slot, sequence.token_ids[:-1])[sequence.num_prompt - 1 :]
        torch.testing.assert_close(driven.logits_of(sequence), expected, **TOLERANCE)


def test_the_wrong_slot_gives_other_logits(folders: list[Path], weights: dict[int, AdapterWeights]) -> None:
    prompt = random_prompt(9, VOCAB_SIZE)
    for slot in (BASE_SLOT, 1, 2, 3):
        driven = DrivenRunner(tiny_llama(), weights)
        sequence = driven.sequence(prompt, slot)
        driven.step([sequence])
        assert not torch.allclose(driven.logits_of(sequence)[0], peft_logits(folders[0], prompt)[-1], **TOLERANCE)


def test_base_rows_are_bitwise_the_same_with_and_without_adapters_in_the_step(
    weights: dict[int, AdapterWeights],
) -> None:
    prompts = [random_prompt(length, VOCAB_SIZE) for length in (6, 6, 6)]
    logits = []
    for slots in ((BASE_SLOT, BASE_SLOT, BASE_SLOT), (BASE_SLOT, 0, 1)):
        driven = DrivenRunner(tiny_llama(), weights)
        sequences = [driven.sequence(prompt, slot) for prompt, slot in zip(prompts, slots, strict=True)]
        driven.generate(sequences, new_tokens=5)
        logits.append([driven.logits_of(sequence) for sequence in sequences])
    assert torch.equal(logits[0][0], logits[1][0])
    assert not torch.equal(logits[0][1], logits[1][1])


def test_a_row_that_overflows_fails_alone_and_leaves_nothing_behind(weights: dict[int, AdapterWeights]) -> None:
    bad = AdapterWeights("bad", {path: _scaled(module, 1e30) for path, module in weights[0].modules.items()}, 0)
    prompt = random_prompt(5, VOCAB_SIZE)
    driven = DrivenRunner(tiny_llama(), {**weights, 9: bad})
    broken, healthy = driven.sequence(random_prompt(20, VOCAB_SIZE), 9), driven.sequence(prompt, 1)
    result = driven.step([broken, healthy])
    assert set(result.failed) == {broken.request_id}
    assert set(result.sampled) == {healthy.request_id}
    later = driven.sequence(prompt, 1)
    later.block_table = list(broken.block_table)
    driven.generate([healthy, later], new_tokens=4)
    alone = DrivenRunner(tiny_llama(), weights)
    solo = alone.sequence(prompt, 1)
    alone.generate([solo], new_tokens=4)
    assert healthy.token_ids == later.token_ids == solo.token_ids


def test_prompt_logprobs_cover_each_prompt_position_but_the_first_once(weights: dict[int, AdapterWeights]) -> None:
    driven = DrivenRunner(tiny_llama(), weights)
    prompt = random_prompt(20, VOCAB_SIZE)
    sequence = driven.sequence(prompt, 0, prompt_logprobs=2)
    found = []
    for _ in range(3):
        found += driven.step([sequence], budget=8).prompt_logprobs.get(sequence.request_id, [])
    assert [entry.token_id for entry in found] == prompt[1:]
    assert {top for _, top in driven.sampler.prompt_scores} == {2}
    whole = driven.sequence(prompt, 0, prompt_logprobs=2)
    at_once = driven.step([whole]).prompt_logprobs[whole.request_id]
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in at_once], rel=1e-4)


@pytest.mark.parametrize("num_scored", [1, 7, 8, 11, 18, 19])
def test_what_was_scored_before_a_preemption_is_not_scored_again(
    weights: dict[int, AdapterWeights], num_scored: int
) -> None:
    driven = DrivenRunner(tiny_llama(), weights)
    prompt = random_prompt(20, VOCAB_SIZE)
    whole, again = (driven.sequence(prompt, 0, prompt_logprobs=0) for _ in range(2))
    at_once = driven.step([whole]).prompt_logprobs[whole.request_id]
    again.num_scored = num_scored
    found = []
    for _ in range(3):
        found += driven.step([again], budget=8).prompt_logprobs.get(again.request_id, [])
    assert [entry.token_id for entry in found] == prompt[num_scored + 1 :]
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in at_once[num_scored:]], rel=1e-4)
    assert again.token_ids == whole.token_ids


def test_a_request_for_no_tokens_is_scored_and_not_sampled() -> None:
    driven = DrivenRunner(tiny_llama())
    sequence = driven.sequence(random_prompt(6, VOCAB_SIZE), prompt_logprobs=0, max_tokens=0)
    result = driven.step([sequence])
    assert result.sampled == {}
    assert len(result.prompt_logprobs[sequence.request_id]) == 5


def test_a_chunk_that_does_not_reach_the_end_yields_nothing() -> None:
    driven = DrivenRunner(tiny_llama())
    assert driven.step([driven.sequence(random_prompt(20, VOCAB_SIZE))], budget=8) == StepResult()


def test_an_empty_plan_yields_nothing() -> None:
    assert DrivenRunner(tiny_llama()).runner.execute(StepPlan()) == StepResult()


def test_a_step_executed_twice_gives_the_same_tokens(weights: dict[int, AdapterWeights]) -> None:
    driven = DrivenRunner(tiny_llama(), weights)
    sequences = [driven.sequence(random_prompt(n, VOCAB_SIZE), slot) for n, slot in ((8, BASE_SLOT), (5, 0), (7, 1))]
    driven.generate(sequences, new_tokens=3)
    plan = StepPlan(tuple(driven.row(sequence, 1) for sequence in sequences))
    assert driven.runner.execute(plan) == driven.runner.execute(plan)


@pytest.mark.gpu
def test_a_mixed_batch_on_the_gpu_gives_the_logits_of_the_cpu(weights: dict[int, AdapterWeights]) -> None:
    logits = []
    for device in ("cpu", "cuda"):
        driven = DrivenRunner(tiny_llama().to(device), weights)
        prompts = ((BASE_SLOT, 20), (0, 5), (1, 33))
        sequences = [driven.sequence(random_prompt(n, VOCAB_SIZE), slot) for slot, n in prompts]
        driven.generate(sequences, new_tokens=4, budget=9)
        logits.append([driven.logits_of(sequence).cpu() for sequence in sequences])
    for on_cpu, on_gpu in zip(*logits, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-3)


def _scaled(module: object, factor: float) -> object:
    from punica_core.lora.tables import ModuleWeights

    assert isinstance(module, ModuleWeights)
    return ModuleWeights(module.a * factor, module.b * factor, module.scale)


def test_the_base_products_of_few_rows_choose_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[int, set[int]] = {}

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        used.setdefault(weight.size(0), set()).add(torch.get_num_threads())
        return torch.nn.functional.linear(x, weight, bias)

    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "linear", noted)
    torch.set_num_threads(2)
    try:
        driven = DrivenRunner(tiny_llama())
        widths = {sum(group.out_features) for group in driven.loaded.groups} | {VOCAB_SIZE}
        sequence = driven.sequence(random_prompt(100, VOCAB_SIZE))
        driven.generate([sequence], new_tokens=1)
        assert used == {width: {2} for width in widths}  # many rows: torch's own way, on all
        driven.generate([sequence], new_tokens=4)
        assert used == {width: {1, 2} for width in widths}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
