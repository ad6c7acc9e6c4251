"""A residency without bytes: `num_slots` adapters fit, a load takes a number of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from punica_core.protocol import AdapterRef, FileSignature
from punica_core.scheduler.plan import AdapterGrant, SkipReason


def adapter_ref(name: str, version: int = 1) -> AdapterRef:
    """A ref to an adapter; another `version` stands for other files under the same name."""
    signature = FileSignature(version, version, version, version)
    return AdapterRef(name=name, path=f"/adapters/{name}", config_signature=signature, weights_signature=signature)


class FakeResidency:
    """Slots are filled on demand; unpinned adapters are evicted, the one used longest ago first.

    num_slots: also what the sizes of all adapters may be together, each 1 unless a subclass says otherwise.
    """

    def __init__(self, num_slots: int, load_steps: int = 0) -> None:
        self.num_slots = num_slots
        self.load_steps = load_steps
        self.pins: Counter[AdapterRef] = Counter()
        self.slots: dict[AdapterRef, int] = {}  # resident, used longest ago first
        self.loading: dict[AdapterRef, int] = {}  # steps left
        self.num_evictions = 0
        self.asked: list[list[AdapterRef]] = []  # what `prefetch` was asked for
        self._slot_of_load: dict[AdapterRef, int] = {}
        self._free = list(range(num_slots))

    def acquire(self, ref: AdapterRef) -> AdapterGrant | SkipReason:
        if ref not in self.slots and ref not in self.loading:
            if not self._reserve(ref):
                return SkipReason.ADAPTER_NO_ROOM
            self._land()
        if ref in self.loading:
            return SkipReason.ADAPTER_LOADING
        self.slots[ref] = self.slots.pop(ref)
        self.pins[ref] += 1
        return AdapterGrant(self.slots[ref], adapter_key=key_of(ref))

    def size_of(self, ref: AdapterRef) -> int:
        return 1

    def has(self, ref: AdapterRef) -> bool:
        return ref in self.slots

    def fits_without(self, ref: AdapterRef, others: Collection[AdapterRef]) -> bool:
        leaving = (resident for resident in self.slots if not self.pins[resident] or resident in others)
        return self._room() + sum(map(self.size_of, leaving)) >= self.size_of(ref)

    def prefetch(self, soonest: Iterable[AdapterRef], wanted: Collection[AdapterRef]) -> None:
        self.asked.append(list(soonest))
        for ref in self.asked[-1]:
            if ref not in self.slots and ref not in self.loading and not self._reserve(ref, wanted):
                return
        self._land()

    def release(self, ref: AdapterRef) -> None:
        assert self.pins[ref] > 0, f"{ref.name} is released more often than it was acquired"
        self.pins[ref] -= 1

    def advance(self) -> None:
        """One step's time passes."""
        self.loading = {ref: left - 1 for ref, left in self.loading.items()}
        self._land()

    def fail(self, ref: AdapterRef) -> None:
        """The load of `ref` ends without an adapter."""
        del self.loading[ref]
        self._free.append(self._slot_of_load.pop(ref))

    def num_pins(self) -> int:
        return self.pins.total()

    def _reserve(self, ref: AdapterRef, spared: Collection[AdapterRef] = ()) -> bool:
        idle = [resident for resident in self.slots if not self.pins[resident] and resident not in spared]
        if self._room() + sum(map(self.size_of, idle)) < self.size_of(ref):
            return False
        while self._room() < self.size_of(ref):
            self._free.append(self.slots.pop(idle.pop(0)))
            self.num_evictions += 1
        self._slot_of_load[ref] = self._free.pop()
        self.loading[ref] = self.load_steps
        return True

    def _room(self) -> int:
        return self.num_slots - sum(map(self.size_of, [*self.slots, *self.loading]))

    def _land(self) -> None:
        for ref in [ref for ref, left in self.loading.items() if left <= 0]:
            del self.loading[ref]
            self.slots[ref] = self._slot_of_load.pop(ref)


class SizedResidency(FakeResidency):
    """The size of an adapter is the number at the end of its name, but no more than there is."""

    def size_of(self, ref: AdapterRef) -> int:
        return min(int(ref.name[-1]), self.num_slots)


def key_of(ref: AdapterRef | None) -> str:
    """The adapter_key that the fake gives `ref`; "" for the base model."""
    return f"key of {ref.name} v{ref.config_signature.inode}" if ref is not None else ""
