"""The simulation of docs/scheduling.md: with the bound streams keep their pace, and throughput is not the price."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from punica_core.bench import pacing
from punica_core.bench.pacing import Simulation, Trace
from punica_core.config import EngineConfig

TARGET_MS = EngineConfig(model="m").target_step_ms
AIM_MS = 35.0


def simulated(name: str, target_ms: float, **changes: Any) -> Trace:
    trace = Simulation(dataclasses.replace(pacing.cases()[name], **changes), target_ms).run()
    assert sum(map(len, trace.tokens.values())) == sum(output for _prompt, output in pacing.cases()[name].lengths)
    return trace


def gap_ms(trace: Trace, percentile: float) -> float:
    return 1e3 * float(np.percentile(trace.gaps, percentile))


@pytest.mark.parametrize("name", ["burst", "burst-distinct", "clients"])
def test_no_stream_waits_longer_than_the_aim_and_throughput_is_kept(name: str) -> None:
    off, paced = simulated(name, 0.0), simulated(name, TARGET_MS)
    assert gap_ms(off, 100) > AIM_MS, "without the bound it is broken"
    assert gap_ms(paced, 100) < AIM_MS
    assert paced.tokens_per_second > 0.97 * off.tokens_per_second


@pytest.mark.parametrize(("name", "kept"), [("documents", 0.97), ("documents-distinct", 0.95)])
def test_prompts_that_could_fill_the_gpu_alone_lose_little(name: str, kept: float) -> None:
    off, paced = simulated(name, 0.0), simulated(name, TARGET_MS)
    assert gap_ms(off, 50) > AIM_MS, "without the bound it is broken"
    assert gap_ms(paced, 99) < AIM_MS
    assert paced.tokens_per_second > kept * off.tokens_per_second


@pytest.mark.parametrize(("name", "kept"), [("clients-mixed", 0.97), ("documents-mixed", 0.95)])
def test_the_pace_is_kept_although_it_is_not_known_which_rows_have_adapters(name: str, kept: float) -> None:
    off, paced = simulated(name, 0.0), simulated(name, TARGET_MS)
    alike = [
        simulated(name, 0.0, turns=turns, step_ms=table) for turns, table in ((0, pacing.BASE), (0, pacing.DISTINCT))
    ]
    assert alike[1].seconds > off.seconds > alike[0].seconds, "steps of both kinds are in it"
    assert gap_ms(off, 100) > AIM_MS, "without the bound it is broken"
    assert gap_ms(paced, 100) < AIM_MS
    assert paced.tokens_per_second > kept * off.tokens_per_second


def test_long_prompts_are_cut_finer_the_more_they_attend_to() -> None:
    off, paced = simulated("long", 0.0), simulated("long", TARGET_MS)
    assert gap_ms(off, 99) > 2 * AIM_MS, "without the bound it is broken"
    assert gap_ms(paced, 99) < AIM_MS
    assert paced.tokens_per_second > 0.97 * off.tokens_per_second
    chunks = paced.long_chunks
    assert sum(chunks) == 16_000
    assert chunks[10] > chunks[-3], "of the middle of the prompt, and of its end"


def test_noise_and_stalls_of_the_host_do_not_undo_it() -> None:
    noise = {"noise": 0.1, "stalls": 0.002}
    off, paced = simulated("clients-distinct", 0.0, **noise), simulated("clients-distinct", TARGET_MS, **noise)
    assert gap_ms(off, 99.5) > AIM_MS, "without the bound it is broken"
    assert gap_ms(paced, 99.5) < AIM_MS
    assert gap_ms(paced, 100) > 100.0, "the stalls are there"
    assert paced.tokens_per_second > 0.97 * off.tokens_per_second


def test_a_fixed_chunk_for_the_same_pace_costs_throughput_or_breaks_it() -> None:
    """What is learned is worth it: the budget that keeps the bound beside deep prompts is one for all steps."""
    paced = simulated("long", TARGET_MS)
    fixed = {budget: Simulation(pacing.cases()["long"], 0.0, budget).run() for budget in (256, 1024)}
    assert gap_ms(fixed[1024], 99) > AIM_MS
    assert gap_ms(fixed[256], 99) < AIM_MS
    assert fixed[256].tokens_per_second < paced.tokens_per_second


def test_tables_have_a_row_for_each_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert pacing.main(["--cases", "clients", "--targets-ms", "0", "25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "64 clients in a closed loop, 384 requests:"
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| off", "| 25"]
