"""From a step's plan to what the model is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from punica_core.lora.plan import Segment, build_segments
from punica_core.lora.weights import AdapterWeights
from punica_core.model.attention import KVRow
from punica_core.scheduler.plan import RowPlan, StepPlan


@dataclass(frozen=True, slots=True)
class LogitsRange:
    """A row's part of the logits: [first, first + count). A row that samples has its next token's logits last."""

    row: RowPlan
    first: int
    count: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1


@dataclass(frozen=True, slots=True)
class StepInputs:
    """input_ids, position_ids: [1, T], packed in the plan's order. logit_rows: [n], the rows that need logits.

    logits: whose they are, in order. kv_rows: the rows as attention sees them. segments: as LoRA sees them;
    logit_segments: those of logit_rows.
    """

    input_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    logits: tuple[LogitsRange, ...]
    kv_rows: tuple[KVRow, ...]
    segments: tuple[Segment, ...]
    logit_segments: tuple[Segment, ...]


def build_inputs(plan: StepPlan, weights_of: Callable[[int], AdapterWeights], device: torch.device) -> StepInputs:
    """The inputs of a plan with at least one row, on `device`. `weights_of` gives the adapter in a slot."""
    ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    logits: list[LogitsRange] = []
    kv_rows: list[KVRow] = []
    for row in plan.rows:
        first, end = len(ids), row.start + row.count
        ids += row.sequence.token_ids[row.start : end]
        positions += range(row.start, end)
        kv_rows.append(KVRow(first, row.start, row.count, row.block_table))
        wanted = wanted_logits(row)
        if wanted:
            logits.append(LogitsRange(row, len(logit_rows), wanted))
            logit_rows += range(first + row.count - wanted, first + row.count)
    segments = build_segments(((row.slot, row.count) for row in plan.rows), weights_of)
    return StepInputs(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.long, device=device),
        logits=tuple(logits),
        kv_rows=tuple(kv_rows),
        segments=segments,
        logit_segments=build_segments(((p.row.slot, p.count) for p in logits), weights_of) if segments else (),
    )


def scored_prompt_tokens(row: RowPlan) -> list[int]:
    """Prompt tokens whose log-probabilities this chunk's logits give, if asked for: those at start + 1 and on, without
    any that were scored before a preemption."""
    if row.sequence.sampling.prompt_logprobs is None:
        return []
    end = min(row.start + row.count + 1, row.sequence.num_prompt)
    return row.sequence.token_ids[_first_scored(row) + 1 : end]


def _first_scored(row: RowPlan) -> int:
    # Steps in flight do not change it: what they score lies before the start of every row behind them.
    return max(row.start, row.sequence.num_scored)


def samples_token(row: RowPlan) -> bool:
    """Whether a next token is wanted: a request with max_tokens 0 only wants its prompt scored."""
    return row.samples and row.sequence.sampling.max_tokens > 0


def wanted_logits(row: RowPlan) -> int:
    """How many of the row's last tokens need logits."""
    if scored_prompt_tokens(row):
        return row.start + row.count - _first_scored(row)
    return 1 if samples_token(row) else 0
