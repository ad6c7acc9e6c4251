"""A sequence: what the scheduler runs for one `NewSequence`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from punica_core.kv.prefix_cache import PrefixChain
from punica_core.protocol import AdapterRef, LogprobTable, NewSequence, SamplingParams
from punica_core.scheduler.plan import BASE_SLOT, AdapterGrant


def needs_known_tokens(sampling: SamplingParams) -> bool:
    """Whether the next token can be chosen only by who knows the ids of all tokens before it: penalties count them.

    Position is enough for all else: logit_bias, min_tokens, logprobs, seeds, temperature and its filters.
    """
    return sampling.has_penalties


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned and mutated by the Scheduler alone; everyone else reads.

    token_ids: the prompt, then every generated token; num_computed of them have KV in `block_table`.
    Prefill and decode are descriptions, not phases: num_computed < num_prompt, or one token behind the end.

    num_found: how many of them were in the prefix cache when it was last started; cached_tokens: when it was first.
    num_scheduled: tokens that are computed or that a step in flight computes. As many as there are in token_ids (or
    one more, while two steps are in flight): the next token is being sampled.
    in_flight: number of plans not yet updated that have a row of it; they use its blocks and its adapter, so these
    stay held until then even if it ends before.
    serial: place in the order of arrival; a lower one is older.
    prompt_logprobs: what was scored and not sent yet. num_scored: how many of the prompt's tokens behind the first were
    ever scored; what is computed again after a preemption is not scored again.
    admissions: how often it was started; more than once after a preemption.
    no_room_since: when its adapter was first found to have no room, while that lasts; if others made way for it, until
    it starts. goes_first: that they did (`WaitingQueue.put_first`).
    chain: which of its blocks are published in the prefix cache.
    follows: the sequence that computes tokens it would have to compute, and how many they are from the first on.
    """

    request: NewSequence
    arrival: float
    token_ids: list[int]
    num_computed: int = 0
    num_found: int = 0
    num_scheduled: int = 0
    block_table: tuple[int, ...] = ()
    status: Status = Status.WAITING
    grant: AdapterGrant | None = None
    cached_tokens: int = 0
    prompt_logprobs: LogprobTable = field(default_factory=LogprobTable)
    num_scored: int = 0
    serial: int = 0
    in_flight: int = 0
    admissions: int = 0
    no_room_since: float | None = None
    goes_first: bool = False
    chain: PrefixChain | None = None
    follows: tuple[Sequence, int] | None = None
    # The request's own values, read in every step.
    request_id: int = field(init=False)
    tenant: str = field(init=False)
    adapter: AdapterRef | None = field(init=False)
    sampling: SamplingParams = field(init=False)
    num_prompt: int = field(init=False)
    max_tokens: int = field(init=False)
    needs_known_tokens: bool = field(init=False)
    wants_prompt_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.tenant = self.request.tenant
        self.adapter = self.request.adapter
        self.sampling = self.request.sampling
        self.num_prompt = len(self.request.prompt_ids)
        self.max_tokens = self.sampling.max_tokens
        self.needs_known_tokens = needs_known_tokens(self.sampling)
        self.wants_prompt_logprobs = self.sampling.prompt_logprobs is not None

    @classmethod
    def of(cls, request: NewSequence, now: float, serial: int = 0) -> Sequence:
        """A sequence that arrives now."""
        return cls(request=request, arrival=now, token_ids=list(request.prompt_ids), serial=serial)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def goes_on(self) -> bool:
        """Whether the token that is sampled next is not known to be its last one."""
        return len(self.token_ids) + 1 < self.num_prompt + self.max_tokens

    @property
    def may_run_ahead(self) -> bool:
        """Whether a row may be planned for the token that a step in flight samples: its host need not know it, and
        the sequence is not known to end with it."""
        return not self.needs_known_tokens and self.goes_on

    @property
    def scores_prompt(self) -> bool:
        """Whether tokens of the prompt are still to be scored."""
        return self.wants_prompt_logprobs and self.num_scored + 1 < self.num_prompt

    @property
    def scores_next(self) -> bool:
        """Whether the tokens to be computed next need logits each, for the logprobs of the prompt: all but the first
        `num_scored_next`."""
        return self.scores_prompt and self.num_scheduled + 1 < self.num_prompt

    @property
    def num_scored_next(self) -> int:
        """How many of the tokens to be computed next had their logits before a preemption."""
        return max(self.num_scored - self.num_scheduled, 0)

    @property
    def slot(self) -> int:
        return self.grant.slot if self.grant else BASE_SLOT

    @property
    def adapter_key(self) -> str:
        return self.grant.adapter_key if self.grant else ""

    def is_overdue(self, since: float) -> bool:
        """Whether it has waited since that time, or others made way for it: nothing overtakes it then."""
        return self.goes_first or self.arrival <= since

    def begin(self, num_found: int) -> None:
        """It runs from now on, and so many tokens need not be computed."""
        self.status = Status.RUNNING
        self.no_room_since = None
        self.num_found = self.num_computed = self.num_scheduled = num_found

    def begin_again(self) -> None:
        """It waits again, with all its tokens and none of their KV."""
        self.status = Status.WAITING
        self.num_computed = self.num_scheduled = 0
        self.chain = None

    def take_prompt_logprobs(self) -> LogprobTable | None:
        """What is to be sent, which is not kept; None if it was not asked for."""
        taken, self.prompt_logprobs = self.prompt_logprobs, LogprobTable()
        return taken if self.wants_prompt_logprobs else None

    def check(self, block_size: int) -> None:
        """Assert that it holds exactly what its status entitles it to."""
        if self.status is not Status.RUNNING:
            assert not self.block_table
            assert self.grant is None
            assert self.num_computed == self.num_scheduled == self.in_flight == 0
            return
        assert (self.grant is None) == (self.adapter is None)
        assert self.num_scheduled <= len(self.block_table) * block_size
        assert self.num_computed < self.num_tokens
        assert (self.num_computed < self.num_scheduled) == (self.in_flight > 0)
        assert self.num_scheduled < self.num_tokens + self.in_flight
