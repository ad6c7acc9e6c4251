"""On a real (tiny, random, fp32) model with real adapters: no decision of the scheduler changes a token.

Each case is compared with every request alone, in whole prompts, with room for everything and no prefix cache. Each
also proves that what it is about happened.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from punica_core.config import EngineConfig
from punica_core.engine.build import build_engine
from punica_core.engine.engine import Runner
from punica_core.protocol import AdapterRef, NewSequence, SamplingParams, StepStats
from punica_core.scheduler.pacing import Pacer, StepSizes
from punica_core.scheduler.plan import StepPlan, StepResult, StepWork
from punica_core.scheduler.sequence import Status
from tests.support.peft_adapters import adapter_ref, save_peft_adapter, tiny_llama

Tokens = dict[int, list[int]]
RANKS = {"a": 4, "b": 8, "c": 16}


class LateRunner:
    """Computes a step when its result is asked for, which is after the next one was launched.

    By then the tokens of pending rows are known, except those of sequences that have ended.
    """

    runs_ahead = True

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.num_pending = 0

    def launch(self, plan: StepPlan) -> LateStep:
        self.num_pending += sum(row.pending for row in plan.rows)
        return LateStep(self._runner, plan)


class LateStep:
    def __init__(self, runner: Runner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def result(self) -> StepResult:
        live = (row for row in self._plan.rows if row.sequence.status is not Status.FINISHED)
        plan = StepPlan(tuple(msgspec.structs.replace(row, pending=False) for row in live))
        return self._runner.launch(plan).result()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef | None]:
    root = tmp_path_factory.mktemp("adapters")
    folders = [save_peft_adapter(root / name, seed=rank, r=rank) for name, rank in RANKS.items()]
    return [None, *map(adapter_ref, folders)]


@pytest.fixture(scope="module")
def requests(adapters: list[AdapterRef | None]) -> list[NewSequence]:
    """Sixteen requests over all adapters whose prompts share stems of different length."""
    rng = random.Random(5)
    stem = [rng.randrange(3, 512) for _ in range(48)]
    return [
        NewSequence(
            request_id=i,
            prompt_ids=stem[: rng.choice([0, 20, 35, 48])] + [rng.randrange(3, 512) for _ in range(1 + i)],
            sampling=SamplingParams(max_tokens=rng.randrange(16, 33), ignore_eos=True),
            adapter=adapters[i % len(adapters)],
        )
        for i in range(16)
    ]


def serve(
    base: Path, *batches: list[NewSequence], runs_ahead: bool = False, pacer: Pacer | None = None, **options: Any
) -> tuple[Tokens, StepStats]:
    """Run each batch to its end, one after the other, on one engine whose time is its steps."""
    defaults = {"kv_tokens": 4096, "max_num_batched_tokens": 512, "prefix_cache": False}
    config = EngineConfig(model=str(base), device="cpu", max_model_len=128, **(defaults | options))
    engine, _layout = build_engine(config, lambda what, fraction: None, lambda: None)
    engine._scheduler._pacer = pacer
    if runs_ahead:
        engine._runner = late = LateRunner(engine._runner)
    tokens: Tokens = {request.request_id: [] for batch in batches for request in batch}
    now = 0.0
    for batch in batches:
        assert engine.submit(batch, now) == []
        while engine.has_unfinished():
            now += 0.05
            outputs, executed = engine.step(now)
            for output in outputs:
                assert not output.error_message
                tokens[output.request_id] += output.token_ids
            if not executed:
                time.sleep(0.001)  # an adapter loads
    if runs_ahead:
        assert late.num_pending > sum(map(len, tokens.values())) / 4, "the case did not run ahead"
    return tokens, engine.stats()


@pytest.fixture(scope="module")
def alone(base: Path, requests: list[NewSequence]) -> tuple[Tokens, StepStats]:
    return serve(base, *([request] for request in requests))


@pytest.fixture(scope="module")
def solo(alone: tuple[Tokens, StepStats]) -> Tokens:
    tokens, stats = alone
    assert stats.preemptions == stats.prefix_hit_tokens == 0
    return tokens


def test_adapters_change_the_tokens_of_a_prompt(base: Path, requests: list[NewSequence], solo: Tokens) -> None:
    """The control: if the wrong adapter were used below, it would show."""
    without = [
        NewSequence(request_id=request.request_id, prompt_ids=request.prompt_ids, sampling=request.sampling)
        for request in requests
    ]
    plain, _stats = serve(base, without)
    for request in requests:
        assert (plain[request.request_id] == solo[request.request_id]) == (request.adapter is None)


def test_mixed_equals_solo(base: Path, requests: list[NewSequence], solo: Tokens) -> None:
    tokens, stats = serve(base, requests)
    assert stats.steps < sum(request.sampling.max_tokens for request in requests) / 4
    assert tokens == solo


def test_chunked_equals_whole(base: Path, requests: list[NewSequence], solo: Tokens) -> None:
    tokens, _stats = serve(base, requests, max_num_seqs=8, max_num_batched_tokens=11)
    assert tokens == solo


class Recorder(Pacer):
    """Paces by a made-up device; remembers the work of each step."""

    def __init__(self) -> None:
        super().__init__(0.05, 512, StepSizes(prompt_rows=(3, 8, 16), max_prompts=2))
        self.steps: list[StepWork] = []

    def observe(self, work: StepWork, seconds: float) -> None:
        self.steps.append(work)
        super().observe(work, 0.01 + 0.005 * work.prompt_rows)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_paced_equals_solo(base: Path, requests: list[NewSequence], solo: Tokens, runs_ahead: bool) -> None:
    pacer = Recorder()
    tokens, _stats = serve(base, requests[:4], requests[4:], runs_ahead=runs_ahead, pacer=pacer)
    beside_streams = [work.prompt_rows for work in pacer.steps if work.decode_rows and work.prompt_rows]
    assert len(beside_streams) > 10
    assert max(beside_streams) <= 8
    assert max(work.prompt_rows for work in pacer.steps) > 100, "while nobody streams"
    assert tokens == solo


def test_preempted_equals_unpreempted(base: Path, requests: list[NewSequence], solo: Tokens) -> None:
    """The first four, each alone, bring the adapters in, so that the rest is the same work in every run."""
    tokens, stats = serve(base, *([request] for request in requests[:4]), requests[4:], kv_tokens=176)
    assert stats.preemptions > 0
    assert tokens == solo


def test_a_prefix_hit_equals_a_miss(base: Path, requests: list[NewSequence], solo: Tokens) -> None:
    again = [
        NewSequence(request_id=100 + r.request_id, prompt_ids=r.prompt_ids, sampling=r.sampling, adapter=r.adapter)
        for r in requests
    ]
    tokens, stats = serve(base, requests, again, prefix_cache=True)
    assert stats.prefix_hit_tokens > 200
    assert {i: tokens[i] for i in solo} == solo
    assert {i: tokens[100 + i] for i in solo} == solo


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_room_for_one_adapter_at_a_time_equals_solo(
    base: Path, requests: list[NewSequence], alone: tuple[Tokens, StepStats], runs_ahead: bool
) -> None:
    """Also few blocks, which the prefix cache competes for, and small steps."""
    expected, stats_of_all = alone
    largest = stats_of_all.adapter_host_bytes_used * max(RANKS.values()) // sum(RANKS.values())
    tokens, stats = serve(
        base,
        requests,
        kv_tokens=192,
        prefix_cache=True,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        adapter_host_bytes=largest,
        runs_ahead=runs_ahead,
    )
    assert stats.adapter_evictions >= 2
    assert tokens == expected


def test_running_ahead_equals_solo(base: Path, requests: list[NewSequence], solo: Tokens) -> None:
    """All else at once: chunks, few blocks, and sequences that end at a stop id while the step behind has them."""
    stopped = [
        msgspec.structs.replace(
            request,
            request_id=100 + request.request_id,
            sampling=msgspec.structs.replace(request.sampling, stop_token_ids=(solo[request.request_id][7],)),
        )
        for request in requests
    ]
    tokens, stats = serve(
        base,
        requests[:4],  # brings the adapters in, so that the rest is the same work in every run
        [*requests[4:], *stopped],
        runs_ahead=True,
        prefix_cache=True,
        kv_tokens=192,
        max_num_batched_tokens=64,
    )
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    for request in requests:
        expected = solo[request.request_id]
        assert tokens[request.request_id] == expected
        assert tokens[100 + request.request_id] == expected[: expected.index(expected[7]) + 1]
