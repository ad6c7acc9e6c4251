"""The promises of the residency table, one by one."""

from __future__ import annotations

import pytest

from punica_core.adapters import residency
from punica_core.adapters.residency import Presence
from tests.support.residency_table import ERROR, load, make_ref, make_table


def test_the_least_recently_used_leaves_first() -> None:
    table = make_table()
    a, b, c = make_ref("a"), make_ref("b"), make_ref("c")
    load(table, a, 50)
    load(table, b, 50)
    table.pin(a)
    table.unpin(a)
    load(table, c, 50)
    assert table.presence(b, 0) is Presence.ABSENT
    assert table.presence(a, 0) is Presence.RESIDENT
    assert table.evictions == 1


def test_a_pinned_adapter_stays_and_the_newcomer_waits_for_room() -> None:
    table = make_table()
    a, b = make_ref("a"), make_ref("b")
    load(table, a, 60)
    table.pin(a)
    assert table.begin(b, 0)
    assert not table.reserve(b, 60, 0)
    table.wait(b, 60)
    assert table.presence(b, 0) is Presence.WAITING_FOR_ROOM
    assert not table.begin(b, 0)
    table.unpin(a)
    assert table.begin(b, 0)
    assert table.reserve(b, 60, 0)
    table.check()


def test_a_failed_load_changes_nothing() -> None:
    table = make_table()
    a, b = make_ref("a"), make_ref("b")
    load(table, a, 60)
    table.begin(b, 0)
    assert table.reserve(b, 60, 0)
    assert table.presence(a, 0) is Presence.SET_APART
    table.fail(b, ERROR, 0)
    assert table.presence(a, 0) is Presence.RESIDENT
    assert table.evictions == 0
    table.check()


def test_only_idle_residents_without_a_claim_can_be_evicted() -> None:
    table = make_table(claim_seconds=2.0)
    a, b = make_ref("a"), make_ref("b")
    load(table, a, 60)
    assert list(table.evictable(1.9)) == []
    resident = table.pin(a)
    assert list(table.evictable(5.0)) == []
    with pytest.raises(ValueError, match="in use"):
        table.evict(resident)
    table.unpin(a)
    table.claim(resident, 5.0)
    assert list(table.evictable(6.9)) == []
    assert list(table.evictable(7.0)) == [resident]
    table.evict(resident)
    assert (table.presence(a, 7.0), table.evictions, table.bytes_used) == (Presence.ABSENT, 1, 0)
    load(table, b, 100)
    table.check()


def test_a_load_of_content_that_is_here_joins_it_without_room() -> None:
    table = make_table()
    a, twin, other = make_ref("a"), make_ref("twin"), make_ref("other")
    load(table, a, 100, "same")
    resident = table.pin(a)
    table.begin(twin, 0)
    assert table.join(twin, "same") == ()
    assert table.find(twin) is resident
    table.begin(other, 0)
    assert table.join(other, "another") is None
    assert table.presence(other, 0) is Presence.LOADING
    table.abandon(other)
    assert table.presence(other, 0) is Presence.ABSENT
    table.check()


def test_an_adapter_set_apart_cannot_be_pinned() -> None:
    table = make_table()
    a, b = make_ref("a"), make_ref("b")
    load(table, a, 60)
    table.begin(b, 0)
    table.reserve(b, 60, 0)
    with pytest.raises(ValueError, match="not resident"):
        table.pin(a)


def test_room_that_a_failure_would_give_back_is_promised_to_nobody_else() -> None:
    table = make_table()
    a, b, c = make_ref("a"), make_ref("b"), make_ref("c")
    load(table, a, 60)
    table.begin(b, 0)
    table.begin(c, 0)
    assert table.reserve(b, 50, 0)
    assert not table.reserve(c, 50, 0)
    assert table.reserve(c, 40, 0)
    table.fail(b, ERROR, 0)
    table.check()


def test_a_failure_is_remembered_for_a_while_and_only_of_its_version() -> None:
    table = make_table()
    old, new = make_ref("a", 0), make_ref("a", 1)
    table.begin(old, 0)
    table.fail(old, ERROR, 10.0)
    assert table.presence(old, 11.9) is Presence.FAILED
    assert table.failure(old, 11.9) is ERROR
    assert table.presence(new, 11.9) is Presence.ABSENT
    assert table.presence(old, 12.0) is Presence.ABSENT


def test_failures_remembered_are_bounded() -> None:
    table = make_table()
    for index in range(residency.MAX_REMEMBERED + 10):
        table.begin(make_ref(str(index)), 0)
        table.fail(make_ref(str(index)), ERROR, 0)
    table.check()
    assert table.presence(make_ref("0"), 0) is Presence.ABSENT


def test_equal_content_has_one_copy() -> None:
    table = make_table()
    a, b = make_ref("a"), make_ref("b")
    load(table, a, 60, "same")
    load(table, b, 40, "same")
    assert table.pin(a) is table.pin(b)
    assert table.bytes_used == 60
    table.unpin(a)
    table.begin(make_ref("c"), 0)
    assert not table.reserve(make_ref("c"), 50, 0), "b's pin must hold the copy"


def test_content_that_is_about_to_leave_is_not_joined() -> None:
    table = make_table()
    a, twin, c = make_ref("a"), make_ref("twin"), make_ref("c")
    load(table, a, 30, "same")
    table.begin(c, 0)
    assert table.reserve(c, 80, 0)
    load(table, twin, 20, "same")
    assert table.presence(twin, 0) is Presence.RESIDENT
    table.commit(c, "c", 0)
    assert table.presence(a, 0) is Presence.ABSENT
    assert table.presence(twin, 0) is Presence.RESIDENT
    load(table, a, 20, "same", now=10.0)
    assert table.pin(a) is table.pin(twin), "the key now stands for the copy that stayed"
    table.check()


def test_a_just_loaded_adapter_keeps_its_place_until_it_is_claimed() -> None:
    table = make_table(claim_seconds=5.0)
    a, b = make_ref("a"), make_ref("b")
    load(table, a, 60, now=0.0)
    table.begin(b, 4.9)
    assert not table.reserve(b, 60, 4.9)
    assert table.reserve(b, 60, 5.0), "unclaimed for five seconds"


def test_a_slot_is_not_reused_before_the_last_release() -> None:
    table = make_table(num_slots=1)
    a, b = make_ref("a"), make_ref("b")
    load(table, a, 1)
    slot = table.pin(a).slot
    table.pin(a)
    table.unpin(a)
    table.begin(b, 0)
    assert not table.reserve(b, 1, 0)
    table.unpin(a)
    assert table.reserve(b, 1, 0)
    resident, gone = table.commit(b, "b", 0)
    assert resident.slot == slot
    assert [other.adapter_key for other in gone] == ["key of /a"]


def test_a_pin_is_released_once() -> None:
    table = make_table()
    a = make_ref("a")
    load(table, a, 1)
    table.pin(a)
    table.unpin(a)
    with pytest.raises(ValueError, match="no pin to undo"):
        table.unpin(a)


def test_old_states_of_touched_files_are_forgotten() -> None:
    table = make_table()
    for version in range(100):
        load(table, make_ref("a", version), 10, "same content")
    table.check()
    assert table.presence(make_ref("a", 98), 0) is Presence.ABSENT
    assert table.presence(make_ref("a", 99), 0) is Presence.RESIDENT


def test_a_forgotten_adapter_that_is_idle_is_gone_at_once() -> None:
    table = make_table()
    a, b = make_ref("a"), make_ref("b")
    load(table, a, 60)
    load(table, b, 40)
    (gone,) = table.forget(a.path)
    assert gone.adapter_key == "key of /a"
    assert (table.presence(a, 0), table.presence(b, 0)) == (Presence.ABSENT, Presence.RESIDENT)
    assert table.bytes_used == 40
    load(table, make_ref("c"), 60)
    assert table.presence(b, 0) is Presence.RESIDENT  # nobody had to make room
    table.check()


def test_a_forgotten_adapter_that_is_in_use_goes_with_its_last_pin() -> None:
    table = make_table()
    a = make_ref("a")
    load(table, a, 60)
    table.pin(a)
    table.pin(a)
    assert table.forget(a.path) == ()
    assert table.unpin(a) == ()
    assert table.presence(a, 0) is Presence.RESIDENT
    (gone,) = table.unpin(a)
    assert gone.slot == 0
    assert table.num_residents == 0
    table.check()


def test_a_pin_taken_after_an_adapter_was_forgotten_keeps_it() -> None:
    table = make_table()
    a = make_ref("a")
    load(table, a, 60)
    table.pin(a)
    table.forget(a.path)
    table.pin(a)
    table.unpin(a)
    assert table.unpin(a) == ()
    assert table.presence(a, 0) is Presence.RESIDENT


def test_content_that_another_folder_has_is_not_forgotten_with_the_first() -> None:
    table = make_table()
    a, b = make_ref("a"), make_ref("b")
    load(table, a, 60, key="same")
    load(table, b, 60, key="same")
    assert table.forget(a.path) == ()
    assert (table.presence(a, 0), table.presence(b, 0)) == (Presence.ABSENT, Presence.RESIDENT)
    assert [resident.adapter_key for resident in table.forget(b.path)] == ["same"]
    table.check()


def test_an_adapter_forgotten_while_it_loads_does_not_stay() -> None:
    table = make_table()
    a, b = make_ref("a"), make_ref("b")
    load(table, b, 100)
    table.begin(a, 0)
    table.reserve(a, 60, 0)
    assert table.forget(a.path) == ()
    resident, gone = table.commit(a, "a", 0)
    assert resident in gone
    assert table.num_residents == 0
    table.check()


def test_what_is_remembered_of_a_forgotten_adapter_is_gone_too() -> None:
    table = make_table()
    failed, waits, pinned = make_ref("failed"), make_ref("waits"), make_ref("pinned")
    table.begin(failed, 0)
    table.fail(failed, ERROR, 0)
    load(table, pinned, 60)
    table.pin(pinned)
    table.begin(waits, 0)
    table.wait(waits, 60)
    for ref in (failed, waits):
        table.forget(ref.path)
        assert table.presence(ref, 0) is Presence.ABSENT
    table.check()
