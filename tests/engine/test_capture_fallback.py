"""What a machine cannot capture it does without: shrink beside the base product, an order that has a next best one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from punica_core.engine import device_runner
from punica_core.engine.graphs import GraphKey, GraphSizes
from punica_core.lora.table_step import LoRAOrder, TableLoRA
from punica_core.lora.weights import AdapterWeights, load_adapter
from tests.support.driven_device_runner import DrivenDeviceRunner
from tests.support.driven_runner import DrivenRunner, random_prompt
from tests.support.peft_adapters import adapter_ref, linear_shapes, save_peft_adapter, tiny_llama

SIZES = GraphSizes(decode=(2, 4), mixed=(0, 4), prompt_rows=(64, 384), inside_rows=128)
NUM_GRAPHS = 8 + 4 + 2 + 2 * (2 + 3)
"""Two decode sizes, with and without pieces of contexts, with and without adapters; those with adapters inside too, as
are 64 prompt rows alone and with four others; two of 64 prompt rows, with and without adapters; and two of 384, where
those with adapters come in two orders."""

Refusal: TypeAlias = Callable[[GraphKey, TableLoRA], str | None]
"""Why a step cannot be captured."""


class Captures:
    """Stands in for `StepGraphs`: runs what it is to capture, refuses some of it, and replays by running it again."""

    def __init__(self, refusal: Refusal, lora: TableLoRA) -> None:
        self.refusal = refusal
        self.lora = lora
        self.sizes = SIZES
        self.done: dict[GraphKey, Callable[[], Tensor]] = {}
        self.replayed: list[GraphKey] = []

    def __call__(self, sizes: GraphSizes, logits: Tensor) -> Captures:
        return self

    def capture(self, key: GraphKey, run: Callable[[], Tensor]) -> None:
        run()
        reason = self.refusal(key, self.lora)
        if reason is not None:
            raise RuntimeError(reason)
        assert key not in self.done
        self.done[key] = run

    def replay(self, key: GraphKey) -> Tensor:
        self.replayed.append(key)
        return self.done[key]()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> AdapterWeights:
    folder: Path = save_peft_adapter(tmp_path_factory.mktemp("adapters") / "a", r=4)
    return load_adapter(adapter_ref(folder), linear_shapes(tiny_llama()), torch.float32, 256)


Capture: TypeAlias = Callable[[Refusal], tuple[DrivenDeviceRunner, Captures]]


@pytest.fixture
def capture(weights: AdapterWeights, monkeypatch: pytest.MonkeyPatch) -> Capture:
    def start(refusal: Refusal) -> tuple[DrivenDeviceRunner, Captures]:
        driven = DrivenDeviceRunner(tiny_llama(), {0: weights})
        assert driven.lora is not None
        driven.lora.inside_rows = SIZES.inside_rows
        captures = Captures(refusal, driven.lora)
        monkeypatch.setattr(device_runner, "StepGraphs", captures)
        driven.runner.capture(SIZES, torch.empty(SIZES.largest.num_logits, driven.loaded.vocab_size))
        return driven, captures

    return start


SIZES_KEYS = {key for step in SIZES.steps() for key in SIZES.keys(step, lora=True)}


def all_but(order: LoRAOrder) -> set[GraphKey]:
    assert any(key.order is order for key in SIZES_KEYS)
    return {key for key in SIZES_KEYS if key.order is not order}


def test_all_is_captured_in_the_best_order(capture: Capture) -> None:
    driven, captures = capture(lambda key, lora: None)
    assert len(captures.done) == NUM_GRAPHS == SIZES.num_graphs(lora=True)
    assert driven.lora.beside
    assert not driven.lora.dropped


@pytest.mark.parametrize(
    "orders",
    [{LoRAOrder.BESIDE}, {LoRAOrder.BESIDE, LoRAOrder.AHEAD}, {LoRAOrder.INSIDE}],
    ids=["", "bias", "layers that are not inside"],
)
def test_where_kernels_cannot_run_beside_others_they_run_after_them(
    capture: Capture, caplog: pytest.LogCaptureFixture, orders: set[LoRAOrder]
) -> None:
    """In the order ahead, too, if layers have a bias, and inside in steps with layers that are not."""
    with caplog.at_level(logging.WARNING):
        driven, captures = capture(
            lambda key, lora: "the edge is refused" if lora.beside and key.order in orders else None
        )
    assert len(captures.done) == NUM_GRAPHS
    assert not driven.lora.beside
    assert not driven.lora.dropped
    assert caplog.messages == [
        "shrink does not run beside the base product, as capturing that failed: the edge is refused"
    ]


def test_an_order_that_fails_is_dropped_for_all_steps(capture: Capture, caplog: pytest.LogCaptureFixture) -> None:
    order = LoRAOrder.AHEAD
    with caplog.at_level(logging.WARNING):
        driven, captures = capture(lambda key, lora: "no such kernel" if key.order is order else None)
    assert {*captures.done} == all_but(order)
    assert driven.lora.dropped == {order}
    assert driven.lora.beside, "that had no part in it"
    assert caplog.messages == [
        f"LoRA is never computed in the order {order.name}, as capturing that failed: no such kernel"
    ]


@pytest.mark.parametrize("most_rows", [0, 64])
def test_steps_inside_that_fail_are_given_up_for_many_rows_first(
    capture: Capture, caplog: pytest.LogCaptureFixture, most_rows: int
) -> None:
    def refusal(key: GraphKey, lora: TableLoRA) -> str | None:
        return "no such kernel" if key.order is LoRAOrder.INSIDE and key.sizes.num_rows > most_rows else None

    with caplog.at_level(logging.WARNING):
        driven, captures = capture(refusal)
    inside = {key for key in SIZES_KEYS if key.order is LoRAOrder.INSIDE and key.sizes.num_rows <= most_rows}
    assert {*captures.done} == all_but(LoRAOrder.INSIDE) | inside
    assert bool(inside) == (most_rows > 0)
    assert driven.lora.inside_rows == 64
    assert driven.lora.dropped == (set() if inside else {LoRAOrder.INSIDE})
    name = "LoRA is never computed in the order INSIDE"
    reason = ", as capturing that failed: no such kernel"
    assert caplog.messages == [
        f"{name} in steps of more than 64 rows{reason}",
        *([] if inside else [f"{name}{reason}"]),
    ]


def test_an_order_may_be_dropped_and_kernels_not_run_beside_others(capture: Capture) -> None:
    def refusal(key: GraphKey, lora: TableLoRA) -> str | None:
        is_beside = lora.beside and key.order is LoRAOrder.BESIDE
        return "no" if is_beside or key.order is LoRAOrder.AHEAD else None

    driven, captures = capture(refusal)
    assert {*captures.done} == all_but(LoRAOrder.AHEAD)
    assert driven.lora.dropped == {LoRAOrder.AHEAD}
    assert not driven.lora.beside


@pytest.mark.parametrize("order", [LoRAOrder.BESIDE, LoRAOrder.NONE], ids=str)
def test_an_order_without_another_is_needed(capture: Capture, order: LoRAOrder) -> None:
    with pytest.raises(RuntimeError, match="no such kernel"):
        capture(lambda key, lora: "no such kernel" if key.order is order else None)


@pytest.mark.parametrize("order", LoRAOrder, ids=str)
def test_want_of_memory_is_no_reason_to_do_without(capture: Capture, order: LoRAOrder) -> None:
    def refuse(key: GraphKey, lora: TableLoRA) -> None:
        if key.order is order:
            raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError, match="full"):
        capture(refuse)


def few_rows(key: GraphKey) -> bool:
    return key.sizes.num_rows < 64


@pytest.mark.parametrize(
    ("refusal", "prompt", "orders"),
    [
        (lambda key: False, 100, [LoRAOrder.AHEAD, LoRAOrder.INSIDE]),
        (lambda key: key.order is LoRAOrder.AHEAD, 100, [LoRAOrder.BESIDE, LoRAOrder.INSIDE]),
        (lambda key: key.order is LoRAOrder.INSIDE, 100, [LoRAOrder.AHEAD, LoRAOrder.BESIDE]),
        (lambda key: key.order is LoRAOrder.INSIDE and few_rows(key), 30, [LoRAOrder.BESIDE, LoRAOrder.BESIDE]),
    ],
    ids=["none", "ahead", "inside", "inside, but captured once"],
)
def test_steps_take_the_next_best_order(
    capture: Capture,
    weights: AdapterWeights,
    refusal: Callable[[GraphKey], bool],
    prompt: int,
    orders: list[LoRAOrder],
) -> None:
    driven, captures = capture(lambda key, lora: "no such kernel" if refusal(key) else None)
    plain = DrivenRunner(tiny_llama(), {0: weights})
    logits = []
    for runner in (driven, plain):
        sequence = runner.sequence(random_prompt(prompt, 512), 0)
        runner.generate([sequence], new_tokens=3)
        logits.append(runner.logits_of(sequence))
    assert [key.order for key in captures.replayed] == [orders[0], orders[1], orders[1]]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
