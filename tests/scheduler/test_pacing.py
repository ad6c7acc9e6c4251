"""How many prompt tokens join a step that streams wait for."""

from __future__ import annotations

import pytest

from punica_core.config import EngineConfig
from punica_core.scheduler.admission import AdmissionPass
from punica_core.scheduler.pacing import MIN_CHUNK, STRETCH, Pacer, StepSizes
from punica_core.scheduler.plan import SkipReason, StepPlan, StepWork
from punica_core.scheduler.scheduler import Scheduler
from punica_core.scheduler.sequence import Sequence
from tests.support.residency import adapter_ref
from tests.support.scheduling import Rig, expected_tokens, make_rig, new_sequence

SIZES = StepSizes(decode=(2, 4, 8), beside_prompts=(0, 8), prompt_rows=(64, 128, 256, 512, 1024), max_prompts=4)


def seconds_of(work: StepWork) -> float:
    return 5e-3 + 20e-6 * (work.decode_rows + work.prompt_rows) + 2e-9 * work.attended


def taught(target_seconds: float, sizes: StepSizes | None = SIZES, *, scale: float = 1.0) -> Pacer:
    """A pacer that has seen steps of every kind."""
    pacer = Pacer(target_seconds, 2048, sizes)
    padded = (sizes or StepSizes()).padded
    for i in range(300):
        work = StepWork(1 + i % 8)
        if i % 3:
            work = work.with_prompt([0, 0, 9000][i % 5 % 3], 64 << i % 5)
        pacer.observe(work, scale * seconds_of(padded(work)))
    return pacer


def test_before_anything_was_measured_the_smallest_chunk_is_taken() -> None:
    assert Pacer(0.025, 2048, SIZES).room(StepWork(8), 0) == 64
    assert Pacer(0.025, 2048).room(StepWork(8), 0) == MIN_CHUNK
    assert Pacer(0.025, 32).room(StepWork(8), 0) == 32, "the budget is less than a chunk"


@pytest.mark.parametrize(("target", "room"), [(0.008, 128), (0.012, 256), (0.02, 512), (0.040, 1024), (9.0, 1024)])
def test_the_largest_size_that_fits_is_filled(target: float, room: int) -> None:
    pacer = taught(target)
    assert pacer.room(StepWork(8), 0) == room
    assert pacer.room(StepWork(8).with_prompt(0, 50), 0) == room - 50
    if target < 9.0:
        assert seconds_of(StepWork(8).with_prompt(0, room)) <= max(target, STRETCH * seconds_of(StepWork(8)))


def test_a_runner_without_sizes_gets_multiples_of_a_chunk() -> None:
    room = taught(0.02, None).room(StepWork(8), 0)
    assert room % MIN_CHUNK == 0
    assert 512 <= room <= 740


def test_tokens_that_attend_to_many_are_fewer() -> None:
    pacer = taught(0.02)
    assert pacer.room(StepWork(8), 0) == 512
    assert pacer.room(StepWork(8), 9000) == 256
    assert pacer.room(StepWork(8).with_prompt(9000, 256), 0) == 0


def test_no_more_prompts_than_the_runner_likes() -> None:
    work = StepWork(8)
    for _ in range(SIZES.max_prompts or 0):
        assert taught(0.04).room(work, 0) > 0
        work = work.with_prompt(0, 4)
    assert taught(0.04).room(work, 0) == 0


def test_streams_that_are_slow_alone_are_stretched() -> None:
    """A bound that no step keeps would else leave prompts the smallest chunk."""
    pacer = taught(0.02, scale=10.0)
    room = pacer.room(StepWork(8), 0)
    assert room > 64
    assert 10 * seconds_of(StepWork(8).with_prompt(0, room)) <= STRETCH * 10 * seconds_of(StepWork(8)) * 1.3


def test_the_smallest_chunk_is_taken_whatever_it_costs() -> None:
    pacer = taught(0.005)
    for _ in range(50):
        pacer.observe(StepWork(8).with_prompt(0, 64), 10.0)
        pacer.observe(StepWork(8), seconds_of(StepWork(8)))
    assert pacer.room(StepWork(8), 0) == 64
    assert pacer.room(StepWork(8).with_prompt(0, 60), 0) == 4
    assert pacer.room(StepWork(8).with_prompt(0, 64), 0) == 0


def test_zero_is_off() -> None:
    assert Pacer.of(EngineConfig(model="m", target_step_ms=0), StepSizes()) is None
    assert Pacer.of(EngineConfig(model="m"), StepSizes()) is not None


# In the scheduler, with steps of 16 ms a prompt token.


def paced_rig(target_seconds: float = 0.1, **options: object) -> Rig:
    sizes = StepSizes(prompt_rows=(4, 8, 16), max_prompts=2)
    options = {"num_blocks": 128, "max_num_batched_tokens": 64, "max_model_len": 256, **options}
    return make_rig(pacer=Pacer(target_seconds, 64, sizes), step_seconds=work_seconds, **options)  # type: ignore[arg-type]


def work_seconds(work: StepWork) -> float:
    return 0.01 + 0.001 * work.decode_rows + 0.016 * work.prompt_rows


def prompt_tokens(plan: StepPlan) -> int:
    return sum(row.count for row in plan.rows if row.count > 1)


def test_prompts_are_not_cut_while_nobody_streams() -> None:
    rig = paced_rig()
    rig.add(new_sequence(0, prompt=64, max_tokens=1), new_sequence(1, prompt=64, max_tokens=1))
    assert [prompt_tokens(rig.step()) for _ in range(2)] == [64, 64]


def stream_and_prompt(rig: Rig, **sampling: object) -> list[int]:
    """Prompt tokens of each step while a stream runs, until a long prompt has its first token."""
    rig.add(new_sequence(0, prompt=3, max_tokens=100, **sampling))
    for _ in range(5):
        rig.step()
    rig.add(new_sequence(1, prompt=90, max_tokens=4))
    counts = []
    while not rig.tokens(1):
        counts.append(prompt_tokens(rig.step()))
    return counts


def test_a_stream_keeps_its_pace_beside_a_prompt() -> None:
    rig = paced_rig()
    start = rig.now
    counts = stream_and_prompt(rig)
    assert max(counts) <= 8, "16 would take 267 ms"
    assert max(rig.step_times) <= 0.15
    assert rig.now - start < 90 * 0.016 * 2
    assert rig.tokens(1) == expected_tokens(new_sequence(1, prompt=90, max_tokens=4))[:1]


def test_without_a_pacer_it_waits() -> None:
    rig = make_rig(num_blocks=128, max_num_batched_tokens=64, max_model_len=256, step_seconds=work_seconds)
    assert max(stream_and_prompt(rig)) == 63
    assert max(rig.step_times) > 1.0


def test_a_bound_that_cannot_be_kept_starves_no_prompt() -> None:
    """Each step takes the smallest chunk at least, so the prompt is through within a known number of them."""
    counts = stream_and_prompt(paced_rig(target_seconds=1e-6))
    assert min(counts[:-1]) >= 4
    assert len(counts) <= 90 // 4 + 1


def test_prompts_that_wait_for_room_say_so_and_come_in_order() -> None:
    rig = paced_rig()
    rig.add(new_sequence(0, prompt=3, max_tokens=200))
    for _ in range(5):
        rig.step()
    rig.add(*(new_sequence(i, prompt=20, max_tokens=2) for i in range(1, 5)))
    rig.step()
    assert rig.scheduler.waiting_by_reason == {SkipReason.NO_TOKENS: 3}
    while 4 not in rig.started:
        rig.step()
    assert sorted(rig.started, key=lambda i: (rig.started[i], i)) == [0, 1, 2, 3, 4]


def test_a_stream_that_waits_for_its_own_token_is_waited_for() -> None:
    """With penalties it has no row in a step that runs ahead, but its next row comes behind that step."""
    rig = paced_rig()
    rig.add(new_sequence(0, prompt=3, max_tokens=50, presence_penalty=0.5))
    rig.step()
    in_flight = rig.scheduler.schedule(rig.now)
    rig.add(new_sequence(1, prompt=60, max_tokens=2))
    ahead = rig.scheduler.schedule(rig.now)
    assert [row.sequence.request_id for row in ahead.rows] == [1]
    assert prompt_tokens(ahead) <= 8
    rig.finish(in_flight, rig.model.execute(in_flight))


def test_nobody_waits_for_a_stream_whose_last_token_is_in_flight() -> None:
    rig = paced_rig()
    rig.add(new_sequence(0, prompt=3, max_tokens=2))
    rig.step()
    rig.scheduler.schedule(rig.now)
    rig.add(new_sequence(1, prompt=60, max_tokens=2))
    assert prompt_tokens(rig.scheduler.schedule(rig.now)) == 60


def test_equal_measurements_give_equal_plans() -> None:
    def trace() -> list[StepWork]:
        rig = paced_rig(target_seconds=0.3, num_slots=2, load_steps=1)
        for i in range(12):
            adapter = adapter_ref("abc"[i % 3]) if i % 4 else None
            rig.add(new_sequence(i, prompt=5 + 3 * i, max_tokens=3 + i, adapter=adapter))
        rig.run()
        return [plan.work for plan in rig.plans]

    first = trace()
    assert first == trace()
    assert len({work.prompt_rows for work in first if work.decode_rows}) > 2, "the case is too easy"


class ShallowOnly(Pacer):
    """Gives room for 4 tokens behind a prompt's beginning, and elsewhere only where no other prompt is."""

    def _find_room(self, work: StepWork, start: int) -> int:
        return 0 if start and work.prompts else max(4 - work.prompt_rows, 0)


def test_a_prompt_whose_beginning_is_cached_is_judged_by_where_it_goes_on() -> None:
    """It may find no room where one without such a beginning would."""
    rig = make_rig(num_blocks=200, max_model_len=64, max_num_batched_tokens=64, pacer=ShallowOnly(1.0, 64))
    shared = [i % 40 for i in range(40)]
    rig.add(new_sequence(0, shared, max_tokens=1))
    rig.run()
    rig.add(new_sequence(1, prompt=3, max_tokens=20))
    rig.step()
    rig.add(new_sequence(2, [7] * 2, max_tokens=1), new_sequence(3, [*shared, 1, 2, 3], max_tokens=1))
    assert {row.sequence.request_id: row.count for row in rig.step().rows} == {1: 1, 2: 2}
    assert rig.scheduler.waiting_by_reason == {SkipReason.NO_TOKENS: 1}
    assert {row.sequence.request_id: row.count for row in rig.step().rows} == {1: 1, 3: 3}
    assert rig.outputs[3][0].cached_tokens == 40


class CountsAdmissions(Scheduler):
    num_asked = 0

    def _admit(self, sequence: Sequence, turn: AdmissionPass) -> SkipReason | None:
        CountsAdmissions.num_asked += 1
        return super()._admit(sequence, turn)


def test_a_step_whose_prompts_are_complete_asks_nobody_else() -> None:
    rig = paced_rig(scheduler_type=CountsAdmissions)
    rig.add(new_sequence(0, prompt=3, max_tokens=50))
    rig.step()
    rig.add(*(new_sequence(i, prompt=20, max_tokens=2) for i in range(1, 40)))
    CountsAdmissions.num_asked = 0
    rig.step()
    assert CountsAdmissions.num_asked == 1


def test_work_is_counted_as_the_runner_pads_it() -> None:
    """100 rows that are computed as 1,024 do not make a row dear."""
    pacer = Pacer(0.03, 2048, StepSizes(decode=(8,), beside_prompts=(8,), prompt_rows=(64, 1024)))
    for _ in range(200):
        pacer.observe(StepWork(8), 0.005)
        pacer.observe(StepWork(8).with_prompt(0, 100), 0.025)
    assert pacer.room(StepWork(8), 0) == 1024
