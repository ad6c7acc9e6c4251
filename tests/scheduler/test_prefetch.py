"""Adapters of sequences that wait for a seat or for blocks are brought in meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from punica_core.protocol import AdapterRef
from punica_core.scheduler.admission import MAX_EARLY, AdmissionPass
from punica_core.scheduler.plan import SkipReason
from punica_core.scheduler.prefetch import INTERVAL_SECONDS, MAX_AHEAD
from punica_core.scheduler.sequence import Sequence
from punica_core.scheduler.step_builder import StepBuilder
from punica_core.scheduler.waiting import WaitingQueue
from tests.support.residency import FakeResidency, adapter_ref
from tests.support.scheduling import Rig, make_rig, new_sequence

COLD = 9
LOAD_STEPS = 5


class Lazy(FakeResidency):
    """Loads an adapter when it is acquired."""

    def prefetch(self, soonest: Iterable[AdapterRef], wanted: Collection[AdapterRef]) -> None:
        pass


def cold_behind_a_long_one(rig: Rig) -> int:
    """Steps from the end of who is in the way until a sequence with a cold adapter starts."""
    rig.add(new_sequence(0, prompt=4, max_tokens=12))
    rig.step()
    rig.add(new_sequence(COLD, prompt=4, adapter=adapter_ref("cold")))
    while COLD not in rig.started:
        rig.step()
    in_the_way = next(i for i, plan in enumerate(rig.plans) if i and 0 not in ids(plan.rows))
    return len(rig.plans) - 1 - in_the_way


def ids(rows: Iterable[object]) -> set[int]:
    return {row.sequence.request_id for row in rows}  # type: ignore[attr-defined]


@pytest.mark.parametrize("lacking", [{"max_num_seqs": 1}, {"num_blocks": 4, "max_model_len": 16}])
def test_an_adapter_is_there_when_its_sequence_may_start(lacking: dict[str, int]) -> None:
    rig = make_rig(load_steps=LOAD_STEPS, **lacking)  # type: ignore[arg-type]
    assert cold_behind_a_long_one(rig) == 0
    assert rig.residency.num_evictions == 0


def test_without_it_the_seat_is_free_before_the_adapter_is_there() -> None:
    rig = make_rig(load_steps=LOAD_STEPS, max_num_seqs=1, residency_type=Lazy)
    assert cold_behind_a_long_one(rig) == LOAD_STEPS


def test_what_is_wanted_sooner_is_asked_for_first_and_no_more_than_a_few() -> None:
    rig = make_rig(max_num_seqs=1, num_slots=64)
    rig.add(new_sequence(0, prompt=4, max_tokens=20))
    rig.step()
    names = [f"a{i % 40}" for i in range(60)]
    rig.add(*(new_sequence(1 + i, adapter=adapter_ref(name)) for i, name in enumerate(names)))
    rig.step()
    assert rig.residency.asked[-1] == [adapter_ref(name) for name in names[:MAX_AHEAD]]
    assert len(rig.residency.slots) == MAX_AHEAD


def test_adapters_that_are_wanted_do_not_make_room_for_each_other() -> None:
    rig = make_rig(max_num_seqs=1, num_slots=3)
    rig.add(new_sequence(0, prompt=4, max_tokens=20, adapter=adapter_ref("running")))
    rig.step()
    rig.add(*(new_sequence(1 + i, adapter=adapter_ref(f"a{i}")) for i in range(8)))
    for _ in range(5):
        rig.step()
    assert set(rig.residency.slots) == {adapter_ref("running"), adapter_ref("a0"), adapter_ref("a1")}
    assert rig.residency.num_evictions == 0


def test_nothing_is_asked_for_while_everybody_gets_a_turn() -> None:
    rig = make_rig(load_steps=LOAD_STEPS)
    rig.add(*(new_sequence(i, adapter=adapter_ref(name)) for i, name in enumerate("ab")))
    rig.step()
    assert rig.scheduler.waiting_by_reason == {SkipReason.ADAPTER_LOADING: 2}
    assert rig.residency.asked == []


def test_room_that_somebody_waits_for_is_left_alone() -> None:
    rig = make_rig(num_slots=1, max_num_seqs=2, overtake_limit=0.0)
    rig.add(new_sequence(0, max_tokens=20, adapter=adapter_ref("running")))
    rig.step()
    rig.add(new_sequence(1, adapter=adapter_ref("a")), new_sequence(2, max_tokens=20))
    rig.add(*(new_sequence(3 + i, adapter=adapter_ref(f"b{i}")) for i in range(3)))
    rig.step()
    assert rig.scheduler.waiting_by_reason == {SkipReason.ADAPTER_NO_ROOM: 1, SkipReason.NO_SEATS: 3}
    assert rig.residency.asked == []


@pytest.mark.parametrize("overtake_limit", [1e9, 0.0], ids=["fresh", "overdue"])
def test_adapters_of_a_line_without_blocks_are_asked_for_a_few_at_a_time(overtake_limit: float) -> None:
    """Else hundreds of cold ones take the place of all others before anybody can use them."""
    load_steps = 0 if overtake_limit else 3
    rig = make_rig(num_blocks=8, max_model_len=32, num_slots=64, load_steps=load_steps, overtake_limit=overtake_limit)
    hot = adapter_ref("hot")
    rig.add(new_sequence(0, prompt=4, max_tokens=20, adapter=hot))
    while 0 not in rig.started:
        rig.step()
    rig.add(*(new_sequence(1 + i, prompt=28, max_tokens=2, adapter=adapter_ref(f"a{i}")) for i in range(30)))
    rig.add(new_sequence(50, prompt=2, max_tokens=2, adapter=adapter_ref("small")))
    for _ in range(8):
        rig.step()
    first = [adapter_ref(f"a{i}") for i in range(MAX_EARLY)]
    small = adapter_ref("small")
    if overtake_limit:
        assert [ref for ref in rig.residency.slots if ref not in (hot, small)] == first
        assert 50 in rig.started, "it has blocks"
        assert rig.scheduler.waiting_by_reason == {SkipReason.NO_BLOCKS: MAX_EARLY, SkipReason.ADAPTER_LOADING: 22}
    else:
        assert set(rig.residency.slots) <= {hot, small, *(adapter_ref(f"a{i}") for i in range(MAX_AHEAD))}
    rig.run()
    assert rig.residency.num_evictions == 0


def test_who_was_too_early_and_whose_adapter_is_refused_later_in_the_pass_has_one_reason() -> None:
    rig = make_rig(num_blocks=8, max_model_len=32, num_slots=64, load_steps=9, overtake_limit=1e9)
    rig.add(new_sequence(0, prompt=4, max_tokens=20))
    rig.step()
    names = [f"a{i}" for i in range(MAX_EARLY)] + ["both"]
    rig.add(*(new_sequence(1 + i, prompt=28, adapter=adapter_ref(name)) for i, name in enumerate(names)))
    rig.add(new_sequence(50, prompt=2, adapter=adapter_ref("both")))
    rig.step()
    assert adapter_ref("both") in rig.residency.loading, "it was asked for, by the short one"
    assert rig.scheduler.waiting_by_reason == {SkipReason.ADAPTER_LOADING: MAX_EARLY + 2}


def test_who_has_its_adapter_or_waits_for_room_is_never_too_early() -> None:
    rig = make_rig()
    turn = AdmissionPass(StepBuilder(rig.limits), now=0.0, overdue_since=0.0)
    refs = [None, *map(adapter_ref, ("there", "refused", "cold"))]
    base, there, refused, cold = (Sequence.of(new_sequence(i, adapter=ref), 0.0) for i, ref in enumerate(refs))
    rig.residency.acquire(adapter_ref("there"))
    refused.no_room_since = 0.0

    def is_too_early(sequence: Sequence, num_spare: int = 1) -> bool:
        return turn.is_too_early(sequence, 2, num_spare, rig.residency)

    assert not any(is_too_early(cold) for _ in range(MAX_EARLY))
    assert is_too_early(cold)
    assert not is_too_early(cold, num_spare=2), "it may start"
    assert not any(map(is_too_early, (base, there, refused)))


def test_the_line_is_looked_at_now_and_then() -> None:
    rig = make_rig(max_num_seqs=1, num_slots=64)
    rig.step_seconds = INTERVAL_SECONDS / 4
    rig.add(new_sequence(0, prompt=4, max_tokens=40))
    rig.step()
    rig.add(new_sequence(1, adapter=adapter_ref("a")))
    for _ in range(16):
        rig.step()
    assert 3 <= len(rig.residency.asked) <= 5


def test_tenants_take_turns_and_the_least_served_begins() -> None:
    queue = WaitingQueue()
    serial = 0
    for tenant, names in {"greedy": "abc", "modest": "xay"}.items():
        queue.enter(tenant)
        for name in names:
            queue.push(Sequence.of(new_sequence(serial, adapter=adapter_ref(name), tenant=tenant), 0.0, serial))
            serial += 1
        queue.push(Sequence.of(new_sequence(serial, tenant=tenant), 0.0, serial))
        serial += 1
    queue.charge("greedy", 100.0)
    assert [ref.name for ref in queue.next_adapters(9)] == ["x", "a", "b", "y", "c"]
    assert [ref.name for ref in queue.next_adapters(2)] == ["x", "a"]
