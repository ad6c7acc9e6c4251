"""A scheduler with a model small enough to be checked by hand around it.

The model's KV of a token is a digest of (adapter, tenant, all tokens up to it), and its next token a function of the
KV that it reads back through the block table. So a wrong, stale or foreign block changes what is generated, or fails
at once. The token of a sequence with penalties depends on the tokens that the host knew when the step was launched,
too: if one was missing, another token comes out.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from punica_core.kv.block_pool import BlockPool
from punica_core.kv.prefix_cache import PrefixCache
from punica_core.protocol import (
    AdapterRef,
    NewSequence,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
)
from punica_core.scheduler.limits import SchedulerLimits
from punica_core.scheduler.long_prompts import LongPrompts
from punica_core.scheduler.pacing import Pacer
from punica_core.scheduler.plan import RowPlan, SampledToken, StepPlan, StepResult, StepWork
from punica_core.scheduler.scheduler import Scheduler
from punica_core.scheduler.sequence import Sequence
from tests.support.residency import FakeResidency, key_of

BLOCK_SIZE = 4
VOCAB_SIZE = 50
EOS = 49


def new_sequence(
    request_id: int,
    prompt: int | Iterable[int] = 6,
    *,
    max_tokens: int = 4,
    adapter: AdapterRef | None = None,
    tenant: str = "",
    **sampling: object,
) -> NewSequence:
    """A sequence; an int as prompt means that many tokens, different for every request_id."""
    ids = [(request_id * 7 + i * 3) % (VOCAB_SIZE - 1) for i in range(prompt)] if isinstance(prompt, int) else prompt
    return NewSequence(
        request_id=request_id,
        prompt_ids=list(ids),
        sampling=SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **sampling}),  # type: ignore[arg-type]
        adapter=adapter,
        tenant=tenant,
    )


def expected_tokens(request: NewSequence) -> list[int]:
    """What the model generates for `request` alone, a stop id that ends it included."""
    tokens = list(request.prompt_ids)
    for generated in range(1, request.sampling.max_tokens + 1):
        kv = _kv(key_of(request.adapter), request.tenant, tokens)
        tokens.append(_next_token(kv, request.sampling, tokens))
        if tokens[-1] in request.sampling.stop_token_ids and generated > request.sampling.min_tokens:
            break
    return tokens[len(request.prompt_ids) :]


class FakeStep:
    """A step in the queue of the fake device. It sees what the host knew when it was launched, and no more."""

    def __init__(self, model: FakeModel, plan: StepPlan) -> None:
        self.plan = plan
        self.known = [row.sequence.token_ids[: row.start + row.count] for row in plan.rows]
        self.executed: StepResult | None = None
        self._model = model

    def result(self) -> StepResult:
        """The device works in order: the steps before this one are executed first."""
        while self.executed is None:
            self._model.advance()
        return self.executed


class FakeModel:
    """Executes plans on KV digests, and checks that every block read holds what it must.

    sampled: the next tokens that the last executed step chose, from where a pending row takes its input.
    """

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        self.memory: dict[tuple[int, int], str] = {}
        self.block_size = block_size
        self.queue: deque[FakeStep] = deque()
        self.sampled: dict[Sequence, int] = {}

    def launch(self, plan: StepPlan) -> FakeStep:
        """Queue a step behind those that were launched before."""
        self.queue.append(FakeStep(self, plan))
        return self.queue[-1]

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def advance(self) -> None:
        """Execute the oldest step in the queue."""
        step = self.queue.popleft()
        inputs = [self._inputs(row, known) for row, known in zip(step.plan.rows, step.known, strict=True)]
        result = StepResult()
        written: set[tuple[int, int]] = set()
        for row, tokens in zip(step.plan.rows, inputs, strict=True):
            written |= self._compute(row, tokens, written)
        self.sampled = {}
        for row, known in zip(step.plan.rows, step.known, strict=True):
            sequence = row.sequence
            if sequence.sampling.prompt_logprobs is not None:
                stop = min(row.start + row.count, sequence.num_prompt - 1)
                result.prompt_logprobs[sequence.request_id] = [
                    TokenLogprobs(token_id=sequence.token_ids[position + 1], logprob=-1.0)
                    for position in range(max(row.start, sequence.num_scored), stop)
                ]
            if row.samples and sequence.sampling.max_tokens > 0:
                last = self.memory[self._place(row, row.start + row.count - 1)]
                token = self.sampled[sequence] = _next_token(last, sequence.sampling, known)
                logprobs = TokenLogprobs(token, -2.0) if sequence.sampling.logprobs is not None else None
                result.sampled[sequence.request_id] = SampledToken(token, logprobs)
        step.executed = result

    def _inputs(self, row: RowPlan, known: list[int]) -> list[int]:
        """All tokens up to the row's end."""
        if not row.pending:
            assert len(known) == row.start + row.count, "an input token is not known"
            return known
        assert row.count == 1
        assert len(known) == row.start, "the pending token is known, or an older one is not"
        assert row.sequence in self.sampled, "the step before has not sampled the pending token"
        return [*known, self.sampled[row.sequence]]

    def _place(self, row: RowPlan, position: int) -> tuple[int, int]:
        return row.block_table[position // self.block_size], position % self.block_size

    def _compute(self, row: RowPlan, tokens: list[int], written: set[tuple[int, int]]) -> set[tuple[int, int]]:
        key, tenant = key_of(row.sequence.adapter), row.sequence.request.tenant
        for position in range(row.start):
            held = self.memory.get(self._place(row, position))
            wanted = _kv(key, tenant, tokens[: position + 1])
            assert held == wanted, f"request {row.sequence.request_id} reads foreign KV at {position}"
        places = {self._place(row, position) for position in range(row.start, row.start + row.count)}
        assert len(places) == row.count
        assert not places & written, "two rows of one step write the same KV"
        for position in range(row.start, row.start + row.count):
            self.memory[self._place(row, position)] = _kv(key, tenant, tokens[: position + 1])
        return places


@dataclass
class Rig:
    """Scheduler, model and clock. `run` steps until idle; everything a client would see is in `outputs`.

    seconds_of: what a step takes; without, all take step_seconds. step_times: what the steps of `step` took.
    """

    limits: SchedulerLimits
    pool: BlockPool
    cache: PrefixCache | None
    residency: FakeResidency
    scheduler: Scheduler
    model: FakeModel
    now: float = 0.0
    step_seconds: float = 0.1
    seconds_of: Callable[[StepWork], float] | None = None
    step_times: list[float] = field(default_factory=list)
    outputs: dict[int, list[SequenceOutput]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    started: dict[int, float] = field(default_factory=dict)

    def add(self, *requests: NewSequence) -> None:
        for request in requests:
            self.outputs[request.request_id] = []
            self.scheduler.add(request, self.now)

    def cancel(self, request_id: int) -> SequenceOutput | None:
        output = self.scheduler.cancel(request_id, self.now)
        self._emit([output])
        return output

    def step(self) -> StepPlan:
        """schedule, execute, update, and the time that takes."""
        plan = self.scheduler.schedule(self.now)
        assert self.scheduler.waiting_by_reason.total() == self.scheduler.stats().waiting, "not one reason for each"
        self.record(plan)
        result = self.model.execute(plan)
        self.step_times.append(self.step_seconds if self.seconds_of is None else self.seconds_of(plan.work))
        self.now += self.step_times[-1]
        self.scheduler.measured(plan, self.step_times[-1])
        self.finish(plan, result)
        return plan

    def record(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        for row in plan.rows:
            self.started.setdefault(row.sequence.request_id, self.now)
        self.scheduler.check()

    def finish(self, plan: StepPlan, result: StepResult) -> None:
        self._emit(self.scheduler.update(plan, result, self.now))
        self.residency.advance()
        self.scheduler.check()

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                return
            self.step()
        raise AssertionError(f"still unfinished after {max_steps} steps: {self.scheduler.waiting_by_reason}")

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def end(self, request_id: int) -> SequenceOutput:
        """The terminal output of a request; there must be exactly one and nothing after it."""
        outputs = self.outputs[request_id]
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        return outputs[-1]

    def assert_idle(self) -> None:
        """Nothing is held: every block free, no adapter pinned."""
        assert not self.scheduler.has_unfinished()
        assert self.pool.num_free == self.pool.num_blocks
        assert self.residency.num_pins() == 0

    def _emit(self, outputs: Iterable[SequenceOutput | None]) -> None:
        for output in outputs:
            if output is not None:
                self.outputs[output.request_id].append(output)


def make_rig(
    *,
    num_blocks: int = 64,
    num_slots: int = 2,
    load_steps: int = 0,
    prefix_cache: bool = True,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 64,
    max_scored_tokens: int = 64,
    overtake_limit: float = 1.0,
    adapter_wait_limit: float = 1.0,
    pacer: Pacer | None = None,
    long_prompts: LongPrompts | None = None,
    step_seconds: Callable[[StepWork], float] | None = None,
    residency_type: type[FakeResidency] = FakeResidency,
    scheduler_type: type[Scheduler] = Scheduler,
    cache_type: type[PrefixCache] = PrefixCache,
) -> Rig:
    """A rig; the types may be replaced by ones broken on purpose. step_seconds: what steps take, else 0.1."""
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_scored_tokens=max_scored_tokens,
        eos_token_ids=frozenset({EOS}),
        block_size=BLOCK_SIZE,
        overtake_limit=overtake_limit,
        adapter_wait_limit=adapter_wait_limit,
    )
    pool = BlockPool(num_blocks)
    cache = cache_type(pool, BLOCK_SIZE) if prefix_cache else None
    residency = residency_type(num_slots, load_steps)
    scheduler = scheduler_type(limits, pool, cache, residency, pacer, long_prompts)
    return Rig(limits, pool, cache, residency, scheduler, FakeModel(), seconds_of=step_seconds)


def _kv(adapter_key: str, tenant: str, tokens: list[int]) -> str:
    return hashlib.blake2b(repr((adapter_key, tenant, tokens)).encode(), digest_size=8).hexdigest()


def _next_token(kv: str, sampling: SamplingParams, known: list[int]) -> int:
    if sampling.presence_penalty:
        kv = _kv(kv, "", known)
    return int(kv, 16) % (VOCAB_SIZE - 1)
