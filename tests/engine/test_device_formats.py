"""Adapters in every format through packed tables and the ops: what the plain runner computes, which is PEFT's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from punica_core.engine.graphs import GraphKey, GraphSizes
from punica_core.lora.vocabulary_step import VocabularyStep
from punica_core.lora.weights import AdapterWeights
from punica_core.scheduler.plan import BASE_SLOT
from tests.support.adapter_formats import BASES, LAYERS, PHI3, PROMPT, VOCABULARY, load_for
from tests.support.driven_device_runner import DrivenDeviceRunner
from tests.support.driven_runner import DrivenRunner, random_prompt
from tests.support.peft_adapters import save_peft_adapter

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
NEW_TOKENS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def saved(root: Path, base: str, configs: Mapping[str, dict[str, Any]]) -> dict[int, AdapterWeights]:
    """An adapter of each config, by slot."""
    loaded = DrivenRunner(BASES[base]()).loaded
    found = {}
    for slot, (name, config) in enumerate(configs.items()):
        folder = root / base / name
        if not folder.exists():
            save_peft_adapter(folder, BASES[base](), seed=slot + 1, **config)
        found[slot] = load_for(loaded, folder)
    return found


def prompt_of(index: int, vocab_size: int) -> list[int]:
    """Of its own length, with the tokens that some adapters have trained."""
    return [*PROMPT, *random_prompt(1 + 3 * index, vocab_size)]


def generated(driven: DrivenRunner, slots: list[int], budget: int = 1000) -> list[tuple[list[int], Tensor]]:
    vocab_size = driven.loaded.vocab_size
    sequences = [driven.sequence(prompt_of(index, vocab_size), slot) for index, slot in enumerate(slots)]
    driven.generate(sequences, NEW_TOKENS, budget)
    return [(sequence.token_ids, driven.logits_of(sequence)) for sequence in sequences]


@pytest.mark.parametrize("configs", [LAYERS, VOCABULARY], ids=["layers", "vocabulary"])
@pytest.mark.parametrize("base", ["llama", "llama, tied", "qwen2, tied", "gemma2, tied"])
def test_every_format_is_what_the_plain_runner_computes(
    base: str, configs: Mapping[str, dict[str, Any]], root: Path
) -> None:
    check_equal(base, saved(root, base, configs), budget=7)


def test_formats_of_a_base_with_fused_linears_are_too(root: Path) -> None:
    check_equal("phi3", saved(root, "phi3", PHI3), budget=1000)


def check_equal(base: str, adapters: dict[int, AdapterWeights], budget: int) -> None:
    slots = [BASE_SLOT, *adapters]
    expected = generated(DrivenRunner(BASES[base](), adapters), slots)
    plain = DrivenRunner(BASES[base]())
    found = generated(DrivenDeviceRunner(BASES[base](), adapters), slots, budget)
    for index, ((tokens, logits), (right_tokens, right_logits)) in enumerate(zip(found, expected, strict=True)):
        assert tokens == right_tokens
        torch.testing.assert_close(logits, right_logits, **TOLERANCE)
        if slots[index] != BASE_SLOT:
            alone = plain.sequence(right_tokens[: len(right_tokens) - NEW_TOKENS])
            plain.step([alone])
            assert float((plain.logits_of(alone)[0] - logits[0]).abs().max()) > 0.01, "the adapter does nothing"


def test_rows_of_the_base_keep_their_bits_beside_any_of_them(root: Path) -> None:
    adapters = saved(root, "llama", VOCABULARY)
    driven = DrivenDeviceRunner(BASES["llama"](), adapters)
    alike = DrivenDeviceRunner(BASES["llama"](), adapters)
    found = generated(driven, [BASE_SLOT, *adapters])[0]
    expected = generated(alike, [BASE_SLOT] * (1 + len(adapters)))[0]
    assert found[0] == expected[0]
    # One step of prompts: later ones may differ in shape only if tokens did.
    assert torch.equal(found[1], expected[1])


def test_prompts_are_scored_with_each_rows_own_head(root: Path) -> None:
    adapters = saved(root, "llama", VOCABULARY)
    names = list(VOCABULARY)
    slots = [names.index("LoRA on both"), BASE_SLOT, names.index("saved head and embedding"), names.index("token rows")]
    scores = []
    for driven in (DrivenRunner(BASES["llama"](), adapters), DrivenDeviceRunner(BASES["llama"](), adapters)):
        sequences = [driven.sequence(prompt_of(2, 512), slot, prompt_logprobs=1) for slot in slots]
        found = driven.step(sequences).prompt_logprobs
        scores.append([[entry.logprob for entry in found[s.request_id]] for s in sequences])
    torch.testing.assert_close(torch.tensor(scores[1]), torch.tensor(scores[0]), **TOLERANCE)
    rows = torch.tensor(scores[0])
    for one in range(len(slots)):
        for other in range(one):
            assert float((rows[one] - rows[other]).abs().max()) > 0.01, "another row's head would not show"


class RecordingGraphs:
    """Stands where captured steps stand: notes what would be replayed, which yields zeros."""

    def __init__(self, vocab_size: int) -> None:
        self.sizes = GraphSizes(decode=(4,), mixed=(0, 4), prompt_rows=(16,))
        self.keys: list[GraphKey] = []
        self._vocab_size = vocab_size

    def replay(self, key: GraphKey) -> Tensor:
        self.keys.append(key)
        return torch.zeros(key.sizes.num_logits, self._vocab_size)


def test_only_steps_with_such_adapters_leave_the_graphs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = saved(root, "llama", {"DoRA": LAYERS["DoRA"], "saved head": VOCABULARY["saved head"]})
    driven = DrivenDeviceRunner(BASES["llama"](), adapters)
    plain, changed = driven.sequence(PROMPT, 0), driven.sequence(PROMPT, 1)
    driven.step([plain, changed])
    graphs = RecordingGraphs(driven.loaded.vocab_size)
    driven.runner.graphs = graphs  # type: ignore[assignment]
    begun = []
    begin = VocabularyStep.begin
    monkeypatch.setattr(VocabularyStep, "begin", lambda *arguments: (begun.append(1), begin(*arguments)))
    driven.step([plain])
    assert (len(graphs.keys), len(begun)) == (1, 0)
    driven.step([plain, changed])
    assert (len(graphs.keys), len(begun)) == (1, 1)
    driven.step([plain, driven.sequence(PROMPT, 0)])
    assert (len(graphs.keys), len(begun)) == (2, 1)
    driven.step([plain, driven.sequence(PROMPT, 1)])
    assert (len(graphs.keys), len(begun)) == (2, 2)


def test_the_hooks_are_taken_off_after_a_step_that_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = saved(root, "llama", {"both": VOCABULARY["LoRA on both"]})
    driven = DrivenDeviceRunner(BASES["llama"](), adapters)

    def fail(*arguments: object) -> None:
        raise RuntimeError("an illegal access")

    with monkeypatch.context() as patch:
        patch.setattr(VocabularyStep, "product", fail)
        with pytest.raises(RuntimeError, match="illegal access"):
            driven.step([driven.sequence(PROMPT, 0)])
    contexts = (driven.loaded.head_lora.table_step, driven.loaded.embedding_lora.step, driven.loaded.lora.table_step)
    assert contexts == (None, None, None)
    assert not driven.step([driven.sequence(PROMPT)]).failed
