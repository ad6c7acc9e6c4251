"""A `ModelRunner` driven by hand: sequences with blocks of their own, steps of any mix, every logit recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from punica_core.config import BLOCK_SIZE
from punica_core.engine.runner import ModelRunner, allocate_kv_cache
from punica_core.lora.weights import AdapterWeights
from punica_core.model.loader import LoadedModel, prepare
from punica_core.protocol import NewSequence, SamplingParams, TokenLogprobs
from punica_core.scheduler.plan import BASE_SLOT, RowPlan, SampledToken, StepPlan, StepResult
from punica_core.scheduler.sequence import Sequence as Running

BLOCKS_EACH = 8


class RecordingSampler:
    """Greedy; keeps the logits that each sequence's tokens were chosen from: request_id → rows of [V]."""

    def __init__(self) -> None:
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.prompt_scores: list[tuple[list[int], int]] = []

    def sample(self, logits: torch.Tensor, rows: Sequence[RowPlan]) -> list[SampledToken]:
        for row, scores in zip(rows, logits, strict=True):
            self.logits.setdefault(row.sequence.request_id, []).append(scores.clone())
        return [SampledToken(int(token)) for token in logits.argmax(-1)]

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: list[int], top: int) -> list[TokenLogprobs]:
        self.prompt_scores.append((token_ids, top))
        scores = logits.log_softmax(-1)
        return [TokenLogprobs(token, float(scores[i, token])) for i, token in enumerate(token_ids)]


def random_prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Token ids above the special ones."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


class DrivenRunner:
    """The runner of a base model (changed in place) and of adapters by slot."""

    def __init__(
        self, base: PreTrainedModel, adapters: Mapping[int, AdapterWeights] | None = None, max_sequences: int = 16
    ) -> None:
        self.loaded: LoadedModel = prepare(base, Path("."), base.config.max_position_embeddings)
        self.adapters = dict(adapters or {})
        self.sampler = RecordingSampler()
        self.kv_cache = allocate_kv_cache(self.loaded, max_sequences * BLOCKS_EACH)
        self.runner = ModelRunner(self.loaded, self.kv_cache, lambda slot: self.adapters[slot], self.sampler)
        self.slots: dict[int, int] = {}
        self.forget()

    def forget(self) -> None:
        """Begin anew, without sequences and their logits."""
        self.slots.clear()
        self.sampler.logits.clear()
        # Whatever lay in the memory before must not matter.
        self.kv_cache.fill_(float("nan"))

    def sequence(self, prompt_ids: Sequence[int], slot: int = BASE_SLOT, **sampling: int) -> Running:
        """A new sequence with blocks that nobody else has, in no particular order."""
        request_id = len(self.slots)
        params = SamplingParams(**({"max_tokens": 100} | sampling))
        sequence = Running.of(NewSequence(request_id=request_id, prompt_ids=list(prompt_ids), sampling=params), 0.0)
        first = request_id * BLOCKS_EACH
        sequence.block_table = list(range(first + BLOCKS_EACH - 1, first - 1, -1))
        self.slots[request_id] = slot
        return sequence

    def row(self, sequence: Running, budget: int) -> RowPlan:
        count = min(budget, sequence.num_tokens - sequence.num_computed)
        end = sequence.num_computed + count
        return RowPlan(
            sequence=sequence,
            start=sequence.num_computed,
            count=count,
            block_table=tuple(sequence.block_table[: -(-end // BLOCK_SIZE)]),
            slot=self.slots[sequence.request_id],
            samples=end == sequence.num_tokens,
        )

    def step(self, sequences: Sequence[Running], budget: int = 1000) -> StepResult:
        """Compute up to `budget` tokens of each sequence; sampled tokens are appended."""
        ordered = sorted(sequences, key=lambda sequence: self.slots[sequence.request_id])
        plan = StepPlan(tuple(self.row(sequence, budget) for sequence in ordered))
        result = self.runner.execute(plan)
        for row in plan.rows:
            row.sequence.num_computed += row.count
            if row.sequence.request_id in result.sampled:
                row.sequence.token_ids.append(result.sampled[row.sequence.request_id].token_id)
        return result

    def generate(self, sequences: Sequence[Running], new_tokens: int, budget: int = 1000) -> None:
        """Step until each sequence has `new_tokens` more."""
        while todo := [s for s in sequences if s.num_generated < new_tokens]:
            result = self.step(todo, budget)
            assert not result.failed, result.failed

    def logits_of(self, sequence: Running) -> torch.Tensor:
        """[generated, V]: the logits that each generated token was chosen from."""
        return torch.stack(self.sampler.logits[sequence.request_id])
