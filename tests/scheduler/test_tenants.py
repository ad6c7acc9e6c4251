"""Fairness between tenants: virtual token counters."""

from __future__ import annotations

from punica_core.scheduler.plan import SkipReason
from punica_core.scheduler.sequence import Sequence
from punica_core.scheduler.waiting import WaitingQueue
from tests.support.residency import adapter_ref
from tests.support.scheduling import Rig, expected_tokens, make_rig, new_sequence

EVER = float("inf")


def waiting(*tenants: str) -> tuple[WaitingQueue, list[Sequence]]:
    queue, sequences = WaitingQueue(), []
    for serial, tenant in enumerate(tenants):
        sequence = Sequence.of(new_sequence(serial, tenant=tenant), now=float(serial))
        sequence.serial = serial
        queue.enter(tenant)
        queue.push(sequence)
        sequences.append(sequence)
    return queue, sequences


def order(queue: WaitingQueue) -> list[int]:
    return [sequence.request_id for sequence in queue.order(EVER, in_use=(), refused=())]


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    queue, sequences = waiting("t", "t", "t")
    queue.remove(sequences[0])
    queue.push(sequences[0])
    assert order(queue) == [0, 1, 2]


def test_the_tenant_that_was_served_less_comes_first() -> None:
    queue, _sequences = waiting("busy", "busy", "quiet")
    queue.charge("busy", 10)
    assert order(queue) == [2, 0, 1]


def test_turns_follow_what_is_charged_meanwhile() -> None:
    queue, _sequences = waiting("a", "a", "a", "b", "b", "b")
    turns = []
    for sequence in queue.order(EVER, in_use=(), refused=()):
        turns.append(sequence.request.tenant)
        queue.charge(sequence.request.tenant, 1)
    assert turns == ["a", "b", "a", "b", "a", "b"]


def test_who_was_put_first_comes_before_those_who_were_served_less() -> None:
    queue, sequences = waiting("quiet", "busy", "busy", "quiet")
    queue.charge("busy", 10)
    queue.put_first(sequences[2])
    queue.put_first(sequences[1])
    assert order(queue) == [1, 2, 0, 3]
    queue.remove(sequences[2])
    queue.push(sequences[2])
    assert order(queue) == [1, 0, 3, 2]


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    queue, _sequences = waiting("a")
    queue.charge("a", 100)
    queue.enter("b")
    newcomer = Sequence.of(new_sequence(7, tenant="b"), now=0.0)
    newcomer.serial = 7
    queue.push(newcomer)
    assert order(queue) == [0, 7]


def test_a_tenant_cannot_shed_its_debt_by_a_short_absence() -> None:
    queue, sequences = waiting("a", "b")
    queue.charge("a", 100)
    queue.remove(sequences[0])
    queue.leave("a")
    queue.enter("a")
    queue.push(sequences[0])
    assert order(queue) == [1, 0]


def test_idle_tenants_are_forgotten_once_they_owe_nothing() -> None:
    queue, _sequences = waiting("stays")
    for number in range(1000):
        queue.enter(f"guest {number}")
        queue.charge(f"guest {number}", 1)
        queue.charge("stays", 2)
        queue.leave(f"guest {number}")
    assert len(queue._served) < 100


def test_a_debt_is_kept_however_many_tenants_come_and_go() -> None:
    queue, sequences = waiting("a", "b")
    queue.charge("a", 100)
    queue.remove(sequences[0])
    queue.leave("a")
    for number in range(1000):
        queue.enter(f"guest {number}")
        queue.leave(f"guest {number}")
    queue.enter("a")
    queue.push(sequences[0])
    assert order(queue) == [1, 0]


def waiting_for_adapters(*names: str) -> WaitingQueue:
    queue = WaitingQueue()
    for serial, name in enumerate(names):
        sequence = Sequence.of(new_sequence(serial, adapter=adapter_ref(name)), now=float(serial))
        sequence.serial = serial
        queue.enter("")
        queue.push(sequence)
    return queue


def test_sequences_of_an_adapter_in_use_pass_only_those_that_arrived_recently() -> None:
    queue = waiting_for_adapters("a", "b", "c", "b", "c")
    in_use = {adapter_ref("c")}
    ids = [sequence.request_id for sequence in queue.order(arrived_until=1.5, in_use=in_use, refused=())]
    assert ids == [0, 1, 2, 4, 3]


def test_a_refused_adapter_is_asked_for_once() -> None:
    queue = waiting_for_adapters("a", "b", "a", "b", "a")
    refused: set[object] = set()
    ids = []
    for sequence in queue.order(arrived_until=EVER, in_use=(), refused=refused):
        ids.append(sequence.request_id)
        if sequence.adapter == adapter_ref("a"):
            refused.add(sequence.adapter)
    assert ids == [0, 1, 3]


def served_tokens(rig: Rig) -> dict[str, int]:
    served: dict[str, int] = {}
    for plan in rig.plans:
        for row in plan.rows:
            tenant = row.sequence.request.tenant
            served[tenant] = served.get(tenant, 0) + row.count
    return served


def test_a_flood_of_one_tenant_does_not_keep_another_from_its_half() -> None:
    rig = make_rig(max_num_seqs=4, num_blocks=256)
    rig.add(*(new_sequence(i, tenant="flood") for i in range(100)))
    rig.step()
    rig.add(*(new_sequence(200 + i, tenant="modest") for i in range(20)))
    before = served_tokens(rig)
    for _ in range(25):
        rig.step()
    after = served_tokens(rig)
    shares = [after[tenant] - before.get(tenant, 0) for tenant in ("flood", "modest")]
    assert 0.6 < shares[0] / shares[1] < 1.6


def test_a_tenant_alone_gets_everything() -> None:
    rig = make_rig(max_num_seqs=4, num_blocks=256)
    requests = [new_sequence(i, tenant="only") for i in range(10)]
    rig.add(*requests)
    plan = rig.step()
    assert len(plan.rows) == 3
    assert rig.scheduler.waiting_by_reason == {SkipReason.NO_TOKENS: 7}
    rig.run()
    assert all(rig.tokens(request.request_id) == expected_tokens(request) for request in requests)


def test_seats_are_named_as_the_reason_when_they_are_all_taken() -> None:
    rig = make_rig(max_num_seqs=2)
    rig.add(*(new_sequence(i, prompt=2) for i in range(5)))
    rig.step()
    assert rig.scheduler.waiting_by_reason == {SkipReason.NO_SEATS: 3}
    stats = rig.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_by_reason) == (2, 3, {"no_seats": 3})
