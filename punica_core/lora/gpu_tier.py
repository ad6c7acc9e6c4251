"""The GPU tier: adapters in the arena, on top of the host tier, handed out by the slot of their table records.

    disk ──AdapterCache──▶ host memory ──ArenaWriter, on a thread and a stream of its own──▶ arena + tables

`acquire`, `release` and `poll` never wait, neither for a thread's work nor for the device. A load goes: host copy
pinned → room found, on the copying thread → resident, not yet granted → copied → host copy released → granted. One that
finds no room is told so at every `acquire` until there is some, which that `acquire` takes for it: between the two the
scheduler counts how long it waits, and what it frees for one adapter no other can pin first.

When memory may be overwritten: a pin lasts from `acquire` until the scheduler has processed the last step that uses the
slot, so an adapter without pins is read by no step, queued or running. Only such adapters are evicted, and only their
ranges and slots are written to.

Fragmentation: an adapter takes one range of the arena, or, if none is long enough, several, cut between matrices. If
that fails too, more idle adapters are evicted, the one used longest ago first, until it fits; if it would not fit
without any of them, none is evicted and the newcomer waits. So it waits only for pinned adapters, and at most one
matrix of room is wasted in each gap between them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from punica_core.adapters.residency import Presence, ResidencyTable, Resident
from punica_core.errors import AdapterError, AdapterTooLarge, InternalError, PunicaError
from punica_core.lora.arena_layout import AdapterLayout, Run, lay_out
from punica_core.lora.arena_writer import BUFFER_BYTES, ArenaWriter
from punica_core.lora.cache import AdapterCache, CacheStats
from punica_core.lora.free_ranges import fewest_to_give
from punica_core.lora.gpu_loads import Denials, GpuLoad
from punica_core.lora.landing import LANDING_BYTES, LandingMemory
from punica_core.lora.segments import Int32Array
from punica_core.lora.table_modules import TableModules, largest_rank
from punica_core.lora.tables import AdapterTables, Arena, is_affine, shape_of
from punica_core.lora.vocabulary_step import SlotVocabulary, slot_vocabulary
from punica_core.ops.layout import ROW_ALIGNMENT
from punica_core.protocol import AdapterLoad, AdapterRef
from punica_core.scheduler.plan import AdapterGrant, SkipReason

NUM_SLOTS = 4096
"""Adapters resident at most. The tables take 48 bytes for each of them and each module: 44 MB for 224 modules."""

_Refs = Collection[AdapterRef]
_Runs = tuple[Run, ...]
_log = logging.getLogger(__name__)


class _Closed(Exception):
    """Ends the copy of a tier that was closed meanwhile."""


class GpuAdapterTier:
    """Implements `scheduler.plan.Residency`, and what the engine asks of an `AdapterCache`.

    host: where adapters come from. modules: those of the model's tables.
    budget_bytes: of the arena. landing_bytes: of page-locked memory for packed adapters, at most. dtype, device: the
    model's; on a CPU it works alike, for tests. on_loaded: called after each end of a load in either tier, on a thread
    of its own. clock: seconds, the clock of `poll`.
    """

    def __init__(
        self,
        host: AdapterCache,
        modules: TableModules,
        budget_bytes: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        num_slots: int = NUM_SLOTS,
        retry_seconds: float = 2.0,
        claim_seconds: float = 2.0,
        buffer_bytes: int = BUFFER_BYTES,
        landing_bytes: int = LANDING_BYTES,
        on_loaded: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._dtype = dtype
        self._on_loaded = on_loaded
        self._clock = clock
        self._modules = modules
        num_elements = budget_bytes // dtype.itemsize // ROW_ALIGNMENT * ROW_ALIGNMENT
        self.arena = Arena(num_elements, dtype=dtype, device=device)
        self.tables = AdapterTables(modules.count, num_slots, device=device)
        self.vocabulary: dict[int, SlotVocabulary] = {}
        """By slot, of adapters that change embedding or head."""
        self._writer = ArenaWriter(self.arena, self.tables, buffer_bytes=buffer_bytes)
        self._table = ResidencyTable(
            "gpu", self.arena.buffer.nbytes, num_slots, retry_seconds=retry_seconds, claim_seconds=claim_seconds
        )
        self._runs: dict[int, _Runs] = {}  # by slot
        self._copying: set[int] = set()  # slots of residents that are not there yet; each has a pin of ours
        self._denials = Denials()
        self._failures: dict[AdapterRef, PunicaError] = {}
        self._loads: list[AdapterLoad] = []
        self._queue: deque[GpuLoad] = deque()
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._loaded = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        host.listen(self._announce)
        page_locked = self.arena.buffer.device.type == "cuda"
        landing_bytes = min(landing_bytes, self.arena.buffer.nbytes)  # nothing larger is ever served
        host.land_in(LandingMemory(landing_bytes, dtype=dtype, page_locked=page_locked))

    @property
    def slot_rank(self) -> Int32Array:
        """int32 [N]: the largest lora_rank of the adapter in each slot that is granted."""
        return self.tables.slot_rank

    def acquire(self, ref: AdapterRef) -> AdapterGrant | SkipReason:
        """See `Residency.acquire`. For a version that failed a moment ago the next `poll` reports that again."""
        with self._lock:
            now = self._clock()
            resident = self._table.find(ref)
            if resident is not None:
                if resident.slot in self._copying:
                    return SkipReason.ADAPTER_LOADING
                self._table.pin(ref)
                return AdapterGrant(resident.slot, resident.adapter_key)
            error = self._table.failure(ref, now)
            if error is None:
                return self._start(ref, now)
            self._failures[ref] = error
        self._announce()
        return SkipReason.ADAPTER_LOADING

    def release(self, ref: AdapterRef) -> None:
        """Undo one successful `acquire`, when no step that reads the slot is queued. ValueError for one too many."""
        with self._lock:
            self._free(self._table.unpin(ref))
            self._denials.released()

    def has(self, ref: AdapterRef) -> bool:
        """See `Residency.has`."""
        with self._lock:
            resident = self._table.find(ref)
            return resident is not None and resident.slot not in self._copying

    def fits_without(self, ref: AdapterRef, others: Collection[AdapterRef]) -> bool:
        """See `Residency.fits_without`."""
        with self._lock:
            denied = self._denials.part_sizes(ref)
            if denied is not None:
                return self._leaving_for(denied, self._clock(), (), others) is not None
        return self._host.fits_without(ref, ())  # that is where it found none, and steps use nothing of it

    def prefetch(self, soonest: Iterable[AdapterRef], wanted: Collection[AdapterRef]) -> None:
        """See `Residency.prefetch`. Nothing is copied in advance while anything is copied."""
        self._host.prefetch(soonest, wanted)
        with self._lock:
            if self._queue or self._copying or not self._table.may_prefetch(wanted):
                return
            now = self._clock()
            ready = (r for r in soonest if self._table.presence(r, now) is Presence.ABSENT and self._host.has(r))
            if (ref := next(ready, None)) is not None:
                self._start(ref, now, wanted)

    def forget(self, path: str) -> None:
        """Nobody will ask for the adapter in this folder again: give its memory back, if in use when that ends."""
        self._host.forget(path)
        with self._lock:
            self._free(self._table.forget(path))

    def poll(self, now: float) -> list[tuple[AdapterRef, PunicaError]]:
        """Versions whose load failed in either tier since the last poll."""
        failures = dict(self._host.poll(now))
        with self._lock:
            failures |= self._failures
            self._failures = {}
        return list(failures.items())

    def wait_for_load(self, timeout: float) -> bool:
        """Sleep until a load ends in either tier, at most `timeout` seconds; True if one did since the last call."""
        ended = self._loaded.wait(timeout)
        self._loaded.clear()
        return ended

    def stats(self) -> CacheStats:
        host = self._host.stats()
        with self._lock:
            loads, self._loads = self._loads, []
            return CacheStats(
                host.loads + loads,
                host.evictions + self._table.evictions,
                host.bytes_used,
                host.resident,
                self._table.bytes_used,
                self._table.num_residents,
            )

    def close(self) -> None:
        """Stop loading, in both tiers. Granted adapters stay usable."""
        self._host.close()
        with self._lock:
            self._closed = True
            self._has_work.notify_all()

    def _start(self, ref: AdapterRef, now: float, spared: _Refs = ()) -> SkipReason:
        """Begin or continue a load; the reason to wait. spared: who need not make room for it."""
        if self._table.presence(ref, now) is Presence.LOADING:
            return SkipReason.ADAPTER_LOADING
        denied = self._denials.part_sizes(ref)
        if denied is not None and not self._fits_now(ref, denied, now, spared):
            return SkipReason.ADAPTER_NO_ROOM
        answer = self._host.acquire(ref)
        if isinstance(answer, SkipReason):
            return answer
        if self._closed:
            self._host.release(ref)
            return SkipReason.ADAPTER_LOADING
        self._table.begin(ref, now)
        job = GpuLoad(ref, self._host.weights(answer.slot), now, spared=spared)
        if denied is not None:
            self._denials.forget(ref)
            job.runs = self._take_room(ref, denied, now, spared)
        self._queue.append(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._copy_jobs, name="adapter-copier", daemon=True)
            self._thread.start()
        self._has_work.notify()
        return SkipReason.ADAPTER_LOADING

    def _fits_now(self, ref: AdapterRef, part_sizes: Sequence[int], now: float, spared: _Refs) -> bool:
        """Whether there is room for what found none."""
        if self._denials.stands(ref, now):
            return False
        if self._leaving_for(part_sizes, now, spared) is not None:
            return True
        self._denials.remember(ref, part_sizes, now, final=not spared)
        return False

    def _announce(self) -> None:
        """Wake who waits for the end of a load; takes no lock."""
        self._loaded.set()
        self._on_loaded()

    def _copy_jobs(self) -> None:
        """The copying thread."""
        with torch.inference_mode():  # so it may write to tensors made under it
            while (job := self._next_job()) is not None:
                error = self._outcome(job)
                try:
                    self._finish(job, error)
                    self._host.release(job.ref)
                    self._announce()
                except Exception:  # whatever it is, the adapters behind it are to be copied
                    _log.exception("unexpected failure after copying adapter %r", job.ref.name)

    def _next_job(self) -> GpuLoad | None:
        with self._lock:
            while not self._queue and not self._closed:
                self._has_work.wait()
            return None if self._closed else self._queue.popleft()

    def _outcome(self, job: GpuLoad) -> PunicaError | None:
        """Do the job; the error that it ends with."""
        try:
            self._bring(job)
        except _Closed:
            pass
        except AdapterError as fault:
            return type(fault)(f"Adapter {job.ref.name!r}: {fault.message}", param="model")
        except Exception:
            _log.exception("unexpected failure while copying adapter %r to the GPU", job.ref.name)
            return InternalError(f"Adapter {job.ref.name!r} could not be copied to the GPU; see the server's log.")
        return None

    def _bring(self, job: GpuLoad) -> None:
        modules = self._modules.arranged(job.weights)
        layout = lay_out({index: shape_of(module) for index, module in modules.items()})
        with self._lock:
            resident = self._admit(job, layout)
            if resident is None:
                return
            slot = resident.slot
            runs = self._runs[slot]
            self.tables.slot_rank[slot] = largest_rank(modules)
            self.tables.slot_affine[slot] = is_affine(modules.values())
            vocabulary = slot_vocabulary(self._modules, layout, runs, self.arena)
            if vocabulary is not None:
                self.vocabulary[slot] = vocabulary
        try:
            laid_out, landed = job.weights.laid_out, job.weights.landed
            self._writer.write(slot, modules, layout, runs, self._check_open, laid_out, landed=landed)
        except BaseException:
            self._writer.wait()  # for the part that is on its way
            with self._lock:
                self._settle(job.ref, resident)
                if self._table.find(job.ref) is resident:
                    self._evict(resident)
                self._table.begin(job.ref, self._clock())  # `_finish` ends it; until then nobody starts another
            raise
        with self._lock:
            self._settle(job.ref, resident)
            self._table.claim(resident, self._clock())

    def _admit(self, job: GpuLoad, layout: AdapterLayout[int]) -> Resident | None:
        """Find room and enter the adapter into the books, pinned; None if there is nothing to copy."""
        self._check_open()
        now = self._clock()
        joined = self._table.join(job.ref, job.weights.key)
        if joined is not None:
            self._free(joined)
            return None
        nbytes = layout.num_elements * self._dtype.itemsize
        if nbytes > self._table.budget_bytes:
            raise AdapterTooLarge(
                f"it needs {nbytes} bytes as {self._dtype} on the GPU, all adapters together may have "
                f"{self._table.budget_bytes}; raise --adapter-gpu-bytes."
            )
        if job.runs is None:
            job.runs = self._take_room(job.ref, layout.part_sizes, now, job.spared)
        if job.runs is None:
            self._table.abandon(job.ref)
            self._denials.remember(job.ref, layout.part_sizes, now, final=not job.spared)
            return None
        assert sum(run.length for run in job.runs) == layout.num_elements, "the same files, the same layout"
        resident, gone = self._table.commit(job.ref, job.weights.key, now)
        self._runs[resident.slot], job.runs = job.runs, None
        if resident in gone:  # it was forgotten on the way
            self._free([resident])
            return None
        self._table.pin(job.ref)
        self._copying.add(resident.slot)
        return resident

    def _take_room(self, ref: AdapterRef, part_sizes: Sequence[int], now: float, spared: _Refs) -> _Runs | None:
        """Ranges of the arena for a version that loads, in the books too; None if there is no room."""
        leaving = self._leaving_for(part_sizes, now, spared)
        if leaving is None:
            return None
        for resident in leaving:
            self._evict(resident)
        runs = self.arena.free.take_parts(part_sizes)
        reserved = self._table.reserve(ref, sum(part_sizes) * self._dtype.itemsize, now)
        assert reserved, "what fits the arena fits the books"
        return runs

    def _leaving_for(
        self, part_sizes: Sequence[int], now: float, spared: _Refs, unused: _Refs = ()
    ) -> list[Resident] | None:
        """As few idle adapters (and `unused` ones) as it takes, oldest first, to make room for an adapter, and a slot;
        None if all are not enough."""
        total = sum(part_sizes)
        free, least = self.arena.free, 0 if self._table.has_free_slot else 1
        if not unused and free.num_free + self._table.idle_bytes // self._dtype.itemsize < total:
            return None  # the usual "no" costs no walk
        if not least and free.fits(part_sizes):
            return []
        idle = list(self._table.evictable(now, spared, unused))
        count = fewest_to_give(free, [self._runs[resident.slot] for resident in idle], part_sizes, at_least=least)
        return None if count is None else idle[:count]

    def _evict(self, resident: Resident) -> None:
        self._table.evict(resident)
        self._free([resident])

    def _free(self, gone: Iterable[Resident]) -> None:
        """Give back the ranges of residents that are gone; the records of their slots are read by nobody."""
        for resident in gone:
            self.arena.free.give_runs(self._runs.pop(resident.slot))
            self.tables.slot_rank[resident.slot], self.tables.slot_affine[resident.slot] = 0, False
            self.vocabulary.pop(resident.slot, None)

    def _settle(self, ref: AdapterRef, resident: Resident) -> None:
        """The copy has ended: take our pin off."""
        self._copying.remove(resident.slot)
        self._free(self._table.unpin(ref))
        self._denials.released()

    def _check_open(self) -> None:
        if self._closed:
            raise _Closed

    def _finish(self, job: GpuLoad, error: PunicaError | None) -> None:
        """Book the end of a load."""
        with self._lock:
            now = self._clock()
            if job.runs is not None:
                self.arena.free.give_runs(job.runs)
                job.runs = None
                self._denials.released()
            found = self._table.find(job.ref)
            if error is not None:
                self._table.fail(job.ref, error, now)
                self._failures[job.ref] = error
            elif self._closed and self._table.presence(job.ref, now) is Presence.LOADING:
                self._table.abandon(job.ref)
            if error is not None or found is not None:
                outcome = "ok" if error is None else error.code
                nbytes = found.nbytes if found is not None else 0
                self._loads.append(AdapterLoad(job.ref.name, "gpu", now - job.started_at, nbytes, outcome))
