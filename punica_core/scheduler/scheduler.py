"""Which tokens run in the next step, and what its result means for every sequence."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from punica_core.errors import InternalError, PunicaError
from punica_core.kv.block_pool import BlockPool
from punica_core.kv.prefix_cache import PrefixCache, PrefixMatch
from punica_core.protocol import AdapterRef, FinishReason, NewSequence, SequenceOutput, StepStats
from punica_core.scheduler.adapter_room import AdapterRoom
from punica_core.scheduler.admission import OVERTAKEN, AdmissionPass, waiting_by_reason
from punica_core.scheduler.counters import SchedulerCounters
from punica_core.scheduler.in_flight import MAX_STEPS_IN_FLIGHT, InFlight, StepInFlight
from punica_core.scheduler.invariants import check_blocks, check_sequences
from punica_core.scheduler.limits import SchedulerLimits
from punica_core.scheduler.long_prompts import LongPrompts
from punica_core.scheduler.outcome import (
    advance,
    check_servable,
    error_output,
    finish_reason,
    prompt_output,
    token_output,
)
from punica_core.scheduler.pacing import Pacer
from punica_core.scheduler.plan import Residency, RowPlan, SkipReason, StepPlan, StepResult
from punica_core.scheduler.prefetch import Prefetcher
from punica_core.scheduler.running import RunningSequences
from punica_core.scheduler.sequence import Sequence, Status
from punica_core.scheduler.shared_prompts import SharedPrompts
from punica_core.scheduler.step_builder import StepBuilder
from punica_core.scheduler.waiting import GENERATED_TOKEN_SERVICE, PROMPT_TOKEN_SERVICE, WaitingQueue


class Scheduler:
    """Owner of all sequences from `add` to their terminal output. docs/scheduling.md states the policy and bounds.

    plan = schedule(now); result = execute(plan); outputs = update(plan, result, now). Other calls may come between
    any two of these. One more plan may be made before the last one is updated: that step runs ahead. Plans are
    updated in the order in which they were made. Nothing here blocks, reads a clock or knows torch; equal calls give
    equal plans.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        prefix_cache: PrefixCache | None,
        residency: Residency,
        pacer: Pacer | None = None,
        long_prompts: LongPrompts | None = None,
    ) -> None:
        self.limits = limits
        self.counters = SchedulerCounters()
        self.waiting_by_reason: Counter[SkipReason] = Counter()
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._residency = residency
        self._prefetcher = Prefetcher(residency)
        self._pacer = pacer
        self._long_prompts = long_prompts
        self._live: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running = RunningSequences()
        self._adapter_room = AdapterRoom(limits, residency, self._running, self._waiting, self._preempt)
        self._in_flight = InFlight()
        self._shared_prompts = SharedPrompts(limits.block_size)
        self._next_serial = 0

    def has_unfinished(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self._live)

    def stats(self) -> StepStats:
        """The scheduler's gauges and counters; `waiting_by_reason` is the last step's, while anything waits."""
        reasons = self.waiting_by_reason if self._waiting else Counter[SkipReason]()
        return StepStats(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_by_reason={str(reason): count for reason, count in reasons.items()},
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            **asdict(self.counters),
        )

    # Arrivals and departures

    def add(self, request: NewSequence, now: float) -> None:
        """Take a sequence in. Raises `RequestError` if it can never run; then nothing has changed."""
        assert request.request_id not in self._live, f"request_id {request.request_id} is in use"
        check_servable(request, self.limits, self._pool.num_blocks)
        sequence = Sequence.of(request, now, self._next_serial)
        self._next_serial += 1
        self._live[request.request_id] = sequence
        self._waiting.enter(request.tenant)
        self._waiting.push(sequence)

    def cancel(self, request_id: int, now: float) -> SequenceOutput | None:
        """End a sequence at its client's wish. Returns its terminal output, None if there is no such sequence."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        self._end(sequence)
        return SequenceOutput(request_id=request_id, finish_reason=FinishReason.CANCELLED)

    def fail_adapter(self, ref: AdapterRef, error: PunicaError) -> list[SequenceOutput]:
        """The adapter could not be brought in: end all that wait for it. Running ones hold it and go on."""
        failed = [sequence for adapter, queue in self._waiting.queues() if adapter == ref for sequence in queue]
        for sequence in failed:
            self._end(sequence)
        return [error_output(sequence.request_id, error) for sequence in failed]

    # One step

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. An empty plan needs no `update`: nothing can run before the step in flight is over
        or, if there is none, before an adapter arrives."""
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "the plan before the last was not updated"
        step = self._begin_step(now)
        try:
            self._extend_running(step)
            self._admit_waiting(step, now)
        except StepInFlight:
            return StepPlan()  # blocks that were given out meanwhile stay with their sequences, which will need them
        plan = step.build()
        if plan.rows:
            self._in_flight.begin(plan)
        return plan

    def _begin_step(self, now: float) -> StepBuilder:
        if self._long_prompts is None:
            return StepBuilder(self.limits)
        return self._long_prompts.begin_step(self.limits, self._running, now)

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Apply what executing `plan` produced. Rows of sequences that ended since are ignored."""
        if not plan.rows:
            return []
        self._in_flight.end(plan)
        outputs = [output for row in plan.rows if (output := self._update_row(row, result)) is not None]
        self._release_unused()
        return outputs

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """The plan's step took so long: from the end of the one before, if that was still running when it started."""
        if self._pacer is not None:
            self._pacer.observe(plan.work, seconds)

    def abandon(self, plan: StepPlan) -> None:
        """Take back the newest plan: its result is not used, and what it was to compute is planned again."""
        self._in_flight.undo(plan)
        self._release_unused()

    def check(self) -> None:
        """Assert the invariants: every sequence is in one place and holds exactly what that place entitles it to."""
        check_sequences(self._live, self._running, self._waiting, self._in_flight)
        check_blocks(self._pool, [*self._running, *self._in_flight.ended])
        assert len(self._running) <= self.limits.max_num_seqs
        for sequence in self._live.values():
            sequence.check(self.limits.block_size)
        if self._prefix_cache is not None:
            self._prefix_cache.check()

    # Running sequences

    def _extend_running(self, step: StepBuilder) -> None:
        """Rows for running sequences: streams that decode keep their pace, then prefills share what is left."""
        prefilling = []
        has_streams = False
        block_size = self.limits.block_size
        for sequence in self._running:
            num_scheduled = sequence.num_scheduled
            missing = len(sequence.token_ids) - num_scheduled
            if missing > 1:
                prefilling.append(sequence)
            elif missing == 1 or sequence.may_run_ahead:
                has_streams = True
                # Most rows of most steps: one token in a block that is there. The budget has one for every sequence.
                if num_scheduled < len(sequence.block_table) * block_size:
                    step.add(sequence, 1)
                else:
                    self._extend(sequence, 1, step)
            else:
                has_streams = has_streams or sequence.goes_on
        if has_streams and self._pacer is not None:
            step.pace(self._pacer)
        for sequence in prefilling:
            self._extend(sequence, len(sequence.token_ids) - sequence.num_scheduled, step)

    def _extend(self, sequence: Sequence, count: int, step: StepBuilder) -> None:
        count = min(count, step.room_for(sequence))
        if count > 0 and sequence.status is Status.RUNNING and self._cover(sequence, count, step):
            step.add(sequence, count)

    def _cover(self, sequence: Sequence, count: int, step: StepBuilder) -> bool:
        """Give a running sequence blocks for `count` more tokens, preempting newer ones as needed.

        False if it was itself the newest and had to yield.
        """
        missing = self.limits.blocks_for(sequence.num_scheduled + count) - len(sequence.block_table)
        if missing <= 0:
            return True
        while missing > self._pool.num_free:
            newest = self._running.newest
            self._preempt(newest, step)
            if newest is sequence:
                return False
        sequence.block_table += tuple(self._pool.allocate(missing))
        return True

    def _preempt(self, sequence: Sequence, step: StepBuilder) -> None:
        """Send a running sequence back to wait. Its tokens are kept; their KV is computed again."""
        self._in_flight.require_none()
        step.drop(sequence)
        self._running.remove(sequence)
        self._release(sequence)
        sequence.begin_again()
        self._waiting.push(sequence)
        self.counters.preemptions += 1

    # Waiting sequences

    def _admit_waiting(self, step: StepBuilder, now: float) -> None:
        """Start waiting sequences in fair order until tokens, seats or blocks are used up."""
        turn = AdmissionPass(step, now, overdue_since=now - self.limits.overtake_limit)
        stop = self._full(step) if self._waiting else None
        if stop is None and self._waiting:
            stop = self._admit_in_order(turn)
        if stop is not None:
            self._prefetcher.look_ahead(self._waiting, turn)
        self.waiting_by_reason = waiting_by_reason(self._waiting, turn, stop)

    def _admit_in_order(self, turn: AdmissionPass) -> SkipReason | None:
        """Returns the reason that stopped the pass, None if every waiting sequence had its turn."""
        in_use = {sequence.adapter for sequence in self._running} | {None}
        self._shared_prompts.forget_computed()
        for sequence in self._waiting.order(turn.overdue_since, in_use, turn.refused):
            stop = self._full(turn.step)
            if stop is not None:
                return stop
            reason = self._admit(sequence, turn)
            if reason in OVERTAKEN:
                if not turn.may_be_overtaken(sequence, reason):
                    return reason
                turn.passed.append((sequence.adapter, reason))
        return None

    def _full(self, step: StepBuilder) -> SkipReason | None:
        if len(self._running) >= self.limits.max_num_seqs:
            return SkipReason.NO_SEATS
        return SkipReason.NO_TOKENS if step.is_full else None

    def _admit(self, sequence: Sequence, turn: AdmissionPass) -> SkipReason | None:
        """Start a waiting sequence, or say why not; then it is as it was before."""
        only_for_older = turn.is_overdue(sequence)
        if self._shared_prompts.is_awaited(sequence, only_for_older) and turn.may_wait_for_tokens(sequence):
            return SkipReason.PREFIX_COMPUTING
        num_blocks = self.limits.blocks_for(sequence.num_tokens)
        if turn.is_too_early(sequence, num_blocks, self._num_spare, self._residency):
            return SkipReason.ADAPTER_LOADING
        if sequence.adapter is not None:
            grant = self._adapter_room.acquire(sequence, sequence.adapter, turn)
            if isinstance(grant, SkipReason):
                return grant
            sequence.grant = grant
        match = self._match(sequence)
        missing = num_blocks - len(match.block_ids)
        reason = self._not_yet(sequence, match, missing, turn)
        if reason is not None:
            self._release(sequence)
            return reason
        self._pool.retain(match.block_ids)
        sequence.block_table = (*match.block_ids, *self._pool.allocate(missing))
        self._start(sequence, match, turn.step)
        return None

    @property
    def _num_spare(self) -> int:
        """Free blocks, but for one for each running sequence: they may need it in their next block_size steps."""
        return self._pool.num_free - len(self._running)

    def _not_yet(self, sequence: Sequence, match: PrefixMatch, missing: int, turn: AdmissionPass) -> SkipReason | None:
        """Why a sequence that has its adapter, and needs `missing` blocks besides those found, does not start."""
        if missing + sum(map(self._pool.is_free, match.block_ids)) > self._num_spare:
            return SkipReason.NO_BLOCKS
        has_room = turn.step.room_for(sequence, match.num_tokens) > 0
        if not has_room and not turn.step.is_beside_long_ones(sequence):
            return SkipReason.NO_TOKENS
        if self._reads_cache(sequence) and turn.may_wait_for_tokens(sequence):
            only_for_older = turn.is_overdue(sequence)
            if self._shared_prompts.should_wait(sequence, match.num_tokens, only_for_older):
                return SkipReason.PREFIX_COMPUTING
        return None if has_room else SkipReason.NO_TOKENS

    def _start(self, sequence: Sequence, match: PrefixMatch, step: StepBuilder) -> None:
        self._waiting.remove(sequence)
        self._running.add(sequence)
        sequence.begin(match.num_tokens)
        if self._prefix_cache is not None:
            sequence.chain = self._prefix_cache.chain(sequence.adapter_key, sequence.tenant)
            self._shared_prompts.begin(sequence)
        if sequence.admissions == 0:
            sequence.cached_tokens = match.num_tokens
            if self._reads_cache(sequence):
                self.counters.count_lookup(sequence.num_prompt, match.num_tokens)
            self._waiting.charge(sequence.tenant, PROMPT_TOKEN_SERVICE * (sequence.num_prompt - match.num_tokens))
        sequence.admissions += 1
        step.add(sequence, min(sequence.num_tokens - match.num_tokens, step.room_for(sequence)))

    def _reads_cache(self, sequence: Sequence) -> bool:
        return self._prefix_cache is not None and not sequence.scores_prompt

    def _match(self, sequence: Sequence) -> PrefixMatch:
        if self._prefix_cache is None or not self._reads_cache(sequence):
            return PrefixMatch()
        return self._prefix_cache.match(sequence.adapter_key, sequence.tenant, sequence.token_ids)

    # Results

    def _update_row(self, row: RowPlan, result: StepResult) -> SequenceOutput | None:
        sequence = row.sequence
        if sequence.status is Status.FINISHED:
            return None
        if result.failed and sequence.request_id in result.failed:
            return self._fail(sequence, result.failed[sequence.request_id])
        self.counters.count_row(row.start, row.count, sequence.num_prompt)
        advance(row, result, self._prefix_cache, self.limits.block_size)
        if not row.samples:
            return None
        if sequence.max_tokens == 0:
            output = prompt_output(sequence)
        else:
            sampled = result.sampled[sequence.request_id]
            sequence.token_ids.append(sampled.token_id)
            self._waiting.charge(sequence.tenant, GENERATED_TOKEN_SERVICE)
            output = token_output(sequence, sampled, finish_reason(sequence, self.limits))
        if output.finish_reason is not None:
            self._end(sequence)
        return output

    def _fail(self, sequence: Sequence, message: str) -> SequenceOutput:
        if self._prefix_cache is not None:
            self._prefix_cache.withdraw(sequence.block_table)
        self._end(sequence)
        return error_output(sequence.request_id, InternalError(message))

    # Ends

    def _end(self, sequence: Sequence) -> None:
        """Take a sequence out of the scheduler, once. What a step in flight still uses is released after it."""
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
        sequence.status = Status.FINISHED
        del self._live[sequence.request_id]
        self._waiting.leave(sequence.tenant)
        if sequence.in_flight:
            self._in_flight.hold(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back the sequence's blocks and its pin on the adapter, if it has them."""
        self._pool.release(sequence.block_table)
        sequence.block_table = ()
        if sequence.grant is not None:
            assert sequence.adapter is not None
            self._residency.release(sequence.adapter)
            sequence.grant = None

    def _release_unused(self) -> None:
        for sequence in self._in_flight.take_unused():
            self._release(sequence)
