"""Tenants that need the same room for their adapters: who makes way for whom, and that it ends."""

from __future__ import annotations

import pytest

from punica_core.protocol import NewSequence
from punica_core.scheduler.scheduler import Scheduler
from punica_core.scheduler.waiting import WaitingQueue
from tests.support.residency import adapter_ref
from tests.support.scheduling import Rig, expected_tokens, make_rig, new_sequence

LIMIT = 1.0


class AsksNobodysTenant(WaitingQueue):
    def had_less(self, tenant: str, other: str) -> bool:
        return False


class MakesWayForAll(Scheduler):
    """Newer sequences make way whatever their tenants had."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._waiting.__class__ = AsksNobodysTenant


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
    rig, _requests = contended_rig(MakesWayForAll, max_num_batched_tokens=max_num_batched_tokens)
    with pytest.raises(AssertionError, match="unfinished"):
        rig.run()
    assert rig.scheduler.counters.preemptions > 100
    assert 2 not in rig.started


def tokens_beside_a_flood(scheduler: type[Scheduler], num_slots: int) -> dict[str, int]:
    """What each of two tenants got while one had asked for 20 cold adapters at once and the other asked, again as soon
    as it was answered, for one of its own."""
    rig = make_rig(num_slots=num_slots, load_steps=1, num_blocks=256, scheduler_type=scheduler)
    rig.add(*(new_sequence(i, max_tokens=20, adapter=adapter_ref(f"f{i}"), tenant="flood") for i in range(20)))
    rig.step()
    tokens = {"flood": 0, "modest": 0}
    asked = 100
    rig.add(new_sequence(asked, max_tokens=20, adapter=adapter_ref("m"), tenant="modest"))
    for _ in range(200):
        for row in rig.step().rows:
            tokens[row.sequence.tenant] += row.samples
        if len(rig.tokens(asked)) == 20:
            asked += 1
            rig.add(new_sequence(asked, max_tokens=20, adapter=adapter_ref("m"), tenant="modest"))
    return tokens


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_flood_of_cold_adapters_leaves_another_tenant_its_half(num_slots: int) -> None:
    tokens = tokens_beside_a_flood(Scheduler, num_slots)
    assert 0.6 < tokens["flood"] / tokens["modest"] < 1.6


def test_if_those_made_way_who_had_less_a_flood_would_leave_nothing() -> None:
    assert tokens_beside_a_flood(MakesWayForAll, num_slots=1)["modest"] == 0
