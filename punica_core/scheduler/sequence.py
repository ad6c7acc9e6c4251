"""A sequence: what the scheduler runs for one `NewSequence`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from punica_core.kv.prefix_cache import PrefixChain
from punica_core.protocol import AdapterRef, NewSequence, SamplingParams, TokenLogprobs
from punica_core.scheduler.plan import BASE_SLOT, AdapterGrant


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned and mutated by the Scheduler alone; everyone else reads.

    token_ids: the prompt, then every generated token; num_computed of them have KV in `block_table`.
    Prefill and decode are descriptions, not phases: num_computed < num_prompt, or one token behind the end.

    serial: place in the order of arrival; a lower one is older.
    in_flight: the step that executes now uses its blocks and its adapter, so they stay held until `update` even if
    it ends before. admissions: how often it was started; more than once after a preemption.
    no_room_since: when its adapter was first found to have no room, while that lasts.
    chain: which of its blocks are published in the prefix cache.
    """

    request: NewSequence
    arrival: float
    token_ids: list[int]
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    grant: AdapterGrant | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    serial: int = 0
    in_flight: bool = False
    admissions: int = 0
    no_room_since: float | None = None
    chain: PrefixChain | None = None
    # The request's own values, read in every step.
    request_id: int = field(init=False)
    tenant: str = field(init=False)
    adapter: AdapterRef | None = field(init=False)
    sampling: SamplingParams = field(init=False)
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.tenant = self.request.tenant
        self.adapter = self.request.adapter
        self.sampling = self.request.sampling
        self.num_prompt = len(self.request.prompt_ids)

    @classmethod
    def of(cls, request: NewSequence, now: float) -> Sequence:
        """A sequence that arrives now."""
        return cls(request=request, arrival=now, token_ids=list(request.prompt_ids))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def slot(self) -> int:
        return self.grant.slot if self.grant else BASE_SLOT

    @property
    def adapter_key(self) -> str:
        return self.grant.adapter_key if self.grant else ""
