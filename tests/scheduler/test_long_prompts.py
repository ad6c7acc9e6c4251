"""Long prompts on a CPU, and those that arrive beside them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from punica_core.config import EngineConfig
from punica_core.kv.prefix_cache import PrefixMatch
from punica_core.scheduler import long_prompts
from punica_core.scheduler.admission import AdmissionPass
from punica_core.scheduler.long_prompts import LongPrompts
from punica_core.scheduler.pacing import Pacer, StepSizes
from punica_core.scheduler.plan import SkipReason, StepPlan
from punica_core.scheduler.scheduler import Scheduler
from punica_core.scheduler.sequence import Sequence
from punica_core.scheduler.shared_prompts import SharedPrompts
from punica_core.scheduler.step_builder import StepBuilder
from tests.support.residency import adapter_ref
from tests.support.scheduling import BLOCK_SIZE, Rig, expected_tokens, make_rig, new_sequence

BUDGET = 64
PIECE = 16
SHORT = 32
LONG = 400
POLICY = LongPrompts(min_tokens=SHORT + 1, piece=PIECE, max_started=3)


def rig_of(policy: LongPrompts | None = POLICY, **options: object) -> Rig:
    options = {"num_blocks": 1000, "max_num_batched_tokens": BUDGET, "max_num_seqs": 32, **options}
    options = {"prefix_cache": False, "max_model_len": LONG + 40, "long_prompts": policy, **options}
    return make_rig(**options)  # type: ignore[arg-type]


def counts(plan: StepPlan) -> dict[int, int]:
    """Tokens of the step by request."""
    return {row.sequence.request_id: row.count for row in plan.rows}


def rows(rig: Rig) -> list[list[tuple[int, int, int]]]:
    """Every row of every step: request, first token, number of tokens."""
    return [[(row.sequence.request_id, row.start, row.count) for row in plan.rows] for plan in rig.plans]


def steps_until_first_token(rig: Rig, request_id: int) -> int:
    """How many more steps it takes."""
    for number in range(1, 200):
        rig.step()
        if rig.tokens(request_id):
            return number
    raise AssertionError(f"request {request_id} got no token: {rig.scheduler.waiting_by_reason}")


def beside_a_long_prompt(num_tokens: int, policy: LongPrompts | None = POLICY, **options: object) -> Rig:
    """A prompt of so many tokens, request 1, arrives when a long one, request 0, has had two steps."""
    rig = rig_of(policy, **options)
    rig.add(new_sequence(0, prompt=LONG, max_tokens=2))
    assert [counts(rig.step()) for _ in range(2)] == [{0: BUDGET}] * 2, "alone it fills every step"
    rig.add(new_sequence(1, prompt=num_tokens, max_tokens=2))
    return rig


# Where there is such a thing.


def test_only_a_cpu_cuts_them_and_only_if_it_may() -> None:
    config = EngineConfig(model="m")
    assert LongPrompts.of(config, "cpu") == LongPrompts()
    assert LongPrompts.of(config, "cuda") is None
    assert LongPrompts.of(EngineConfig(model="m", target_step_ms=0), "cpu") is None


def random_load(rig: Rig, seed: int, longest: int, generated: int = 12) -> None:
    """Prompts and outputs of at most so many tokens, of two tenants, with and without adapters, that arrive and run."""
    generator = random.Random(seed)
    for request_id in range(40):
        prompt = [generator.randrange(3) for _ in range(generator.randint(1, longest))]
        adapter = adapter_ref(generator.choice("abc")) if generator.random() < 0.5 else None
        tenant = generator.choice(["", "t"])
        max_tokens = generator.randint(1, generated)
        rig.add(new_sequence(request_id, prompt, max_tokens=max_tokens, adapter=adapter, tenant=tenant))
        for _ in range(generator.randint(0, 2)):
            rig.step()
    rig.run()


def tight_rig(policy: LongPrompts | None, num_blocks: int = 120, **options: object) -> Rig:
    return rig_of(policy, num_blocks=num_blocks, max_num_seqs=6, load_steps=1, prefix_cache=True, **options)


@pytest.mark.parametrize("seed", range(5))
def test_the_plans_of_a_gpu_are_those_of_a_scheduler_without_it(seed: int) -> None:
    traces = []
    for policy in (None, LongPrompts.of(EngineConfig(model="m"), "cuda"), POLICY):
        rig = tight_rig(policy, pacer=Pacer(0.3, BUDGET, StepSizes(prompt_rows=(8, 16, 32, 64), max_prompts=4)))
        random_load(rig, seed, 200)
        traces.append(rows(rig))
    assert traces[0] == traces[1]
    assert traces[0] != traces[2], "the case is too easy"


@pytest.mark.parametrize("seed", range(5))
def test_where_no_prompt_is_long_plans_are_the_same(seed: int) -> None:
    """Whatever is measured of short requests on a CPU is what it was."""
    plain, cut, shorter = tight_rig(None), tight_rig(POLICY), tight_rig(LongPrompts(min_tokens=SHORT // 2, piece=8))
    for rig in (plain, cut, shorter):
        random_load(rig, seed, SHORT)
    assert rows(plain) == rows(cut)
    assert rows(plain) != rows(shorter), "the case is too easy"


def crowded(policy: LongPrompts | None, seed: int, longest: int) -> Rig:
    """So few blocks that sequences are preempted."""
    rig = tight_rig(policy, num_blocks=20)
    random_load(rig, seed, longest, generated=24)
    assert rig.scheduler.counters.preemptions, "the case is too easy"
    return rig


@pytest.mark.parametrize("seed", range(5))
def test_nor_does_a_preemption_matter_where_prompt_and_output_are_short(seed: int) -> None:
    assert rows(crowded(None, seed, SHORT - 24)) == rows(crowded(POLICY, seed, SHORT - 24))


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_generated_tokens_that_are_computed_again_count(seed: int) -> None:
    """No prompt is long, but some are with their output."""
    assert rows(crowded(None, seed, SHORT)) != rows(crowded(POLICY, seed, SHORT))


# Beside a long prompt.


@pytest.mark.parametrize("num_tokens", [1, 10, SHORT])
def test_a_short_prompt_is_computed_by_the_next_step(num_tokens: int) -> None:
    rig = beside_a_long_prompt(num_tokens)
    assert counts(rig.step()) == {0: PIECE, 1: num_tokens}, "which is not filled up, for somebody waits for it"
    assert rig.tokens(1)
    assert counts(rig.step()) == {0: PIECE, 1: 1}, "nor is one that a stream waits for"
    assert counts(rig.step()) == {0: BUDGET}
    rig.run()
    for request_id, prompt in ((0, LONG), (1, num_tokens)):
        assert rig.tokens(request_id) == expected_tokens(new_sequence(request_id, prompt=prompt, max_tokens=2))


def test_without_pieces_it_waits_for_all_of_the_long_one() -> None:
    assert steps_until_first_token(beside_a_long_prompt(10, policy=None), 1) == (LONG - 2 * BUDGET) // BUDGET + 1


def test_streams_wait_for_a_piece_only() -> None:
    rig = rig_of()
    rig.add(new_sequence(0, prompt=3, max_tokens=100))
    rig.step()
    rig.add(new_sequence(1, prompt=LONG, max_tokens=1))
    assert steps_until_first_token(rig, 1) == LONG // PIECE
    assert {counts(plan)[1] for plan in rig.plans[1:]} == {PIECE}


def test_several_short_ones_join_one_step() -> None:
    rig = beside_a_long_prompt(10)
    rig.add(new_sequence(2, prompt=SHORT, max_tokens=2), new_sequence(3, prompt=SHORT, max_tokens=2))
    assert counts(rig.step()) == {0: PIECE, 1: 10, 2: SHORT, 3: BUDGET - PIECE - 10 - SHORT}


def test_a_prompt_with_fewer_tokens_left_goes_through_beside_a_longer_one() -> None:
    rig = beside_a_long_prompt(2 * BUDGET)
    assert counts(rig.step()) == {0: PIECE, 1: BUDGET - PIECE}, "nobody waits: what is left is for who is through first"
    assert steps_until_first_token(rig, 1) == 2
    assert not rig.tokens(0)


def test_prompts_of_one_length_take_turns_and_not_each_others_time() -> None:
    """Halves for both would make the first one twice as slow, and the second no faster."""
    rig = beside_a_long_prompt(LONG)
    assert counts(rig.step()) == {0: BUDGET}
    assert rig.scheduler.waiting_by_reason == {SkipReason.NO_TOKENS: 1}
    assert steps_until_first_token(rig, 0) == -(-(LONG - 3 * BUDGET) // BUDGET)
    assert steps_until_first_token(rig, 1) <= -(-LONG // BUDGET)


def test_two_pieces_are_the_most_that_streams_wait_for() -> None:
    """Several long prompts would else take very long to compute."""
    rig = rig_of(overtake_limit=0.0)
    rig.add(new_sequence(9, prompt=3, max_tokens=100))
    rig.step()
    rig.add(*(new_sequence(i, prompt=LONG, max_tokens=1) for i in range(4)))
    for _ in range(3):
        rig.step()
    assert counts(rig.step()) == {9: 1, 0: 2 * PIECE}


# Nobody starves.


def flooded(rig: Rig, max_steps: int = 100) -> list[int]:
    """Tokens of request 0 in each step, until its first, while every step brings short prompts that would fill it."""
    shares = []
    while not rig.tokens(0):
        first = 1000 + 8 * len(shares)
        rig.add(*(new_sequence(first + i, prompt=SHORT, max_tokens=1) for i in range(4)))
        shares.append(counts(rig.step()).get(0, 0))
        assert len(shares) < max_steps, "it starves"
    return shares


def test_a_flood_of_short_prompts_leaves_a_long_one_its_piece() -> None:
    rig = rig_of()
    rig.add(new_sequence(0, prompt=LONG, max_tokens=1))
    rig.step()
    assert set(flooded(rig)[:-1]) == {PIECE}


def test_without_it_it_would_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    def room_for(step: StepBuilder, sequence: Sequence, start: int | None = None) -> int:
        is_started = sequence in step._long  # type: ignore[attr-defined]
        return 0 if is_started else StepBuilder.room_for(step, sequence, start)

    rig = rig_of()
    rig.add(new_sequence(0, prompt=LONG, max_tokens=1))
    rig.step()
    monkeypatch.setattr(long_prompts._Step, "room_for", room_for)
    with pytest.raises(AssertionError, match="starves"):
        flooded(rig)


def wait_until_overdue(rig: Rig) -> None:
    """A second long prompt, request 1, waits as long as it may be overtaken."""
    while 1 not in rig.started:
        assert counts(rig.step()).keys() <= {0, 1}
        assert rig.now <= 0.5


def test_an_overdue_long_prompt_starts_and_lets_short_ones_through() -> None:
    """The rule that nobody overtakes it holds, and those behind it need not wait until the first is computed."""
    rig = beside_a_long_prompt(LONG, overtake_limit=0.15)
    wait_until_overdue(rig)
    assert counts(rig.plans[-1]) == {0: BUDGET - BLOCK_SIZE, 1: BLOCK_SIZE}
    rig.add(new_sequence(2, prompt=10, max_tokens=2))
    assert counts(rig.step()) == {0: 2 * PIECE, 2: 10}


class LongOnesWait(Scheduler):
    """Whoever is overdue waits until there is room."""

    def _begin_step(self, now: float) -> StepBuilder:
        step = super()._begin_step(now)
        step._max_started = 1  # type: ignore[attr-defined]
        return step


def test_short_ones_would_wait_behind_it_else() -> None:
    rig = beside_a_long_prompt(LONG, overtake_limit=0.15, scheduler_type=LongOnesWait)
    for _ in range(2):
        rig.step()
    rig.add(new_sequence(2, prompt=10, max_tokens=2))
    assert counts(rig.step()) == {0: BUDGET}
    assert rig.scheduler.waiting_by_reason == {SkipReason.NO_TOKENS: 2}


def test_no_more_than_a_few_are_started_before_their_turn() -> None:
    """They hold KV blocks and seats that others may need."""
    rig = beside_a_long_prompt(LONG, overtake_limit=0.0)
    rig.add(*(new_sequence(i, prompt=LONG) for i in range(2, 8)))
    rig.step()
    assert sorted(rig.started) == [0, 1, 2]
    rig = beside_a_long_prompt(LONG, overtake_limit=0.0, max_num_seqs=2)
    rig.step()
    assert sorted(rig.started) == [0], "no more than half of the seats"


def test_the_oldest_is_computed_first_whatever_was_started() -> None:
    rig = beside_a_long_prompt(LONG, overtake_limit=0.0)
    rig.add(new_sequence(2, prompt=LONG, max_tokens=2))
    first = {i: steps_until_first_token(rig, i) for i in (0, 1, 2)}
    assert first[0] == -(-(LONG - 2 * BUDGET + 2 * BLOCK_SIZE) // BUDGET)
    assert max(first.values()) <= LONG // BUDGET + 3


def test_who_comes_in_small_numbers_does_not_wait_for_a_crowd_of_long_ones() -> None:
    rig = rig_of(overtake_limit=0.0)
    rig.add(new_sequence(98, prompt=2, tenant="quiet", max_tokens=20))
    rig.step()
    rig.add(*(new_sequence(i, prompt=LONG, tenant="busy") for i in range(20)))
    for _ in range(5):
        rig.step()
    rig.add(new_sequence(99, prompt=10, tenant="quiet", max_tokens=2))
    assert 99 in counts(rig.step())


def test_equal_long_prompts_are_computed_once() -> None:
    """One that is overdue would not find in the cache what is not computed yet."""
    prompt = [i % 40 for i in range(LONG)]
    rig = rig_of(prefix_cache=True, overtake_limit=0.15)
    rig.add(new_sequence(0, prompt, max_tokens=1), new_sequence(1, prompt, max_tokens=1))
    rig.run()
    assert rig.scheduler.counters.prefill_tokens <= LONG + BLOCK_SIZE
    assert rig.scheduler.counters.prefix_hit_tokens >= LONG - BLOCK_SIZE


def test_they_would_be_computed_twice_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompts._Step, "is_beside_long_ones", StepBuilder.is_beside_long_ones)
    with pytest.raises(AssertionError):
        test_equal_long_prompts_are_computed_once()


def chat_beside_equal_ones(num_shared: int, **options: object) -> Rig:
    """Two long prompts that begin alike, requests 0 and 1, are computed beside a stream until the second is overdue.
    Then a chat arrives, request 2."""
    rig = rig_of(prefix_cache=True, overtake_limit=0.15, **options)
    rig.add(new_sequence(9, prompt=3, max_tokens=100))
    rig.step()
    first = [i % 40 for i in range(LONG)]
    rig.add(new_sequence(0, first, max_tokens=1))
    rig.add(new_sequence(1, [*first[:num_shared], *range(LONG - num_shared)], max_tokens=1))
    for _ in range(4):
        rig.step()
    assert rig.scheduler.waiting_by_reason == {SkipReason.PREFIX_COMPUTING: 1}
    rig.add(new_sequence(2, prompt=10, max_tokens=1))
    return rig


@pytest.mark.parametrize("max_started", [1, 3])
@pytest.mark.parametrize("num_shared", [LONG // 2, LONG])
def test_short_ones_do_not_wait_behind_one_that_waits_for_an_equal_one(num_shared: int, max_started: int) -> None:
    """Two choices of one request, or one document that is asked about twice."""
    rig = chat_beside_equal_ones(num_shared, policy=replace(POLICY, max_started=max_started))
    assert counts(rig.step()) == {9: 1, 0: PIECE, 2: 10}
    first = {i: steps_until_first_token(rig, i) for i in (0, 1)}
    assert first[1] <= (LONG - num_shared) // PIECE + 1, "it found nothing, or waits on"


def test_they_would_wait_behind_it_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdmissionPass, "may_be_overtaken", lambda turn, sequence, reason: not turn.is_overdue(sequence))
    rig = chat_beside_equal_ones(LONG)
    assert counts(rig.step()) == {9: 1, 0: PIECE}


def beside_a_newer_one_that_begins_alike() -> Rig:
    """A long prompt, request 1, is passed by a shorter one of the same beginning, request 2, and is overdue then."""
    rig = rig_of(prefix_cache=True, overtake_limit=0.15)
    rig.add(new_sequence(9, prompt=3, max_tokens=100), new_sequence(0, [1] * LONG, max_tokens=1))
    rig.step()
    prompt = [i % 40 for i in range(LONG)]
    rig.add(new_sequence(1, prompt, max_tokens=1), new_sequence(2, prompt[: LONG - 80], max_tokens=1))
    rig.step()
    assert 1 not in rig.started
    assert 2 in rig.started
    for _ in range(2):
        rig.step()
    return rig


def test_an_overdue_one_waits_for_older_ones_only() -> None:
    """Newer ones could come again and again."""
    assert 1 in beside_a_newer_one_that_begins_alike().started


def test_it_would_wait_for_newer_ones_else(monkeypatch: pytest.MonkeyPatch) -> None:
    should_wait = SharedPrompts.should_wait
    monkeypatch.setattr(SharedPrompts, "should_wait", lambda *args: should_wait(*args[:-1], False))
    assert 1 not in beside_a_newer_one_that_begins_alike().started


class LosesPrefixes(Scheduler):
    """What a sequence found in the cache is not there any more when it starts again."""

    def _match(self, sequence: Sequence) -> PrefixMatch:
        return PrefixMatch() if sequence.admissions else super()._match(sequence)


def preempted_without_its_beginning() -> Rig:
    """Request 1, which had found most of its tokens, computes all of them beside a stream and newer long prompts."""
    rig = rig_of(prefix_cache=True, scheduler_type=LosesPrefixes)
    prompt = [i % 40 for i in range(LONG)]
    rig.add(new_sequence(0, prompt[:-20], max_tokens=1))
    rig.run()
    rig.add(new_sequence(1, prompt, max_tokens=3), new_sequence(9, prompt=3, max_tokens=100))
    rig.step()
    rig.scheduler._preempt(next(iter(rig.scheduler._running)), StepBuilder(rig.limits))
    rig.add(*(new_sequence(2 + i, prompt=LONG - 40 * i, max_tokens=1) for i in range(1, 4)))
    assert counts(rig.step())[1] == PIECE
    return rig


def test_the_oldest_gets_its_pieces_also_after_what_it_had_found_is_gone() -> None:
    rig = preempted_without_its_beginning()
    assert {counts(rig.step()).get(1, 0) for _ in range(10)} == {PIECE}


def test_by_what_it_had_found_it_would_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "num_found", property(lambda s: s.cached_tokens, lambda s, value: None))
    rig = preempted_without_its_beginning()
    assert {counts(rig.step()).get(1, 0) for _ in range(10)} == {0}
