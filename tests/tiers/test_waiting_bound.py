"""The scheduler's bound on waiting for an adapter's room, with the tier that serves on a GPU."""

from __future__ import annotations

from punica_core.scheduler.scheduler import Scheduler
from tests.support.memory_adapters import NUM_ELEMENTS, MemoryAdapters, add, granted, wait_until
from tests.support.scheduling import make_rig, new_sequence
from tests.tiers.conftest import MakeTier

STEP_SECONDS = 0.1
MAX_TOKENS = 6


def test_an_adapter_that_is_always_in_use_starves_no_other(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    now = [0.0]
    tier = make_tier(NUM_ELEMENTS, clock=lambda: now[0], claim_seconds=2.0)
    hot, cold = add(adapters, 2)
    granted(tier, hot)
    tier.release(hot)
    rig = make_rig()
    scheduler = Scheduler(rig.limits, rig.pool, rig.cache, tier)
    first_cold, cold_step = 1000, 10
    started: dict[int, int] = {}
    for step in range(100):
        scheduler.add(new_sequence(step, max_tokens=MAX_TOKENS, adapter=hot), now[0])
        if step == cold_step:
            scheduler.add(new_sequence(first_cold, max_tokens=1, adapter=cold), now[0])
        plan = scheduler.schedule(now[0])
        for row in plan.rows:
            started.setdefault(row.sequence.request_id, step)
        result = rig.model.execute(plan)
        now[0] += STEP_SECONDS
        scheduler.update(plan, result, now[0])
        wait_until(lambda: not (tier._table._loads or tier._copying or tier._host._jobs))
        if first_cold in started:
            break
    assert started[cold_step - 1] == cold_step - 1, "the hot adapter is used all the time"
    limits = 2 * rig.limits.adapter_wait_limit / STEP_SECONDS
    assert cold_step < started[first_cold] <= cold_step + limits + MAX_TOKENS + 3
