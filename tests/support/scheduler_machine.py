"""Random clients against a scheduler: arrivals, cancels at every stage, adapters that load, fail and compete.

Everything a client must be able to rely on is checked after every step and, at the end, that all of it is over and
nothing is held. A machine of depth 2 plans a step while another is in flight, and some of these are taken back. A test
that passes here must fail with a scheduler that is broken on purpose; see tests/scheduler/test_scheduler_machine.py
for both.
"""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from punica_core.errors import AdapterInvalid
from punica_core.protocol import AdapterRef, FinishReason, NewSequence
from punica_core.scheduler.long_prompts import MAX_SERVED, LongPrompts
from punica_core.scheduler.pacing import Pacer, StepSizes
from punica_core.scheduler.plan import RowPlan, StepPlan, StepResult, StepWork
from punica_core.scheduler.sequence import Sequence, Status
from tests.support.residency import FakeResidency, SizedResidency, adapter_ref
from tests.support.scheduling import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    FakeStep,
    Rig,
    expected_tokens,
    make_rig,
    new_sequence,
)

ADAPTERS = [None, adapter_ref("a 1"), adapter_ref("b 2"), adapter_ref("c 3"), adapter_ref("a 1", version=2)]
STEM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
MAX_TOKENS = 7
NUM_BLOCKS = 8
MAX_SCORED = 4
MAX_CROWDED = 12
OVERTAKE_LIMIT = 0.45
ADAPTER_WAIT_LIMITS = [0.15, 0.45]
STEP_SIZES = StepSizes(prompt_rows=(2, 4, 6), max_prompts=2)
STEP_TARGET = 0.4
LONG_PROMPTS = LongPrompts(min_tokens=5, piece=2, max_started=2)


class SchedulerMachine(RuleBasedStateMachine):
    """depth: steps in flight at most. The rig is tight on purpose: 8 blocks of 4 tokens, 3 seats, 8 tokens a step of
    which 4 may be scored, 1 to 3 adapters at a time or fewer, if they have sizes.
    """

    rig_factory = staticmethod(make_rig)
    depth = 1

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, NewSequence] = {}
        self.expected: dict[int, list[int]] = {}
        self.doomed: dict[int, FinishReason] = {}
        self.steps: list[FakeStep] = []
        self.first: dict[Sequence, int] = {}  # others made way for their adapters; their admissions then

    @initialize(
        prefix_cache=st.booleans(),
        num_slots=st.integers(1, 3),
        residency=st.sampled_from([FakeResidency, SizedResidency]),
        load_steps=st.integers(0, 3),
        adapter_wait_limit=st.sampled_from(ADAPTER_WAIT_LIMITS),
        paced=st.booleans(),
        long_prompts=st.sampled_from([None, LONG_PROMPTS]),
    )
    def build(
        self,
        prefix_cache: bool,
        num_slots: int,
        residency: type[FakeResidency],
        load_steps: int,
        adapter_wait_limit: float,
        paced: bool,
        long_prompts: LongPrompts | None,
    ) -> None:
        self.long_prompts = long_prompts
        self.paced = paced and long_prompts is None  # a GPU is paced, a CPU cuts long prompts
        self.rig: Rig = self.rig_factory(
            num_blocks=NUM_BLOCKS,
            num_slots=num_slots,
            residency_type=residency,
            load_steps=load_steps,
            prefix_cache=prefix_cache,
            max_num_seqs=3,
            max_num_batched_tokens=8,
            max_scored_tokens=MAX_SCORED,
            max_model_len=NUM_BLOCKS * BLOCK_SIZE,
            overtake_limit=OVERTAKE_LIMIT,
            adapter_wait_limit=adapter_wait_limit,
            pacer=Pacer(STEP_TARGET, 8, STEP_SIZES) if self.paced else None,
            long_prompts=long_prompts,
        )

    @rule(
        shared=st.integers(0, len(STEM)),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        max_tokens=st.integers(0, MAX_TOKENS),
        adapter=st.sampled_from(ADAPTERS),
        tenant=st.sampled_from(["", "t"]),
        scored=st.booleans(),
        stop_ids=st.sets(st.integers(0, VOCAB_SIZE), max_size=8),
        penalty=st.sampled_from([0.0, 0.0, 0.5]),
    )
    def add(
        self,
        shared: int,
        own: list[int],
        max_tokens: int,
        adapter: object,
        tenant: str,
        scored: bool,
        stop_ids: set[int],
        penalty: float,
    ) -> None:
        request_id = len(self.requests)
        request = new_sequence(
            request_id,
            [*STEM[:shared], *own],
            max_tokens=max_tokens,
            adapter=adapter,  # type: ignore[arg-type]
            tenant=tenant,
            prompt_logprobs=0 if scored or max_tokens == 0 else None,
            stop_token_ids=tuple(sorted(stop_ids)),
            presence_penalty=penalty,
        )
        self._submit(request)

    @precondition(lambda self: len(self.requests) < MAX_CROWDED)
    @rule(
        adapters=st.lists(st.sampled_from(ADAPTERS), min_size=3, max_size=6),
        shared=st.lists(st.integers(0, len(STEM)), min_size=1, max_size=4),
    )
    def add_crowd(self, adapters: list[AdapterRef | None], shared: list[int]) -> None:
        """Two tenants want more adapters at once than there is room for."""
        for place, adapter in enumerate(adapters):
            prompt = [*STEM[: shared[place % len(shared)]], place % 3]
            tenant = "t" if place % 2 else ""
            self._submit(
                new_sequence(len(self.requests), prompt, max_tokens=MAX_TOKENS, adapter=adapter, tenant=tenant)
            )

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def add_twin(self, data: st.DataObject) -> None:
        """The same prompt once more, so that prefixes are shared, also of a sequence that runs right now."""
        twin = self.requests[data.draw(st.integers(0, len(self.requests) - 1))]
        self._submit(msgspec.structs.replace(twin, request_id=len(self.requests)))

    @precondition(lambda self: self.rig.scheduler.has_unfinished())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([i for i in self.requests if not self._ended(i)]))
        output = self.rig.cancel(request_id)
        assert output is not None
        assert output.finish_reason is FinishReason.CANCELLED
        self.doomed[request_id] = FinishReason.CANCELLED

    @precondition(lambda self: any(map(self._ended, self.requests)))
    @rule(data=st.data())
    def cancel_what_ended(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([i for i in self.requests if self._ended(i)]))
        assert self.rig.cancel(request_id) is None

    @precondition(lambda self: len(self.steps) < self.depth)
    @rule()
    def schedule(self) -> None:
        now = self.rig.now
        waiting = list(self.rig.scheduler._waiting)
        limits = self.rig.limits
        overdue = [sequence for sequence in waiting if sequence.arrival <= now - limits.overtake_limit]
        since = now - limits.adapter_wait_limit
        insisting = [s for s in overdue if s.no_room_since is not None and s.no_room_since <= since]
        ready = [s for s in self._that_go_first()[:1] if self.rig.residency.has(s.adapter)]
        plan = self.rig.scheduler.schedule(now)
        self.rig.record(plan)
        started = [sequence for sequence in waiting if sequence.status is Status.RUNNING]
        for sequence in ready:  # it may have started and made way itself at once, for an older one
            assert not started or sequence.admissions > self.first[sequence], (
                "others started while its adapter was there"
            )
        self._nobody_was_overtaken(waiting, started, overdue, insisting)
        first = self._that_go_first()
        self.first = {s: s.admissions for s in self.rig.scheduler._waiting if s.goes_first or s in first}
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.rows) <= limits.max_num_seqs
        assert sum(map(_num_scored, plan.rows)) <= MAX_SCORED
        ids = [row.sequence.request_id for row in plan.rows]
        assert len(set(ids)) == len(ids)
        assert [row.slot for row in plan.rows] == sorted(row.slot for row in plan.rows)
        for row in plan.rows:
            last_input = row.sequence.num_prompt + max(row.sequence.sampling.max_tokens - 1, 0)
            assert row.start + row.count <= last_input, "a row behind the end of its sequence"
            assert row.pending <= bool(self.steps), "nothing is in flight that could sample the pending token"
        self._work_is_counted_and_keeps_the_pace(plan, waiting)
        if plan.rows or not self.steps:  # a step without rows only lets time pass
            self.steps.append(self.rig.model.launch(plan))

    @precondition(lambda self: self.rig.model.queue)
    @rule()
    def advance_the_device(self) -> None:
        self.rig.model.advance()

    @precondition(lambda self: self.steps)
    @rule()
    def execute(self) -> None:
        self._finish_oldest(self.steps[0].result())

    @precondition(lambda self: self.steps and self.steps[0].plan.rows)
    @rule(data=st.data())
    def execute_with_a_row_that_fails(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.steps[0].plan.rows))
        request_id, is_live = row.sequence.request_id, row.sequence.status is not Status.FINISHED
        result = self.steps[0].result()
        result.sampled.pop(request_id, None)
        result.failed[request_id] = "not finite"
        self._finish_oldest(result)
        if is_live:
            assert self.rig.end(request_id).error_message == "not finite"
            self.doomed[request_id] = FinishReason.ERROR

    @precondition(lambda self: len(self.steps) > 1)
    @rule()
    def abandon_the_newest(self) -> None:
        """As after a fault of the oldest, whose rows are computed again, each alone and with the same outcome."""
        newest = self.steps.pop()
        newest.result()
        self.rig.scheduler.abandon(newest.plan)
        self.rig.scheduler.check()
        (oldest,) = self.steps
        for row in oldest.plan.rows:
            if row.sequence.status is not Status.FINISHED:
                again = self.rig.model.execute(StepPlan((msgspec.structs.replace(row, pending=False),)))
                request_id = row.sequence.request_id
                assert again.sampled.get(request_id) == oldest.result().sampled.get(request_id)
        self.execute()

    @precondition(lambda self: self.rig.residency.loading)
    @rule(data=st.data())
    def fail_load(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(sorted(self.rig.residency.loading, key=str)))
        self.rig.residency.fail(ref)
        for output in self.rig.scheduler.fail_adapter(ref, AdapterInvalid("no such tensor")):
            assert output.error_code == AdapterInvalid.code
            assert self.requests[output.request_id].adapter == ref
            self.rig.outputs[output.request_id].append(output)
            self.doomed[output.request_id] = FinishReason.ERROR

    @invariant()
    def invariants(self) -> None:
        self.rig.scheduler.check()
        self._steps_in_flight_hold_what_they_use()
        for request_id in self.requests:
            ends = [output.finish_reason is not None for output in self.rig.outputs[request_id]]
            assert not any(ends[:-1]), "something was sent after the terminal output"
            tokens = self.rig.tokens(request_id)
            assert tokens == self.expected[request_id][: len(tokens)], "a token was lost, repeated or sampled again"

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self._run_to_the_end(max_steps=60 + 60 * len(self.requests))
        self.rig.assert_idle()
        for request_id, request in self.requests.items():
            end, tokens = self.rig.end(request_id), self.expected[request_id]
            if request_id in self.doomed:
                assert end.finish_reason is self.doomed[request_id]
            else:
                is_stopped = tokens and tokens[-1] in request.sampling.stop_token_ids
                assert end.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
                assert self.rig.tokens(request_id) == tokens
                self._prompt_logprobs_came_once(request_id, request)

    def _run_to_the_end(self, max_steps: int) -> None:
        """With as many steps in flight as the machine may have, as the engine does."""
        for _ in range(max_steps):
            if not self.rig.scheduler.has_unfinished():
                break
            num_before = len(self.steps)
            if num_before < self.depth:
                self.schedule()
            if num_before or self.depth == 1:
                self.execute()
        while self.steps:
            self.execute()
        assert not self.rig.scheduler.has_unfinished(), f"unfinished: {self.rig.scheduler.waiting_by_reason}"

    def _finish_oldest(self, result: StepResult) -> None:
        self.rig.now += self.rig.step_seconds
        plan = self.steps.pop(0).plan
        if plan.rows:
            self.rig.scheduler.measured(plan, self.rig.step_seconds * (1 + plan.work.prompt_rows))
        self.rig.finish(plan, result)

    def _submit(self, request: NewSequence) -> None:
        self.requests[request.request_id] = request
        self.expected[request.request_id] = expected_tokens(request)
        self.rig.add(request)

    def _ended(self, request_id: int) -> bool:
        return any(output.finish_reason is not None for output in self.rig.outputs[request_id])

    def _that_go_first(self) -> list[Sequence]:
        """Those for which others made way and that did not start since, oldest first."""
        first = [s for s, admissions in self.first.items() if s.status is Status.WAITING and s.admissions == admissions]
        return sorted(first, key=lambda sequence: sequence.serial)

    def _nobody_was_overtaken(
        self, waiting: list[Sequence], started: list[Sequence], overdue: list[Sequence], insisting: list[Sequence]
    ) -> None:
        """Within a tenant: nothing passes an overdue sequence unless that one waits for its adapter, and nothing
        pins another adapter past one that has waited its limit for room, too, and still has none. Those for which
        others made way may, and so may any while an older long prompt computes the tokens of an overdue one."""
        for newer in set(started).difference(self.first):
            passed = {s for s in waiting if s.status is Status.WAITING and s.serial < newer.serial}
            passed = {sequence for sequence in passed if sequence.tenant == newer.tenant}
            for sequence in passed.intersection(overdue):
                assert sequence.adapter is not None or self._follows_an_older_one(sequence), (
                    "an overdue sequence was passed"
                )
            if newer.adapter is not None:
                for sequence in passed.intersection(insisting):
                    assert sequence.adapter == newer.adapter or not self._asked_for_room(sequence), "room was taken"

    def _work_is_counted_and_keeps_the_pace(self, plan: StepPlan, waiting: list[Sequence]) -> None:
        """Prompts beside a stream are as few and as short as the runner likes them; one that comes back in this step,
        with all but its last token found in the cache, is no stream yet."""
        prompts = [row for row in plan.rows if row.count > 1]
        num_rows = sum(row.count for row in prompts)
        attended = sum(sum(range(row.start + 1, row.start + row.count + 1)) for row in prompts)
        assert plan.work == StepWork(len(plan.rows) - len(prompts), num_rows, len(prompts), attended)
        old = [row for row in plan.rows if row.sequence not in waiting]
        has_stream = any(row.start >= row.sequence.num_prompt for row in old if row.count == 1)
        if self.paced and has_stream:
            assert num_rows <= STEP_SIZES.prompt_rows[-1], "streams wait for too long a prompt"
            assert len(prompts) <= (STEP_SIZES.max_prompts or 0), "streams wait for too many prompts"
        if self.long_prompts is not None and has_stream:
            is_long = self.long_prompts.is_long
            cut = [row for row in old if not row.samples and is_long(row.sequence.num_tokens - row.sequence.num_found)]
            assert sum(row.count for row in cut) <= MAX_SERVED * self.long_prompts.piece, (
                "streams wait for a long prompt"
            )

    def _follows_an_older_one(self, sequence: Sequence) -> bool:
        """Whether this is a long prompt that waits for what an older one computes. It may have been preempted since."""
        if self.long_prompts is None or not self.long_prompts.is_long(sequence.num_tokens) or sequence.follows is None:
            return False
        leader, _num_tokens = sequence.follows
        return leader.serial < sequence.serial and leader.status is not Status.FINISHED

    def _asked_for_room(self, sequence: Sequence) -> bool:
        """Whether this waiting sequence was refused room in the last pass: one sequence an adapter asks, the oldest of
        the tenant whose turn comes first, and room was not made for it in that very pass."""
        others = (s for s in self.rig.scheduler._waiting if s.adapter == sequence.adapter and s is not sequence)
        is_first = all(s.tenant == sequence.tenant and s.serial > sequence.serial for s in others)
        return is_first and sequence.no_room_since is not None and sequence.adapter not in self.rig.residency.loading

    def _steps_in_flight_hold_what_they_use(self) -> None:
        residency = self.rig.residency
        for row in (row for step in self.steps for row in step.plan.rows):
            assert not any(map(self.rig.pool.is_free, row.block_table)), "a block was freed under a step"
            if row.sequence.adapter is not None:
                assert residency.pins[row.sequence.adapter] > 0, "an adapter may go while a step uses it"
                assert residency.slots.get(row.sequence.adapter) == row.slot, "an adapter moved while a step used it"

    def _prompt_logprobs_came_once(self, request_id: int, request: NewSequence) -> None:
        reports = [o.prompt_logprobs for o in self.rig.outputs[request_id] if o.prompt_logprobs is not None]
        if request.sampling.prompt_logprobs is None:
            assert not reports
            return
        (entries,) = reports
        assert [entry.token_id for entry in entries] == request.prompt_ids[1:]


def _num_scored(row: RowPlan) -> int:
    """Tokens of a row that need logits each: those from the first on whose next token was not scored before."""
    sequence = row.sequence
    first, end = max(row.start, sequence.num_scored), row.start + row.count
    is_scored = sequence.sampling.prompt_logprobs is not None and first + 1 < min(end + 1, sequence.num_prompt)
    return end - first if is_scored else 0


class AheadMachine(SchedulerMachine):
    """The same with a step that runs ahead."""

    depth = 2
