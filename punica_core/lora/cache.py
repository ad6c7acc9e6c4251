"""The host tier: adapters read on threads of their own, kept under a byte budget, handed out by slot.

    grant = cache.acquire(ref)        # never blocks: a grant, or why not yet
    weights = cache.weights(grant.slot)
    cache.release(ref)

`acquire` starts reads and `poll` tells which failed. The step loop only ever sees checked tensors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from punica_core.adapters.format import ModelShapes
from punica_core.adapters.residency import Presence, ResidencyTable, Resident
from punica_core.errors import AdapterError, AdapterLoadTimeout, AdapterTooLarge, InternalError, PunicaError
from punica_core.lora.landing import LandingMemory, Room
from punica_core.lora.packed import PackedReader
from punica_core.lora.weights import AdapterReader, AdapterSource, AdapterWeights, OpenAdapter
from punica_core.protocol import AdapterLoad, AdapterRef
from punica_core.scheduler.plan import AdapterGrant, SkipReason

NUM_READERS = 2
STALLED_SECONDS = 2.0
"""A reader without progress for so long is no longer counted among them: another one reads what waits meanwhile."""
MAX_STUCK_READERS = 32
"""Threads lost to reads that never return (a dead network mount) before no more are started in their place."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """loads: attempts that ended since the last `stats`. bytes_used, resident: now. evictions: since the start.

    gpu_bytes_used, gpu_resident: of the GPU tier, if there is one; loads and evictions are then those of both.
    """

    loads: list[AdapterLoad]
    evictions: int
    bytes_used: int
    resident: int
    gpu_bytes_used: int = 0
    gpu_resident: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """One load. progress_at: last sign of life (seconds of the cache's clock); reading: a reader has it. spared: who
    need not make room for it."""

    ref: AdapterRef
    started_at: float
    progress_at: float
    nbytes: int = 0
    reading: bool = False
    abandoned: bool = False
    spared: Collection[AdapterRef] = ()


class _Abandoned(Exception):
    """Ends the read of a job that was given up meanwhile."""


class AdapterCache:
    """Implements `scheduler.plan.Residency`. Every method returns at once, except `wait_for_load`.

    shapes: the base's modules that take LoRA. dtype: of the tensors handed out. budget_bytes: of all of them; while
    a load replaces idle adapters, both are in memory until it ends (at most one adapter for each of the readers, those
    that stalled included). open_adapter: where the bytes come from. load_timeout: seconds without progress after which
    a read fails, alone. on_loaded: called after each end of a load, on a reader's thread, and when `poll` has an old
    failure to tell again. clock: seconds, the clock of `poll`.
    """

    def __init__(
        self,
        shapes: ModelShapes,
        dtype: torch.dtype,
        budget_bytes: int,
        *,
        max_lora_rank: int = 256,
        load_timeout: float = 60.0,
        open_adapter: OpenAdapter = AdapterReader,
        num_slots: int = 65_536,
        retry_seconds: float = 2.0,
        on_loaded: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._max_lora_rank = max_lora_rank
        self._open_adapter = open_adapter
        self._load_timeout = load_timeout
        self._listeners = [on_loaded]
        self._clock = clock
        self._table = ResidencyTable("host", budget_bytes, num_slots, retry_seconds=retry_seconds)
        self._weights: dict[int, AdapterWeights] = {}
        self._landing: LandingMemory | None = None
        self._landed: dict[int, Room] = {}  # by slot, of residents that lie in landing memory
        self._jobs: dict[AdapterRef, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._failures: dict[AdapterRef, PunicaError] = {}
        self._loads: list[AdapterLoad] = []
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._loaded = threading.Event()
        self._closed = False
        self._num_readers = 0
        self._stuck_readers = 0

    def acquire(self, ref: AdapterRef) -> AdapterGrant | SkipReason:
        """See `Residency.acquire`. For a version that failed a moment ago the next `poll` reports that again."""
        with self._lock:
            now = self._clock()
            presence = self._table.presence(ref, now)
            if presence is Presence.RESIDENT:
                resident = self._table.pin(ref)
                return AdapterGrant(resident.slot, resident.adapter_key)
            if presence is Presence.ABSENT or presence is Presence.WAITING_FOR_ROOM:
                if not self._table.begin(ref, now):
                    return SkipReason.ADAPTER_NO_ROOM
                self._enqueue(_Job(ref, now, now))
            elif presence is Presence.LOADING:
                self._jobs[ref].spared = ()  # it is wanted now
            error = self._table.failure(ref, now) if presence is Presence.FAILED else None
            if error is not None:
                self._failures[ref] = error
        if error is not None:
            self._announce()
        return SkipReason.ADAPTER_LOADING

    def prefetch(self, soonest: Iterable[AdapterRef], wanted: Collection[AdapterRef]) -> None:
        """See `Residency.prefetch`. One reader is left to those that are wanted now."""
        with self._lock:
            now = self._clock()
            for ref in soonest:
                if self._table.presence(ref, now) not in (Presence.ABSENT, Presence.WAITING_FOR_ROOM):
                    continue
                if len(self._jobs) - self._num_stalled(now) >= NUM_READERS - 1 or not self._table.may_prefetch(wanted):
                    return
                if not self._table.begin(ref, now, wanted):
                    return
                self._enqueue(_Job(ref, now, now, spared=wanted))

    def has(self, ref: AdapterRef) -> bool:
        """See `Residency.has`."""
        with self._lock:
            return self._table.presence(ref, self._clock()) is Presence.RESIDENT

    def fits_without(self, ref: AdapterRef, others: Collection[AdapterRef]) -> bool:
        """See `Residency.fits_without`."""
        with self._lock:
            return self._table.fits_without(ref, others, self._clock())

    def release(self, ref: AdapterRef) -> None:
        """Undo one successful `acquire`. Raises ValueError for one too many."""
        with self._lock:
            self._drop(self._table.unpin(ref))

    def forget(self, path: str) -> None:
        """Nobody will ask for the adapter in this folder again: give its memory back, if in use when that ends."""
        with self._lock:
            self._drop(self._table.forget(path))

    def listen(self, listener: Callable[[], None]) -> None:
        """Have another function called whenever on_loaded is; before the first load."""
        self._listeners.append(listener)

    def land_in(self, landing: LandingMemory) -> None:
        """Read packed adapters into `landing`, of the cache's dtype, as far as it has room; before the first load."""
        self._landing = landing

    def poll(self, now: float) -> list[tuple[AdapterRef, PunicaError]]:
        """Versions whose load failed since the last poll; loads without progress for load_timeout fail here."""
        with self._lock:
            overdue = [job for job in self._jobs.values() if now - job.progress_at > self._load_timeout]
            for job in overdue:
                # A job that waits in the queue is late only if every reader is lost.
                if job.reading or self._num_readers == 0:
                    self._give_up(job, now)
            self._start_reader(now)
            failures, self._failures = self._failures, {}
        return list(failures.items())

    def wait_for_load(self, timeout: float) -> bool:
        """Sleep until a load ends, at most `timeout` seconds; True if one did since the last call."""
        ended = self._loaded.wait(timeout)
        self._loaded.clear()
        return ended

    def weights(self, slot: int) -> AdapterWeights:
        """The adapter in a slot that was granted and not yet released."""
        return self._weights[slot]

    def stats(self) -> CacheStats:
        with self._lock:
            loads, self._loads = self._loads, []
            table = self._table
            return CacheStats(loads, table.evictions, table.bytes_used, table.num_residents)

    def close(self) -> None:
        """Stop reading. Granted weights stay usable; the threads end after the chunk they are at."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._has_work.notify_all()

    def _drop(self, gone: Iterable[Resident]) -> None:
        for resident in gone:
            del self._weights[resident.slot]
            room = self._landed.pop(resident.slot, None)
            if room is not None and self._landing is not None:
                self._landing.give(room)

    def _enqueue(self, job: _Job) -> None:
        self._jobs[job.ref] = job
        self._queue.append(job)
        self._start_reader(job.started_at)
        self._has_work.notify()

    def _num_stalled(self, now: float) -> int:
        return sum(job.reading and now - job.progress_at >= STALLED_SECONDS for job in self._jobs.values())

    def _start_reader(self, now: float) -> None:
        """One more reader if there is work and one is missing."""
        stalled = self._num_stalled(now)
        room = self._num_readers - stalled < NUM_READERS and self._stuck_readers + stalled < MAX_STUCK_READERS
        if self._queue and room and not self._closed:
            self._num_readers += 1
            threading.Thread(target=self._read_jobs, name="adapter-reader", daemon=True).start()

    def _read_jobs(self) -> None:
        while (job := self._next_job()) is not None:
            error: PunicaError | None = None
            try:
                self._load(job)
            except _Abandoned:
                pass
            except AdapterError as fault:
                error = type(fault)(f"Adapter {job.ref.name!r}: {fault.message}", param="model")
            except Exception:
                _log.exception("unexpected failure while loading adapter %r", job.ref.name)
                error = InternalError(f"Adapter {job.ref.name!r} could not be loaded; see the server's log.")
            with self._lock:
                if job.abandoned:  # another reader took this one's place
                    self._stuck_readers -= 1
                    self._start_reader(self._clock())
                    return
                if error is not None:
                    self._fail(job, error, self._clock())
            self._announce()

    def _announce(self) -> None:
        """Wake who waits for the end of a load; without the lock, for the owner may call back."""
        self._loaded.set()
        for listener in self._listeners:
            listener()

    def _next_job(self) -> _Job | None:
        with self._lock:
            while not self._closed:
                if self._num_readers - self._num_stalled(self._clock()) > NUM_READERS:
                    self._num_readers -= 1  # one that had stalled goes on
                    self._has_work.notify()  # whoever stays
                    return None
                if self._queue:
                    break
                self._has_work.wait()
            if self._closed:
                return None
            job = self._queue.popleft()
            job.reading = True
            job.progress_at = self._clock()
            return job

    def _load(self, job: _Job) -> None:
        with self._open_adapter(job.ref, self._shapes, self._dtype, self._max_lora_rank) as reader:
            if not self._reserve(job, reader.nbytes):
                return
            weights, room = self._read(job, reader)
        kept = False
        try:
            with self._lock:
                self._check_alive(job)
                now = self._clock()
                resident, gone = self._table.commit(job.ref, weights.key, now)
                self._drop(other for other in gone if other is not resident)  # before its slot gets others
                kept = resident.slot not in self._weights  # an equal copy may be there
                if kept:
                    self._weights[resident.slot] = weights
                    if room is not None:
                        self._landed[resident.slot] = room
                if resident in gone:  # it was forgotten while it was read
                    self._drop([resident])
                self._finish(job, "ok", now)
        finally:
            if not kept:
                self._give(room)

    def _read(self, job: _Job, reader: AdapterSource) -> tuple[AdapterWeights, Room | None]:
        """The adapter, and where it lies if that is landing memory; the reader's thread alone writes there, so it alone
        gives a room back that was read into in vain, however late."""
        if not isinstance(reader, PackedReader):
            return reader.read(lambda: self._progress(job)), None
        room = self._room_to_land(reader.num_elements, job.spared)
        try:
            return reader.read(lambda: self._progress(job), None if room is None else room.elements), room
        except BaseException:
            self._give(room)
            raise

    def _room_to_land(self, num_elements: int, spared: Collection[AdapterRef]) -> Room | None:
        """Landing memory for an adapter; idle ones that lie there leave for it, the one used longest ago first."""
        with self._lock:
            if self._landing is None:
                return None
            idle = [other for other in self._table.evictable(self._clock(), spared) if other.slot in self._landed]
            count = self._landing.fewest_to_give([self._landed[other.slot] for other in idle], num_elements)
            for leaving in idle[:count]:
                self._table.evict(leaving)
            self._drop(idle[:count])
            return self._landing.take(num_elements)

    def _give(self, room: Room | None) -> None:
        with self._lock:
            if room is not None and self._landing is not None:
                self._landing.give(room)

    def _reserve(self, job: _Job, nbytes: int) -> bool:
        with self._lock:
            self._check_alive(job)
            job.nbytes = nbytes
            job.progress_at = now = self._clock()
            if nbytes > self._table.budget_bytes:
                raise AdapterTooLarge(
                    f"it needs {nbytes} bytes as {self._dtype}, all adapters together may have "
                    f"{self._table.budget_bytes}; raise --adapter-host-bytes."
                )
            if self._table.reserve(job.ref, nbytes, now, job.spared):
                return True
            self._table.wait(job.ref, nbytes)
            del self._jobs[job.ref]
            return False

    def _progress(self, job: _Job) -> None:
        job.progress_at = self._clock()
        self._check_alive(job)

    def _check_alive(self, job: _Job) -> None:
        if job.abandoned or self._closed:
            raise _Abandoned

    def _give_up(self, job: _Job, now: float) -> None:
        job.abandoned = True
        message = (
            f"Adapter {job.ref.name!r}: reading its files made no progress for {self._load_timeout:g} seconds; "
            "try again later."
        )
        self._fail(job, AdapterLoadTimeout(message, param="model"), now)
        if not job.reading:
            self._queue.remove(job)
            return
        self._stuck_readers += 1
        self._num_readers -= 1
        self._start_reader(now)

    def _fail(self, job: _Job, error: PunicaError, now: float) -> None:
        self._table.fail(job.ref, error, now)
        reason = error.message.removeprefix(f"Adapter {job.ref.name!r}: ")
        _log.warning("Adapter %r is refused: %s: %s", job.ref.name, error.code, reason)
        self._failures[job.ref] = error
        self._finish(job, error.code, now)

    def _finish(self, job: _Job, outcome: str, now: float) -> None:
        del self._jobs[job.ref]
        self._loads.append(AdapterLoad(job.ref.name, "host", now - job.started_at, job.nbytes, outcome))
