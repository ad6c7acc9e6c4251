"""Tenants that need the same room for their adapters: who makes way for whom, and that it ends."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from punica_core.protocol import AdapterRef, NewSequence
from punica_core.scheduler.scheduler import Scheduler
from punica_core.scheduler.sequence import Sequence
from punica_core.scheduler.waiting import WaitingQueue
from tests.support.residency import FakeResidency, SizedResidency, adapter_ref
from tests.support.scheduling import Rig, expected_tokens, make_rig, new_sequence

LIMIT = 1.0


class AsksNobodysTenant(WaitingQueue):
    def had_less(self, tenant: str, other: str) -> bool:
        return False


class PutsNobodyFirst(WaitingQueue):
    def put_first(self, sequence: Sequence) -> None:
        pass


class OtherQueue(Scheduler):
    queue: type[WaitingQueue]

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._waiting.__class__ = self.queue


class AnyoneMakesWay(OtherQueue):
    """Newer sequences make way whatever their tenants had."""

    queue = AsksNobodysTenant


class NobodyGoesFirst(OtherQueue):
    """Others make way for a sequence, which then waits for its turn as everybody does."""

    queue = PutsNobodyFirst


class AnyoneMakesWayInVain(OtherQueue):
    queue = type("Both", (AsksNobodysTenant, PutsNobodyFirst), {})


def contended_rig(scheduler: type[Scheduler], **options: int) -> tuple[Rig, list[NewSequence]]:
    """One place for adapters and two tenants, of which one had less than the other. Its newer sequence runs while the
    other's cold adapter has waited for room for two limits."""
    requests = [
        new_sequence(0, prompt=62, max_tokens=1, tenant="busy"),
        new_sequence(1, prompt=2, max_tokens=4, adapter=adapter_ref("hot"), tenant="quiet"),
        new_sequence(2, prompt=3, max_tokens=3, adapter=adapter_ref("cold"), tenant="busy"),
        new_sequence(3, prompt=9, max_tokens=30, adapter=adapter_ref("hot"), tenant="quiet"),
    ]
    rig = make_rig(num_slots=1, load_steps=1, adapter_wait_limit=LIMIT, scheduler_type=scheduler, **options)
    rig.add(*requests[:2])
    while 1 not in rig.started:
        rig.step()
    rig.add(*requests[2:])
    return rig, requests


# What comes back after it made way fills a step, so that nobody else has a turn in it; or leaves room in it.
BUDGETS = pytest.mark.parametrize("max_num_batched_tokens", [8, 32])


@BUDGETS
def test_sequences_that_need_the_same_room_come_to_an_end(max_num_batched_tokens: int) -> None:
    rig, requests = contended_rig(Scheduler, max_num_batched_tokens=max_num_batched_tokens)
    rig.run(max_steps=100)
    assert rig.scheduler.counters.preemptions <= 1
    for request in requests:
        assert rig.tokens(request.request_id) == expected_tokens(request)


@BUDGETS
def test_if_those_made_way_whose_turn_comes_first_that_would_not_end(max_num_batched_tokens: int) -> None:
    rig, _requests = contended_rig(AnyoneMakesWayInVain, max_num_batched_tokens=max_num_batched_tokens)
    with pytest.raises(AssertionError, match="unfinished"):
        rig.run()
    assert rig.scheduler.counters.preemptions > 100
    assert 2 not in rig.started


def tokens_beside_a_flood(scheduler: type[Scheduler], num_slots: int) -> dict[str, int]:
    """What each of two tenants got while one had asked for 40 cold adapters at once and the other asked, again as soon
    as it was answered, for one of its own."""
    rig = make_rig(num_slots=num_slots, load_steps=1, num_blocks=256, scheduler_type=scheduler)
    rig.add(*(new_sequence(i, max_tokens=20, adapter=adapter_ref(f"f{i}"), tenant="flood") for i in range(40)))
    rig.step()
    tokens = {"flood": 0, "modest": 0}
    asked = 99
    for _ in range(400):
        if asked not in rig.outputs or len(rig.tokens(asked)) == 20:
            asked += 1
            rig.add(new_sequence(asked, max_tokens=20, adapter=adapter_ref("m"), tenant="modest"))
        for row in rig.step().rows:
            tokens[row.sequence.tenant] += row.samples
    return tokens


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_flood_of_cold_adapters_starves_no_other_tenant(num_slots: int) -> None:
    tokens = tokens_beside_a_flood(Scheduler, num_slots)
    assert tokens["flood"] < 2 * tokens["modest"]


def test_if_those_made_way_who_had_less_a_flood_would_starve_it() -> None:
    tokens = tokens_beside_a_flood(AnyoneMakesWay, num_slots=1)
    assert tokens["modest"] == 0
    assert tokens["flood"] > 300


def start_among_streams(scheduler: type[Scheduler], load_steps: int) -> tuple[float, int]:
    """Two tenants stream as much as each other, now one and now the other ahead, and one's cold adapter needs the room
    of the other's. Seconds until its sequence starts, and how often others made way."""
    rig = make_rig(
        num_slots=1, load_steps=load_steps, adapter_wait_limit=LIMIT, num_blocks=256, scheduler_type=scheduler
    )
    live: dict[tuple[str, int], int] = {}

    def step(*requests: NewSequence) -> None:
        for tenant, prompt, max_tokens in ("even", 2, 2), ("odd", 12, 3):
            for client in (tenant, 0), (tenant, 1):
                outputs = rig.outputs[live[client]] if client in live else []
                if client not in live or (outputs and outputs[-1].finish_reason):
                    live[client] = len(rig.outputs)
                    rig.add(new_sequence(live[client], prompt=prompt, max_tokens=max_tokens, tenant=tenant))
        rig.add(*requests)
        rig.step()

    step()
    step(new_sequence(1001, prompt=2, max_tokens=4, adapter=adapter_ref("hot"), tenant="even"))
    cold = new_sequence(1002, prompt=3, max_tokens=3, adapter=adapter_ref("cold"), tenant="odd")
    asked = rig.now
    step(cold, new_sequence(1003, prompt=9, max_tokens=50, adapter=adapter_ref("hot"), tenant="even"))
    while 1002 not in rig.started:
        step()
    return rig.started[1002] - asked, rig.scheduler.counters.preemptions


@pytest.mark.parametrize("load_steps", [3, 6])
def test_a_sequence_for_which_others_made_way_starts_before_they_come_back(load_steps: int) -> None:
    waited, preemptions = start_among_streams(Scheduler, load_steps)
    assert waited <= 2 * LIMIT + (load_steps + 3) * 0.1
    assert preemptions == 1


@pytest.mark.parametrize("load_steps", [3, 6])
def test_if_it_did_not_go_first_they_would_have_made_way_in_vain(load_steps: int) -> None:
    waited, preemptions = start_among_streams(NobodyGoesFirst, load_steps)
    assert waited > 2 * LIMIT + (load_steps + 3) * 0.1
    assert preemptions > 1


class Hopeful(SizedResidency):
    def fits_without(self, ref: AdapterRef, others: Collection[AdapterRef]) -> bool:
        return True


def stream_beside_one_that_waits(residency: type[FakeResidency]) -> Rig:
    """An adapter that finds room when the oldest sequence has ended, and not before, whoever else makes way."""
    rig = make_rig(num_slots=4, load_steps=1, max_model_len=128, adapter_wait_limit=LIMIT, residency_type=residency)
    rig.add(new_sequence(0, prompt=2, max_tokens=60, adapter=adapter_ref("old 2")))
    rig.step()
    rig.add(new_sequence(1, prompt=2, max_tokens=4, adapter=adapter_ref("cold 3")))
    rig.step()
    rig.add(*(new_sequence(2 + i, prompt=2, max_tokens=45, adapter=adapter_ref("small 1")) for i in range(3)))
    while 1 not in rig.started:
        rig.step()
    return rig


def test_nobody_makes_way_if_all_who_would_are_not_enough() -> None:
    rig = stream_beside_one_that_waits(SizedResidency)
    assert rig.scheduler.counters.preemptions == 0
    assert [len(rig.tokens(i)) for i in range(5)] == [60, 1, 45, 45, 45]


def test_else_they_would_wait_with_it() -> None:
    rig = stream_beside_one_that_waits(Hopeful)
    assert rig.scheduler.counters.preemptions == 3
    assert max(len(rig.tokens(i)) for i in (2, 3, 4)) < 2 * LIMIT / 0.1 + 3
