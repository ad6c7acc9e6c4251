"""Steps that are planned and queued before the device has begun the first of them give what lock-step gives.

What the host says of a step lies in page-locked buffers until the device copies it: the tables and FlashInfer's plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from punica_core.config import BLOCK_SIZE
from punica_core.engine.graphs import GraphSizes
from punica_core.lora.weights import load_adapter
from punica_core.model.flashinfer import FlashInferAttention
from punica_core.model.staging import DEPTH
from punica_core.scheduler.plan import BASE_SLOT, RowPlan, StepPlan, StepResult
from tests.engine.test_gpu_parity import ADAPTERS, build
from tests.support.driven_device_runner import DrivenDeviceRunner
from tests.support.driven_runner import random_prompt
from tests.support.peft_adapters import adapter_ref, linear_shapes, save_peft_adapter
from tests.support.streams import busy_stream, unguarded

SEQUENCES = {"L": (0, 600), "a": (1, 100), "b": (BASE_SLOT, 60), "p": (2, 30), "q": (0, 20), "r": (1, 12), "s": (2, 9)}
"""Slot of each sequence, and tokens of its prompt."""
KNOWN = "L"
"""Its tokens are known beforehand, so it may leave out steps. The others decode without a gap, and each token is in
flight when the next step is planned."""

Steps = Sequence[tuple[str, str]]
"""Of each step the sequences that decode and those whose prompts it computes."""

MIXED: Steps = (("Lab", "pq"), ("Labpq", ""), ("ab", "r"), ("Lar", "s"), ("Ls", ""), ("Ls", ""), ("Ls", ""))
"""The third step has only short contexts: its plan does not cover those of the steps before."""
DECODING: Steps = (("ab", ""),) * 7

GRAPHS = GraphSizes((8,), (8,), (64,), inside_rows=128)
"""One size of each kind, so that what is meant for another step says something else in the same places: it gives wrong
numbers, and reads no other memory."""


def planned(driven: DrivenDeviceRunner, steps: Steps) -> list[StepPlan]:
    """A step that computes the prompts of those that decode first, and `steps`."""
    sequences = {
        letter: driven.sequence(random_prompt(length + len(steps) * (letter == KNOWN), 512), slot)
        for letter, (slot, length) in SEQUENCES.items()
    }
    sequences[KNOWN].block_table = list(range(64, 104))
    ends = dict.fromkeys(SEQUENCES, 0)

    def row(letter: str, count: int) -> RowPlan:
        (slot, length), sequence, start = SEQUENCES[letter], sequences[letter], ends[letter]
        ends[letter] += count
        blocks = tuple(sequence.block_table[: -(-ends[letter] // BLOCK_SIZE)])
        in_flight = start >= length and letter != KNOWN
        return RowPlan(sequence, start, count, blocks, slot, samples=True, pending=in_flight)

    plans = []
    for decoding, prompts in (("", steps[0][0]), *steps):
        rows = [row(letter, 1) for letter in decoding] + [row(letter, SEQUENCES[letter][1]) for letter in prompts]
        plans.append(StepPlan(tuple(sorted(rows, key=lambda row: row.slot))))
    return plans


@dataclass(frozen=True)
class Outcome:
    """logits: by request_id, [n, V]. was_behind: DEPTH steps were launched before the device began the first."""

    results: list[StepResult]
    logits: dict[int, Tensor]
    was_behind: bool

    def equals(self, other: Outcome) -> bool:
        """Bit for bit."""
        return self.results == other.results and all(
            torch.equal(rows, other.logits[request_id]) for request_id, rows in self.logits.items()
        )


def run(driven: DrivenDeviceRunner, steps: Steps, *, behind: bool = False) -> Outcome:
    """behind: the steps are launched while the device is busy with something else; else in lock-step."""
    driven.forget()
    first, *plans = planned(driven, steps)
    driven.runner.execute(first)
    was_behind = False
    if behind:
        is_busy = busy_stream(driven.loaded.device)
        pending = [driven.runner.launch(plan) for plan in plans[:DEPTH]]
        was_behind = is_busy()
        pending += [driven.runner.launch(plan) for plan in plans[DEPTH:]]
        results = [step.result() for step in pending]
    else:
        results = [driven.runner.execute(plan) for plan in plans]
    return Outcome(results, {key: torch.stack(rows) for key, rows in driven.sampler.logits.items()}, was_behind)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def driven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DrivenDeviceRunner:
    """In fp32 on the CPU, in bf16 and with captured steps on a GPU."""
    device, dtype, options = str(request.param), torch.float32, dict[str, Any]()
    if device == "cuda":
        from punica_core.ops import cuda

        cuda.load()
        dtype, options = torch.bfloat16, {"flashinfer": True, "graphs": GRAPHS}
    root, adapters = tmp_path_factory.mktemp("adapters"), {}
    for slot, config in enumerate(ADAPTERS):
        folder = save_peft_adapter(root / str(slot), build("llama"), seed=slot, std=0.1, **config)
        adapters[slot] = load_adapter(adapter_ref(folder), linear_shapes(build("llama")), dtype, 256)
    made = DrivenDeviceRunner(build("llama").to(device, dtype), adapters, **options)
    run(made, MIXED, behind=True)  # memory that launches ask for the first time may make them wait
    return made


def reuse_plans(driven: DrivenDeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in driven.attention.inner._kinds:
        for lane in (kind.decode, kind.prompts):
            monkeypatch.setattr(lane, "_pinned", unguarded(lane._pinned))


def reuse_tables(driven: DrivenDeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driven.packer, "_pinned", unguarded(driven.packer._pinned))


@pytest.mark.parametrize(
    ("steps", "cut"), [(MIXED, True), (DECODING, False)], ids=["FlashInfer's plans", "our kernel's tables"]
)
def test_steps_launched_before_the_first_has_begun_equal_lock_step(
    driven: DrivenDeviceRunner, steps: Steps, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlashInferAttention, "wants_cut", lambda self, batch: cut)
    lock_step, behind = run(driven, steps), run(driven, steps, behind=True)
    assert behind.was_behind, "launching waited for the device"
    assert behind.equals(lock_step)
    assert not any(result.failed for result in behind.results)
    assert [len(result.sampled) for result in behind.results] == [len(a) + len(b) for a, b in steps]


@pytest.mark.parametrize("driven", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize(
    ("steps", "cut", "reuse"),
    [(MIXED, True, reuse_plans), (DECODING, False, reuse_tables)],
    ids=["FlashInfer's plans", "our kernel's tables"],
)
def test_with_one_buffer_for_all_steps_they_do_not(
    driven: DrivenDeviceRunner,
    steps: Steps,
    cut: bool,
    reuse: Callable[[DrivenDeviceRunner, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FlashInferAttention, "wants_cut", lambda self, batch: cut)
    few = steps[:DEPTH]  # as many as no other buffer makes wait
    lock_step = run(driven, few)
    reuse(driven, monkeypatch)
    assert run(driven, few).equals(lock_step), "in lock-step one buffer is enough"
    behind = run(driven, few, behind=True)
    assert behind.was_behind
    assert not behind.equals(lock_step)
