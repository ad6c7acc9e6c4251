"""The values a step is made of: what the scheduler decided, what the runner produced, why something must wait.

plan = scheduler.schedule(now)            pure: decides
step = runner.launch(plan)                torch: executes, changes no policy state
outputs = scheduler.update(plan, step.result(), now)
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from punica_core.protocol import AdapterRef, TokenLogprobs
    from punica_core.scheduler.sequence import Sequence

BASE_SLOT = -1
"""Slot of rows without an adapter."""


class SkipReason(enum.StrEnum):
    """Why a waiting sequence did not run in a step; also a metric label."""

    NO_TOKENS = "no_tokens"
    NO_SEATS = "no_seats"
    NO_BLOCKS = "no_blocks"
    PREFIX_COMPUTING = "prefix_computing"
    ADAPTER_LOADING = "adapter_loading"
    ADAPTER_NO_ROOM = "adapter_no_room"
    TENANT_LIMIT = "tenant_limit"
    GRAMMAR_COMPILING = "grammar_compiling"


@dataclass(frozen=True, slots=True)
class AdapterGrant:
    """A pinned, resident adapter: it stays in `slot` until released.

    adapter_key: digest of the content, the identity used by the prefix cache.
    """

    slot: int
    adapter_key: str


class Residency(Protocol):
    """What the scheduler may ask of the adapter cache. None of these block."""

    def acquire(self, ref: AdapterRef) -> AdapterGrant | SkipReason:
        """Pin the adapter if it is resident. Otherwise start (or continue) bringing it in and say why not yet:
        ADAPTER_LOADING, or ADAPTER_NO_ROOM when pinned adapters hold all the bytes."""

    def has(self, ref: AdapterRef) -> bool:
        """Whether `acquire` would pin it now."""

    def fits_without(self, ref: AdapterRef, others: Collection[AdapterRef]) -> bool:
        """Whether an adapter that `acquire` has no room for would find some if nobody used `others`."""

    def prefetch(self, soonest: Iterable[AdapterRef], wanted: Collection[AdapterRef]) -> None:
        """Bring in adapters that will be wanted, the soonest first, as far as that costs nobody anything: not the place
        of one that is in use or `wanted`, and no more than a share of the memory for what nobody uses yet."""

    def release(self, ref: AdapterRef) -> None:
        """Undo one successful `acquire`."""


class RowPlan(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: compute tokens [start, start + count) of it.

    sequence: read only; `sequence.token_ids[start:start + count]` are the inputs.
    block_table: ids of the KV blocks that cover tokens [0, start + count).
    The same object as in the step before unless a block was added.
    slot: row of the adapter in the device tables, BASE_SLOT for the base model.
    samples: these tokens reach the end of the sequence, so a next token is to be sampled.
    pending: the one input token is not in `sequence.token_ids` yet: it is what the step launched just before this one
    samples for this sequence.
    """

    sequence: Sequence
    start: int
    count: int
    block_table: tuple[int, ...]
    slot: int
    samples: bool
    pending: bool = False


class StepWork(msgspec.Struct, frozen=True, gc=False):
    """What the time of a step depends on.

    decode_rows: rows of one token. prompt_rows: tokens of the `prompts` longer ones together. attended: for each of
    these tokens, how many it attends to, itself included; their sum.
    """

    decode_rows: int = 0
    prompt_rows: int = 0
    prompts: int = 0
    attended: int = 0

    def with_prompt(self, start: int, count: int) -> StepWork:
        """And tokens [start, start + count) of one more sequence."""
        attended = self.attended + attended_tokens(start, count)
        return StepWork(self.decode_rows, self.prompt_rows + count, self.prompts + 1, attended)


NO_WORK = StepWork()


def attended_tokens(start: int, count: int) -> int:
    """The sum of how many tokens each of [start, start + count) attends to, itself included."""
    return count * start + count * (count + 1) // 2


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows in order of slot, so that the rows of one adapter are adjacent. An empty plan means nothing can run.

    work: what the scheduler counted of the rows.
    """

    rows: tuple[RowPlan, ...] = ()
    work: StepWork = NO_WORK

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The next token of a sequence; logprobs if it asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What executing a plan produced, by request_id.

    sampled: one entry for every row with `samples` (and max_tokens > 0).
    prompt_logprobs: for rows whose sequence asked for them, entries for the prompt positions of this chunk that were
    not scored before: entry i belongs to position max(start, num_scored) + 1 + i and exists while that position is
    inside the prompt.
    failed: rows whose numbers are unusable (non-finite logits): message by request_id; they end with an error.
    """

    sampled: dict[int, SampledToken] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class PendingStep(Protocol):
    """A step that was launched and may still execute."""

    def result(self) -> StepResult:
        """Block until the device is done. Raises what executing raised. Called once."""


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that was executed when it was launched."""

    completed: StepResult

    def result(self) -> StepResult:
        return self.completed
