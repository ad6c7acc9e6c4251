"""The residency table against every order of events that Hypothesis finds, and its promises one by one."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from punica_core.adapters import residency
from punica_core.adapters.residency import Presence, ResidencyTable, Resident
from punica_core.errors import AdapterInvalid
from punica_core.protocol import AdapterRef, FileSignature

ERROR = AdapterInvalid("damaged")


def make_ref(name: str, version: int = 0) -> AdapterRef:
    signature = FileSignature(1, 2, 3, version)
    return AdapterRef(name=name, path=f"/{name}", config_signature=signature, weights_signature=signature)


def make_table(budget_bytes: int = 100, num_slots: int = 8, claim_seconds: float = 0.0) -> ResidencyTable:
    return ResidencyTable("host", budget_bytes, num_slots, retry_seconds=2.0, claim_seconds=claim_seconds)


def load(table: ResidencyTable, ref: AdapterRef, nbytes: int, key: str | None = None, now: float = 0.0) -> None:
    assert table.begin(ref, now)
    assert table.reserve(ref, nbytes, now)
    table.commit(ref, key or f"key of {ref.path}", now)


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


REFS = [make_ref(name, version) for name in "abcd" for version in range(2)]
refs = st.sampled_from(REFS)


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


class ResidencyMachine(RuleBasedStateMachine):
    """Model: pins and loads as sets. Contents are few, so that versions often share one."""

    @initialize(budget=st.integers(1, 20), num_slots=st.integers(1, 4), claim=st.sampled_from([0.0, 3.0]))
    def start(self, budget: int, num_slots: int, claim: float) -> None:
        self.table = make_table(budget, num_slots, claim)
        self.now = 0.0
        self.pinned: list[tuple[AdapterRef, int, str]] = []
        self.loading: dict[AdapterRef, int] = {}
        self.held: dict[int, str] = {}  # what an owner has in its slots

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(ref=refs)
    def ask(self, ref: AdapterRef) -> None:
        presence = self.table.presence(ref, self.now)
        if presence is Presence.RESIDENT:
            resident = self.table.pin(ref)
            self.pinned.append((ref, resident.slot, resident.adapter_key))
        elif presence in (Presence.ABSENT, Presence.WAITING_FOR_ROOM) and self.table.begin(ref, self.now):
            self.loading[ref] = 0

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.pinned) - 1))
        self.take_out(self.table.unpin(self.pinned.pop(place)[0]))

    @rule(ref=refs)
    def forget(self, ref: AdapterRef) -> None:
        gone = self.table.forget(ref.path)
        assert not {other.slot for other in gone} & {slot for _, slot, _ in self.pinned}
        self.take_out(gone)

    def take_out(self, gone: Iterable[Resident]) -> None:
        for resident in gone:
            assert self.held.pop(resident.slot) == resident.adapter_key

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), nbytes=st.integers(1, 12), content=st.integers(0, 4))
    def advance(self, data: st.DataObject, nbytes: int, content: int) -> None:
        ref = data.draw(st.sampled_from(sorted(self.loading, key=REFS.index)))
        if not self.loading[ref]:
            evictions = self.table.evictions
            # A version that waited for room has its reservation, of the size it waited with.
            if self.table.reserve(ref, nbytes, self.now):
                self.loading[ref] = nbytes
            elif self.table._loads[ref].reserved:
                self.loading[ref] = self.table._loads[ref].reserved
            else:
                self.table.wait(ref, nbytes)
                del self.loading[ref]
            assert self.table.evictions == evictions, "nobody leaves before the newcomer is there"
        elif content == 0:
            self.table.fail(ref, ERROR, self.now)
            del self.loading[ref]
        else:
            resident, gone = self.table.commit(ref, f"content {content}", self.now)
            assert not {other.slot for other in gone} & {slot for _, slot, _ in self.pinned}
            assert resident.adapter_key == f"content {content}"
            self.take_out(other for other in gone if other is not resident)
            assert self.held.setdefault(resident.slot, resident.adapter_key) == resident.adapter_key
            self.take_out(other for other in gone if other is resident)
            del self.loading[ref]

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), content=st.integers(1, 4))
    def end_without_bringing_anything(self, data: st.DataObject, content: int) -> None:
        ref = data.draw(st.sampled_from(sorted(self.loading, key=REFS.index)))
        gone = self.table.join(ref, f"content {content}")
        if gone is None:
            self.table.abandon(ref)
            assert self.table.find(ref) is None
        self.take_out(gone or ())
        del self.loading[ref]

    @rule()
    def evict_the_oldest(self) -> None:
        for resident in list(self.table.evictable(self.now))[:1]:
            assert resident.slot not in {slot for _, slot, _ in self.pinned}
            self.table.evict(resident)
            self.take_out([resident])

    @invariant()
    def books_are_right(self) -> None:
        self.table.check()
        assert self.held == {slot: resident.adapter_key for slot, resident in self.table._lru.items()}

    @invariant()
    def pinned_versions_keep_their_slots(self) -> None:
        for ref, slot, key in self.pinned:
            resident = self.table._versions[ref]
            assert (resident.slot, resident.adapter_key) == (slot, key)

    def teardown(self) -> None:
        """Once all is released and all loads have failed, everybody who fits finds room."""
        for ref, _, _ in self.pinned:
            self.table.unpin(ref)
        for ref in self.loading:
            self.table.fail(ref, ERROR, self.now)
        newcomer = make_ref("newcomer")
        load(self.table, newcomer, self.table.budget_bytes, "newcomer", self.now + 10)
        assert self.table.num_residents == 1


ResidencyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestResidencyMachine = ResidencyMachine.TestCase
