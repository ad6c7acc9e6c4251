"""What deciding costs: time of `schedule`, `measured` and `update` in steps that execute nothing.

    punica bench scheduler

CPU time of the thread, median of the steps after the prompts are prefilled. Each step is planned while the one before
is in flight, as for a GPU. Needs neither torch nor a model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Sequence

from punica_core.kv.block_pool import BlockPool
from punica_core.kv.prefix_cache import PrefixCache
from punica_core.protocol import AdapterRef, FileSignature, NewSequence, SamplingParams
from punica_core.scheduler.limits import SchedulerLimits
from punica_core.scheduler.pacing import Pacer, StepSizes
from punica_core.scheduler.plan import AdapterGrant, SampledToken, SkipReason, StepPlan, StepResult
from punica_core.scheduler.scheduler import Scheduler
from punica_core.stdout import until_unread

NUM_ADAPTERS = 16
NUM_COLD_ADAPTERS = 8
PROMPT_TOKENS = 512
STEPS = 200
MAX_MODEL_LEN = 2048
SIZES = StepSizes(prompt_rows=(64, 128, 192, 256, 384, 512, 768, 1024), max_prompts=16)
"""Of steps with prompts that a GPU runner captures."""


class WarmAndCold:
    """A residency in which some adapters are always there and the others never arrive."""

    def __init__(self, warm: list[AdapterRef]) -> None:
        self._grants = {ref: AdapterGrant(slot, f"key {slot}") for slot, ref in enumerate(warm)}

    def acquire(self, ref: AdapterRef) -> AdapterGrant | SkipReason:
        return self._grants.get(ref, SkipReason.ADAPTER_LOADING)

    def has(self, ref: AdapterRef) -> bool:
        return ref in self._grants

    def fits_without(self, ref: AdapterRef, others: Collection[AdapterRef]) -> bool:
        return False

    def prefetch(self, soonest: Iterable[AdapterRef], wanted: Collection[AdapterRef]) -> None:
        """What is cold stays so."""

    def release(self, ref: AdapterRef) -> None:
        """Nothing to undo."""


def step_seconds(num_running: int, *, num_waiting: int = 0, num_cold: int = 0, num_joining: int = 0) -> float:
    """Median seconds of a step that decodes `num_running` sequences.

    num_waiting: sequences for which there is no seat. num_cold: sequences that have seats but whose adapters load.
    num_joining: sequences that have seats, and whose prompts of 16 tokens join every step, paced as on a GPU.
    """
    warm, cold = _refs("warm", NUM_ADAPTERS), _refs("cold", NUM_COLD_ADAPTERS)
    limits = SchedulerLimits(
        max_num_seqs=num_running + num_cold + num_joining,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
        max_scored_tokens=1024,
    )
    pool = BlockPool((num_running + 2 * num_joining) * MAX_MODEL_LEN // limits.block_size)
    pacer = Pacer(0.025, limits.max_num_batched_tokens, SIZES) if num_joining else None
    scheduler = Scheduler(limits, pool, PrefixCache(pool), WarmAndCold(warm), pacer)
    for request_id in range(num_running + num_waiting):
        scheduler.add(_request(request_id, warm[request_id % NUM_ADAPTERS]), now=0.0)
    for request_id in range(num_cold):
        scheduler.add(_request(-1 - request_id, cold[request_id % NUM_COLD_ADAPTERS]), now=0.0)
    in_flight = scheduler.schedule(0.0)
    while scheduler.counters.decode_tokens == 0 or scheduler.stats().running < num_running:
        in_flight, _seconds = _step(scheduler, in_flight, now=0.0)
    times = []
    for step in range(STEPS):
        for i in range(num_joining):
            scheduler.add(_joining(10_000 + step * num_joining + i, warm[i % NUM_ADAPTERS]), now=0.001 * step)
        in_flight, seconds = _step(scheduler, in_flight, now=0.001 * step)
        times.append(seconds)
    return statistics.median(times)


def _step(scheduler: Scheduler, in_flight: StepPlan, now: float) -> tuple[StepPlan, float]:
    """Plan a step, then end the one before. Returns the plan and the seconds that took."""
    start = time.thread_time()
    plan = scheduler.schedule(now)
    decided = time.thread_time() - start
    result = StepResult(sampled={row.sequence.request_id: SampledToken(5) for row in in_flight.rows if row.samples})
    start = time.thread_time()
    scheduler.measured(in_flight, 0.006 + 20e-6 * in_flight.work.prompt_rows)
    scheduler.update(in_flight, result, now)
    return plan, decided + time.thread_time() - start


def _request(request_id: int, adapter: AdapterRef) -> NewSequence:
    return NewSequence(
        request_id=request_id,
        prompt_ids=[(31 * request_id + position) % 997 for position in range(PROMPT_TOKENS)],
        sampling=SamplingParams(max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS),
        adapter=adapter,
    )


def _joining(request_id: int, adapter: AdapterRef) -> NewSequence:
    """One that is gone after its first token."""
    prompt = [(31 * request_id + position) % 997 for position in range(16)]
    return NewSequence(request_id=request_id, prompt_ids=prompt, sampling=SamplingParams(max_tokens=1), adapter=adapter)


def _refs(name: str, count: int) -> list[AdapterRef]:
    signature = FileSignature(1, 1, 1, 1)
    return [
        AdapterRef(name=f"{name}{i}", path=f"/{name}{i}", config_signature=signature, weights_signature=signature)
        for i in range(count)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line a case."""
    argparse.ArgumentParser(prog="punica bench scheduler", description=__doc__).parse_args(arguments)
    cases = [(64, 0, 0, 0), (64, 1000, 0, 0), (64, 0, 1000, 0), (64, 0, 0, 8), (128, 0, 0, 0), (256, 0, 0, 0)]
    print("running  no seat  cold  joining   ms a step")
    for num_running, num_waiting, num_cold, num_joining in cases:
        seconds = step_seconds(num_running, num_waiting=num_waiting, num_cold=num_cold, num_joining=num_joining)
        print(f"{num_running:7}  {num_waiting:7}  {num_cold:4}  {num_joining:7}   {1e3 * seconds:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(until_unread(main))
