"""Which adapters are in a tier, who may stay, who must go. Pure bookkeeping: no tensors, no threads, no clock.

Life of a version (an `AdapterRef`: a path with its files' signatures):

    absent ──begin──▶ loading ──reserve──▶ loading, with room ──commit──▶ resident ──(evicted)──▶ absent
                       │    └──wait──▶ waiting for room ──begin──▶ loading, with room
                       └──fail──▶ failed ──(retry_seconds later)──▶ absent

A load reserves its bytes first. Idle adapters that must make room are set apart, not dropped: they go when the load
commits and stay if it fails, so a failed load changes nothing. While set apart they cannot be pinned; who wants one
waits until that load has ended. A freshly loaded adapter keeps its place for `claim_seconds`, so that a burst of cold
adapters larger than the tier cannot push each other out unused.

Content has one copy: versions of equal adapter_key share a resident. Versions that nobody will ask for again are
forgotten: at once, or when their last pin or their load ends.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from punica_core.errors import PunicaError
from punica_core.protocol import AdapterRef

MAX_REMEMBERED = 1024
"""Failures, and sizes of versions waiting for room, remembered at most; the oldest is forgotten first."""

PREFETCH_SHARE = 0.25
"""Of a tier's bytes: what was brought in before anybody could use it takes no more, but for the last one."""

V = TypeVar("V")


class Presence(enum.Enum):
    """Where a version stands; SET_APART is a resident that leaves if a load in flight commits."""

    ABSENT = enum.auto()
    LOADING = enum.auto()
    WAITING_FOR_ROOM = enum.auto()
    SET_APART = enum.auto()
    RESIDENT = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True, eq=False)
class Resident:
    """One copy of one content. refs: its versions with their pins; pins: their sum."""

    adapter_key: str
    slot: int
    nbytes: int
    claim_until: float
    refs: dict[AdapterRef, int] = field(default_factory=dict)
    pins: int = 0
    leaves_for: AdapterRef | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """reserved: bytes of the adapter, 0 before `reserve`; leaving: residents set apart for it."""

    reserved: int = 0
    leaving: tuple[Resident, ...] = ()

    @property
    def charge(self) -> int:
        # At least what would come back if the load failed: nobody else may use that room meanwhile.
        return max(self.reserved, sum(resident.nbytes for resident in self.leaving))


class ResidencyTable:
    """Bookkeeping of one tier. Not thread-safe: the owner holds a lock. Times are seconds of one clock.

    Invariant: the bytes of residents that are not set apart, plus those of all loads with room, are within
    budget_bytes. Violations of a method's contract raise ValueError.
    """

    def __init__(
        self,
        tier: str,
        budget_bytes: int,
        num_slots: int,
        *,
        retry_seconds: float = 2.0,
        claim_seconds: float = 2.0,
    ) -> None:
        self.tier = tier
        self.budget_bytes = budget_bytes
        self.num_slots = num_slots
        self.evictions = 0
        self._retry_seconds = retry_seconds
        self._claim_seconds = claim_seconds
        self._versions: dict[AdapterRef, Resident] = {}
        self._lru: OrderedDict[int, Resident] = OrderedDict()  # by slot, least recently used first
        self._by_key: dict[str, Resident] = {}
        self._loads: dict[AdapterRef, _Load] = {}
        self._waiting: OrderedDict[AdapterRef, int] = OrderedDict()
        self._failed: OrderedDict[AdapterRef, tuple[float, PunicaError]] = OrderedDict()
        self._doomed: set[AdapterRef] = set()  # to be forgotten; pinned or loading
        self._free_slots = deque(range(num_slots))
        self._charged_bytes = 0
        self._idle_bytes = 0  # of residents without pins that are not set apart

    @property
    def bytes_used(self) -> int:
        """Bytes of all residents, those set apart included."""
        return sum(resident.nbytes for resident in self._lru.values())

    @property
    def num_residents(self) -> int:
        return len(self._lru)

    @property
    def idle_bytes(self) -> int:
        """Bytes of residents without pins; some may have a claim on their place."""
        return self._idle_bytes

    @property
    def has_free_slot(self) -> bool:
        """Whether one more load finds a slot without anybody's leaving."""
        return len(self._free_slots) > self._slots_promised()

    def presence(self, ref: AdapterRef, now: float) -> Presence:
        """Where the version stands at `now`."""
        resident = self._versions.get(ref)
        if resident is not None:
            return Presence.RESIDENT if resident.leaves_for is None else Presence.SET_APART
        if ref in self._loads:
            return Presence.LOADING
        if ref in self._waiting:
            return Presence.WAITING_FOR_ROOM
        return Presence.ABSENT if self.failure(ref, now) is None else Presence.FAILED

    def failure(self, ref: AdapterRef, now: float) -> PunicaError | None:
        """Why the version failed, while that is remembered."""
        entry = self._failed.get(ref)
        if entry is not None and entry[0] <= now:
            del self._failed[ref]
            return None
        return entry[1] if entry else None

    def pin(self, ref: AdapterRef) -> Resident:
        """Use a RESIDENT version: its slot is its own until every pin is undone."""
        resident = self._versions.get(ref)
        if resident is None or resident.leaves_for is not None:
            raise ValueError(f"{ref.name!r} is not resident")
        if resident.pins == 0:
            self._idle_bytes -= resident.nbytes
        self._doomed.discard(ref)
        resident.refs[ref] += 1
        resident.pins += 1
        resident.claim_until = 0.0
        self._lru.move_to_end(resident.slot)
        return resident

    def unpin(self, ref: AdapterRef) -> tuple[Resident, ...]:
        """Undo one pin; each pin is undone once. Returns residents that are gone: a forgotten one's last pin."""
        resident = self._versions.get(ref)
        if resident is None or resident.refs[ref] == 0:
            raise ValueError(f"{ref.name!r} has no pin to undo")
        resident.refs[ref] -= 1
        resident.pins -= 1
        if resident.pins == 0:
            self._idle_bytes += resident.nbytes
        self._lru.move_to_end(resident.slot)
        return self._forget(ref) if ref in self._doomed and not resident.refs[ref] else ()

    def forget(self, path: str) -> tuple[Resident, ...]:
        """Nobody will ask for the versions of this folder again. Returns residents that are gone.

        One that is pinned goes with its last pin, unless it is pinned anew before; one that is loading goes at commit.
        """
        for ref in [ref for ref in self._waiting if ref.path == path]:
            del self._waiting[ref]
        for ref in [ref for ref in self._failed if ref.path == path]:
            del self._failed[ref]
        versions = [ref for ref in self._versions if ref.path == path]
        idle = [ref for ref in versions if not self._versions[ref].refs[ref]]
        self._doomed.update(ref for ref in (*versions, *self._loads) if ref.path == path)
        return tuple(resident for ref in idle for resident in self._forget(ref))

    def begin(self, ref: AdapterRef, now: float, spared: Collection[AdapterRef] = ()) -> bool:
        """A load starts; exactly one of `commit`, `wait`, `fail` ends it. For versions not loading or resident.

        False (nothing started): the version is WAITING_FOR_ROOM, and there still is none (see `reserve`).
        """
        if ref in self._loads or ref in self._versions:
            raise ValueError(f"{ref.name!r} is loading or resident already")
        nbytes = self._waiting.get(ref)
        self._loads[ref] = _Load()
        if nbytes is not None and not self.reserve(ref, nbytes, now, spared):
            del self._loads[ref]
            return False
        self._waiting.pop(ref, None)
        self._failed.pop(ref, None)
        return True

    def reserve(self, ref: AdapterRef, nbytes: int, now: float, spared: Collection[AdapterRef] = ()) -> bool:
        """Keep nbytes (at least 1) and a slot for a load, setting idle residents apart, least recently used first.

        False: pinned, just loaded and `spared` adapters leave too little room; nothing changed. Again with room: True.
        """
        load = self._loads[ref]
        if load.reserved:
            return load.reserved == nbytes
        leaving = self._choose_leaving(nbytes, now, spared)
        if leaving is None:
            return False
        for resident in leaving:
            resident.leaves_for = ref
            self._charged_bytes -= resident.nbytes
            self._idle_bytes -= resident.nbytes
        load.leaving = leaving
        load.reserved = nbytes
        self._charged_bytes += load.charge
        return True

    def find(self, ref: AdapterRef) -> Resident | None:
        """The resident of a version, pinned or not."""
        return self._versions.get(ref)

    def claim(self, resident: Resident, now: float) -> None:
        """Let a resident keep its place for claim_seconds, unless it is pinned before, as after a commit."""
        resident.claim_until = now + self._claim_seconds

    def evictable(
        self, now: float, spared: Collection[AdapterRef] = (), unused: Collection[AdapterRef] = ()
    ) -> Iterator[Resident]:
        """Residents that may leave, least recently used first: no pins but by `unused`, no claim, not set apart, not
        `spared`."""
        return (
            resident
            for resident in self._lru.values()
            if (not resident.pins or (unused and all(r in unused for r, pins in resident.refs.items() if pins)))
            and resident.leaves_for is None
            and resident.claim_until <= now
            and resident.refs.keys().isdisjoint(spared)
        )

    def fits_without(self, ref: AdapterRef, unused: Collection[AdapterRef], now: float) -> bool:
        """Whether a version WAITING_FOR_ROOM would find some if `unused` had no pins; of others it is not known."""
        leaving = list(self.evictable(now, (), unused))
        room = self.budget_bytes - self._charged_bytes + sum(resident.nbytes for resident in leaving)
        return room >= self._waiting.get(ref, 0) and (self.has_free_slot or bool(leaving))

    def may_prefetch(self, wanted: Collection[AdapterRef]) -> bool:
        """Whether what was brought in of the `wanted` ones, and nobody has used yet, leaves room for more of it."""
        unused = (r.nbytes for r in self._lru.values() if r.claim_until and not r.refs.keys().isdisjoint(wanted))
        return sum(unused) < PREFETCH_SHARE * self.budget_bytes

    def evict(self, resident: Resident) -> None:
        """A resident without pins leaves at once: for tiers whose memory must be free before a load can fill it."""
        if resident.pins or resident.leaves_for is not None:
            raise ValueError(f"the resident in slot {resident.slot} is in use")
        self._charged_bytes -= resident.nbytes
        self._idle_bytes -= resident.nbytes
        self._drop(resident)

    def join(self, ref: AdapterRef, adapter_key: str) -> tuple[Resident, ...] | None:
        """A load ends because its content is here already; returns residents that are gone. None: it is not here."""
        same = self._by_key.get(adapter_key)
        if same is None or same.leaves_for is not None:
            return None
        self._roll_back(ref)
        self._join(same, ref)
        return self._forget(ref) if ref in self._doomed else ()

    def abandon(self, ref: AdapterRef) -> None:
        """A load ends without an outcome: all is as before it, and nothing is remembered."""
        self._roll_back(ref)
        self._doomed.discard(ref)

    def wait(self, ref: AdapterRef, nbytes: int) -> None:
        """A load ends without having found room for its nbytes."""
        self._roll_back(ref)
        if ref not in self._doomed:
            _remember(self._waiting, ref, nbytes)
        self._doomed.discard(ref)

    def fail(self, ref: AdapterRef, error: PunicaError, now: float) -> None:
        """A load ends badly: all is as before it, and the failure is remembered for retry_seconds."""
        self._roll_back(ref)
        self._doomed.discard(ref)
        _remember(self._failed, ref, (now + self._retry_seconds, error))

    def commit(self, ref: AdapterRef, adapter_key: str, now: float) -> tuple[Resident, tuple[Resident, ...]]:
        """A load with room ends well: (the resident of its content, residents that are gone).

        If the content is here already, that copy is used and nobody leaves.
        """
        load = self._loads[ref]
        if not load.reserved:
            raise ValueError(f"{ref.name!r} has no reservation")
        same = self._by_key.get(adapter_key)
        if same is not None and same.leaves_for in (None, ref):
            self._roll_back(ref)
            self._join(same, ref)
            return same, self._forget(ref) if ref in self._doomed else ()
        del self._loads[ref]
        self._charged_bytes -= load.charge
        for gone in load.leaving:
            self._drop(gone)
        resident = Resident(adapter_key, self._free_slots.popleft(), load.reserved, now + self._claim_seconds)
        self._charged_bytes += resident.nbytes
        self._idle_bytes += resident.nbytes
        self._lru[resident.slot] = self._by_key[adapter_key] = resident
        self._join(resident, ref)
        return resident, (*load.leaving, *(self._forget(ref) if ref in self._doomed else ()))

    def check(self) -> None:
        """Assert every invariant; for tests and idle moments."""
        residents = list(self._lru.values())
        staying = [resident for resident in residents if resident.leaves_for is None]
        charges = sum(load.charge for load in self._loads.values() if load.reserved)
        assert self._charged_bytes == sum(resident.nbytes for resident in staying) + charges
        assert self._charged_bytes <= self.budget_bytes
        assert self._idle_bytes == sum(resident.nbytes for resident in staying if not resident.pins)
        assert sorted([*self._free_slots, *self._lru]) == list(range(self.num_slots))
        assert len(self._free_slots) >= self._slots_promised()
        for slot, resident in self._lru.items():
            assert resident.slot == slot
            assert resident.pins == sum(resident.refs.values()) >= 0
            assert all(self._versions[ref] is resident for ref in resident.refs)
            if resident.leaves_for is not None:
                assert resident.pins == 0
                assert resident in self._loads[resident.leaves_for].leaving
        assert sum(len(resident.refs) for resident in residents) == len(self._versions)
        assert all(self._lru.get(resident.slot) is resident for resident in self._by_key.values())
        assert not self._versions.keys() & self._loads.keys()
        assert self._doomed <= self._versions.keys() | self._loads.keys()
        assert all(self._versions[ref].refs[ref] for ref in self._doomed & self._versions.keys())
        assert max(len(self._waiting), len(self._failed)) <= MAX_REMEMBERED

    def _choose_leaving(self, nbytes: int, now: float, spared: Collection[AdapterRef]) -> tuple[Resident, ...] | None:
        room = self.budget_bytes - self._charged_bytes
        has_slot = self.has_free_slot
        if room + self._idle_bytes < nbytes:  # the usual "no" costs no walk
            return None
        leaving: list[Resident] = []
        for resident in self.evictable(now, spared):
            if room >= nbytes and (has_slot or leaving):
                break
            leaving.append(resident)
            room += resident.nbytes
        return tuple(leaving) if room >= nbytes and (has_slot or leaving) else None

    def _slots_promised(self) -> int:
        """Free slots that loads count on; a load that sets others apart gets one of theirs."""
        return sum(1 for load in self._loads.values() if load.reserved and not load.leaving)

    def _roll_back(self, ref: AdapterRef) -> None:
        load = self._loads.pop(ref)
        if load.reserved:
            self._charged_bytes -= load.charge
        for resident in load.leaving:
            resident.leaves_for = None
            self._charged_bytes += resident.nbytes
            self._idle_bytes += resident.nbytes

    def _join(self, resident: Resident, ref: AdapterRef) -> None:
        # Older states of the same files that nobody uses will not be asked for again.
        for other in [known for known, pins in resident.refs.items() if known.path == ref.path and not pins]:
            del resident.refs[other], self._versions[other]
            self._doomed.discard(other)
        resident.refs[ref] = 0
        self._versions[ref] = resident

    def _forget(self, ref: AdapterRef) -> tuple[Resident, ...]:
        """A version without pins is no more, nor is its resident if that was the last; one set apart is left to its
        load, or to the LRU order."""
        self._doomed.discard(ref)
        resident = self._versions.pop(ref)
        del resident.refs[ref]
        if resident.refs or resident.leaves_for is not None:
            return ()
        self._charged_bytes -= resident.nbytes
        self._idle_bytes -= resident.nbytes
        self._drop(resident)
        return (resident,)

    def _drop(self, resident: Resident) -> None:
        for ref in resident.refs:
            del self._versions[ref]
            self._doomed.discard(ref)
        del self._lru[resident.slot]
        if self._by_key.get(resident.adapter_key) is resident:
            del self._by_key[resident.adapter_key]
        self._free_slots.append(resident.slot)
        self.evictions += 1


def _remember(table: OrderedDict[AdapterRef, V], ref: AdapterRef, value: V) -> None:
    table[ref] = value
    if len(table) > MAX_REMEMBERED:
        table.popitem(last=False)
