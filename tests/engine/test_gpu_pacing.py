"""On a GPU: prompts join streams in steps that were captured, cut by times that were measured there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from punica_core.config import EngineConfig
from punica_core.engine.build import build_engine
from punica_core.engine.device_runner import DeviceRunner, PendingDeviceStep
from punica_core.protocol import NewSequence, SamplingParams
from punica_core.scheduler.plan import StepPlan, StepWork
from tests.support.driven_runner import random_prompt
from tests.support.tiny_models import LONG_VOCAB_SIZE, long_llama

pytestmark = pytest.mark.gpu

BUDGET = 2048


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    long_llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("target_step_ms", [0.01, 0.0])
def test_prompts_beside_a_stream_are_computed_by_captured_steps(
    base: Path, monkeypatch: pytest.MonkeyPatch, target_step_ms: float
) -> None:
    works: list[StepWork] = []
    launch = DeviceRunner.launch

    def recorded(runner: DeviceRunner, plan: StepPlan) -> PendingDeviceStep:
        works.append(plan.work)
        return launch(runner, plan)

    monkeypatch.setattr(DeviceRunner, "launch", recorded)
    config = EngineConfig(
        model=str(base),
        device="cuda",
        dtype="bfloat16",
        lora=False,
        kv_tokens=20_000,
        max_num_seqs=8,
        max_num_batched_tokens=BUDGET,
        target_step_ms=target_step_ms,
    )
    engine, _layout = build_engine(config, lambda what, fraction: None, lambda: None)
    works.clear()

    def submit(request_id: int, length: int, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        prompt_ids = random_prompt(length, LONG_VOCAB_SIZE)
        assert engine.submit([NewSequence(request_id=request_id, prompt_ids=prompt_ids, sampling=sampling)], 0.0) == []

    submit(0, 20, 300)
    for _ in range(20):
        engine.step(0.0)
    submit(1, 6000, 2)
    while engine.has_unfinished():
        engine.step(0.0)
    runner = engine._runner
    assert isinstance(runner, DeviceRunner)
    assert runner.graphs is not None
    assert runner.graphs.sizes.whole_mixed, "our kernel takes heads of 64"
    beside = [work for work in works if work.decode_rows and work.prompt_rows]
    captured = [runner.graphs.sizes.fit(work.decode_rows, work.prompt_rows, work.prompts) for work in beside]
    assert sum(work.prompt_rows for work in beside) >= 6000
    assert all(captured) == bool(target_step_ms), [work.prompt_rows for work in beside]
    pacer = engine._scheduler._pacer
    assert (pacer is None) == (target_step_ms == 0)
    if pacer is not None:
        assert 0 < pacer._times.expected(StepWork(1)) < 1
        assert math.isfinite(pacer._times.at_most(beside[0]))
