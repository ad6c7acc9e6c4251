"""Penalties, bias and min_tokens against their definitions and against Hugging Face's processors."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from punica_core.engine import logit_edits, sampler
from punica_core.engine.logit_edits import EditCollector, LogitEdits, TokenHistory, apply_edits
from punica_core.engine.sampler import Sampler
from punica_core.protocol import SamplingParams
from punica_core.scheduler.plan import RowPlan
from tests.support.sampling import next_row, sampling_row, token_ids

VOCAB_SIZE = 200


def some_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3


def edited(
    logits: torch.Tensor,
    rows: list[RowPlan],
    collector: EditCollector | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> torch.Tensor:
    scores = logits.clone()
    edits = (collector or EditCollector(eos_token_ids)).collect(rows, logits.shape[-1])
    if edits is not None:
        apply_edits(scores, edits.on(scores.device))
    return scores


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_equals_that_of_transformers(penalty: float) -> None:
    logits = some_logits(1)
    row = sampling_row(prompt=[5, 6, 5, 9], generated=[11, 6, 150], repetition_penalty=penalty)
    ids = torch.tensor([row.sequence.token_ids])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    assert torch.equal(edited(logits, [row]), expected)
    assert not torch.equal(expected, logits)


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = some_logits(1)
    row = sampling_row(prompt=[5, 5, 5, 7], generated=[7, 8, 8, 8], presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.clone()
    expected[0, 7] -= 0.5 + 0.25 * 1
    expected[0, 8] -= 0.5 + 0.25 * 3
    torch.testing.assert_close(edited(logits, [row]), expected, rtol=0, atol=1e-6)


def test_each_row_is_penalised_for_its_own_tokens() -> None:
    logits = some_logits(4)
    rows = [
        sampling_row(0, generated=[20], frequency_penalty=1.0),
        sampling_row(1, generated=[21]),
        sampling_row(2, generated=[22, 22], frequency_penalty=2.0),
        sampling_row(3, prompt=[23], repetition_penalty=2.0),
    ]
    together = edited(logits, rows)
    alone = torch.cat([edited(logits[b : b + 1], [row]) for b, row in enumerate(rows)])
    assert torch.equal(together, alone)
    assert (together != logits).sum(dim=-1).tolist() == [1, 0, 1, 1]


def test_penalties_keep_minus_infinity() -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    row = sampling_row(generated=[4], repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0)
    assert torch.equal(edited(logits, [row]), logits)


def test_penalties_over_many_steps_equal_those_from_scratch() -> None:
    """The kept history: growing, dropped for some steps, and a request_id used again."""
    generator = torch.Generator().manual_seed(2)
    settings = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.2}
    live = [sampling_row(i, prompt=range(i, i + 90), **settings).sequence for i in range(3)]
    collector = EditCollector([])
    for step in range(60):
        if step == 30:
            live[1] = sampling_row(1, prompt=[199, 3], **settings).sequence
        for sequence in live:
            sequence.token_ids.append(int(torch.randint(VOCAB_SIZE, (), generator=generator)))
        rows = [next_row(sequence) for i, sequence in enumerate(live) if i != 2 or not 10 <= step < 20]
        logits = some_logits(len(rows))
        assert torch.equal(edited(logits, rows, collector), edited(logits, rows))
    assert collector.num_histories == 3
    edited(some_logits(1), [next_row(live[0])], collector)
    assert collector.num_histories == 1


@pytest.mark.parametrize("with_prompt", [False, True])
@pytest.mark.parametrize("at_once", [False, True], ids=["token by token", "after a preemption"])
def test_a_history_holds_every_token_once_with_its_count(with_prompt: bool, at_once: bool) -> None:
    choose = random.Random(3)
    prompt = [choose.randrange(500) for _ in range(300)]
    tokens = prompt + [choose.randrange(900) for _ in range(700)]
    history = TokenHistory(tokens, len(prompt), with_prompt=with_prompt)
    for length in [len(tokens)] if at_once else range(len(prompt), len(tokens) + 1):
        history.extend(tokens, length)
    counts = Counter(tokens[len(prompt) :])
    known = set(counts) | (set(prompt) if with_prompt else set())
    assert sorted(history.ids.tolist()) == sorted(known)
    assert dict(zip(history.ids.tolist(), history.generated.tolist(), strict=True)) == {t: counts[t] for t in known}


def test_a_prompt_is_read_only_for_those_whose_penalty_looks_at_it() -> None:
    rows = [
        sampling_row(0, prompt=range(100), generated=[150], presence_penalty=1.0, frequency_penalty=1.0),
        sampling_row(1, prompt=range(100), generated=[150], repetition_penalty=1.1),
    ]
    edits = EditCollector([]).collect(rows, VOCAB_SIZE)
    assert edits is not None
    assert edits.penalties is not None
    assert Counter(edits.penalties.at.tolist()) == {0: 1, 1: 101}


def test_bias_is_added_and_foreign_ids_are_ignored() -> None:
    logits = some_logits(2)
    scores = edited(logits, [sampling_row(logit_bias={3: 2.5, 150: -100.0, VOCAB_SIZE: 9.0, -1: 9.0}), sampling_row(1)])
    expected = logits.clone()
    expected[0, 3] += 2.5
    expected[0, 150] -= 100.0
    assert torch.equal(scores, expected)


def test_bias_moves_the_choice() -> None:
    logits = some_logits(2)
    rows = [sampling_row(0, logit_bias={77: 100.0}), sampling_row(1)]
    assert token_ids(Sampler(VOCAB_SIZE, [], 0), logits, rows) == [77, int(logits[1].argmax())]


@pytest.mark.parametrize("generated", [0, 1, 2, 3, 4])
def test_min_tokens_equals_that_of_transformers(generated: int) -> None:
    logits, prompt = some_logits(1), [1, 2]
    row = sampling_row(prompt=prompt, generated=[9] * generated, min_tokens=3)
    scores = edited(logits, [row], eos_token_ids=(10, 11))
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), 3, [10, 11], device="cpu")
    assert torch.equal(scores, processor(torch.tensor([row.sequence.token_ids]), logits.clone()))
    assert bool(torch.isinf(scores).any()) == (generated < 3)


@pytest.mark.parametrize(
    ("sampling", "masked"),
    [
        ({}, [10, 11]),
        ({"ignore_eos": True}, []),
        ({"stop_token_ids": (50,)}, [10, 11, 50]),
        ({"ignore_eos": True, "stop_token_ids": (50,)}, [50]),
        ({"stop_token_ids": (VOCAB_SIZE + 5,)}, [10, 11]),
    ],
)
def test_min_tokens_masks_the_ids_that_would_stop(sampling: dict[str, object], masked: list[int]) -> None:
    scores = edited(some_logits(1), [sampling_row(min_tokens=1, **sampling)], eos_token_ids=(10, 11))
    assert torch.isinf(scores[0]).nonzero().squeeze(-1).tolist() == masked


def test_a_stop_id_is_not_chosen_before_min_tokens() -> None:
    logits = torch.zeros(60, VOCAB_SIZE)
    logits[:, 10] = 9.0
    sampler = Sampler(VOCAB_SIZE, [10], 0)
    held = [sampling_row(i, seed=i, temperature=1.0, min_tokens=1) for i in range(60)]
    free = [sampling_row(i, seed=i, temperature=1.0) for i in range(60)]
    assert 10 not in token_ids(sampler, logits, held)
    assert 10 in token_ids(sampler, logits, free)


def test_a_bias_does_not_unmask_a_stop_id() -> None:
    row = sampling_row(min_tokens=1, logit_bias={10: 50.0, 12: 1.0})
    logits = some_logits(1)
    scores = edited(logits, [row], eos_token_ids=(10,))
    assert scores[0, 10] == -torch.inf
    assert scores[0, 12] == logits[0, 12] + 1


def test_biases_over_many_steps_equal_those_from_scratch_and_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is kept of a row: until min_tokens are there, while it has a row, and while its request_id is its own."""
    looked_at: list[int] = []
    own_entries = logit_edits._own_entries

    def counted(sampling: SamplingParams, *arguments: Any, **masked: Any) -> Any:
        looked_at.append(len(sampling.logit_bias))
        return own_entries(sampling, *arguments, **masked)

    live = [
        sampling_row(0, min_tokens=10, logit_bias={5: 1.0, 10: 9.0}).sequence,
        sampling_row(1, logit_bias={token: 0.5 for token in range(50, 150)}).sequence,
        sampling_row(2, logit_bias={VOCAB_SIZE: 1.0}).sequence,
        sampling_row(3).sequence,
    ]
    collector = EditCollector([10])
    for step in range(20):
        if step == 5:
            live[1] = sampling_row(1, logit_bias={7: -1.0}).sequence
        rows = [next_row(sequence) for sequence in live if sequence is not live[0] or step != 15]
        logits = some_logits(len(rows))
        expected = edited(logits, rows, eos_token_ids=(10,))
        with monkeypatch.context() as patch:
            patch.setattr(logit_edits, "_own_entries", counted)
            assert torch.equal(edited(logits, rows, collector), expected)
        assert not torch.equal(expected, logits)
        for sequence in live:
            sequence.token_ids.append(3)
    assert sorted(looked_at) == [1, 1, 2, 2, 2, 100]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_edits_hide_no_number_that_is_unusable(value: float) -> None:
    logits = some_logits(2)
    logits[:, [4, 10]] = value
    rows = [
        sampling_row(0, min_tokens=1, logit_bias={4: -100.0}),
        sampling_row(1, generated=[4, 10], repetition_penalty=2.0, presence_penalty=1.0),
    ]
    scores = edited(logits, rows, eos_token_ids=(10,))
    assert not (scores[:, [4, 10]] < torch.inf).any()


def test_edits_are_where_the_scores_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose sampler runs in plain torch."""
    seen: list[LogitEdits[torch.Tensor]] = []
    monkeypatch.setattr(sampler, "apply_edits", lambda scores, edits: seen.append(edits))
    row = sampling_row(generated=[4], repetition_penalty=1.5, presence_penalty=1.0, logit_bias={7: 1.0})
    Sampler(VOCAB_SIZE, [], seed=0)._scores(some_logits(1).to("meta"), [row])
    (edits,) = seen
    assert edits.penalties is not None
    assert edits.added is not None
    assert {array.device.type for array in edits.arrays()} == {"meta"}
