"""The residency table against every order of events that Hypothesis finds."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from punica_core.adapters.residency import Presence, Resident
from punica_core.protocol import AdapterRef
from tests.support.residency_table import ERROR, load, make_ref, make_table

REFS = [make_ref(name, version) for name in "abcd" for version in range(2)]
refs = st.sampled_from(REFS)


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

    def is_staying(self, ref: AdapterRef) -> bool:
        return self.table.presence(ref, self.now) is Presence.RESIDENT

    def take_out(self, gone: Iterable[Resident]) -> None:
        for resident in gone:
            assert self.held.pop(resident.slot) == resident.adapter_key

    @precondition(lambda self: self.loading)
    @rule(
        data=st.data(),
        nbytes=st.integers(1, 12),
        content=st.integers(0, 4),
        spared=st.sampled_from([[], REFS[:4], REFS]),
    )
    def advance(self, data: st.DataObject, nbytes: int, content: int, spared: list[AdapterRef]) -> None:
        ref = data.draw(st.sampled_from(sorted(self.loading, key=REFS.index)))
        if not self.loading[ref]:
            evictions = self.table.evictions
            # A version that waited for room has its reservation, of the size it waited with.
            staying = {version for version in spared if self.is_staying(version)}
            if self.table.reserve(ref, nbytes, self.now, spared):
                self.loading[ref] = nbytes
            elif self.table._loads[ref].reserved:
                self.loading[ref] = self.table._loads[ref].reserved
            else:
                self.table.wait(ref, nbytes)
                del self.loading[ref]
            assert all(map(self.is_staying, staying)), "one that is spared was set apart"
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

    @precondition(lambda self: self.table._waiting)
    @rule(data=st.data(), unused=st.sets(refs))
    def make_way(self, data: st.DataObject, unused: set[AdapterRef]) -> None:
        """Who waits for room finds some exactly when it was said that it would."""
        ref = data.draw(st.sampled_from(sorted(self.table._waiting, key=REFS.index)))
        fits = self.table.fits_without(ref, unused, self.now)
        for version, _slot, _key in self.pinned:
            if version in unused:
                self.take_out(self.table.unpin(version))
        self.pinned = [pin for pin in self.pinned if pin[0] not in unused]
        assert self.table.begin(ref, self.now) == fits
        if fits:
            self.loading[ref] = 0

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
