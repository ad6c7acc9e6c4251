"""A machine that cannot capture shrink beside the base product captures them one after another."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from punica_core.engine import device_runner
from punica_core.engine.graphs import GraphKey, GraphSizes
from punica_core.lora.weights import load_adapter
from tests.support.driven_device_runner import DrivenDeviceRunner
from tests.support.peft_adapters import adapter_ref, linear_shapes, save_peft_adapter, tiny_llama

SIZES = GraphSizes(decode=(2, 4), mixed=(0, 4), prompt_rows=(64, 384))
NUM_GRAPHS = 8 + 2 * (2 + 3)
"""Two decode sizes, with and without pieces of contexts, with and without adapters; two of 64 prompt rows, with and
without adapters; and two of 384, where those with adapters come in two orders."""


class Captures:
    """Stands in for `StepGraphs`: runs what it is to capture, and refuses as long as `refuse` has errors."""

    def __init__(self, refuse: list[Exception]) -> None:
        self.refuse = refuse
        self.done: list[GraphKey] = []

    def __call__(self, sizes: GraphSizes, logits: Tensor) -> Captures:
        return self

    def capture(self, key: GraphKey, run: Callable[[], Tensor]) -> None:
        run()
        if self.refuse:
            raise self.refuse.pop()
        self.done.append(key)


@pytest.fixture
def driven(tmp_path: Path) -> DrivenDeviceRunner:
    folder = save_peft_adapter(tmp_path / "a", r=4)
    weights = load_adapter(adapter_ref(folder), linear_shapes(tiny_llama()), torch.float32, 256)
    return DrivenDeviceRunner(tiny_llama(), {0: weights})


def capture(driven: DrivenDeviceRunner, captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_runner, "StepGraphs", captures)
    driven.runner.capture(SIZES, torch.empty(SIZES.largest.num_logits, driven.loaded.vocab_size))


def test_all_is_captured_beside_the_product(driven, monkeypatch) -> None:
    captures = Captures([])
    capture(driven, captures, monkeypatch)
    assert len(set(captures.done)) == NUM_GRAPHS == SIZES.num_graphs(lora=True)
    assert driven.lora.beside


def test_what_fails_once_is_captured_without_and_said(driven, monkeypatch, caplog) -> None:
    captures = Captures([RuntimeError("the edge is refused")])
    with caplog.at_level(logging.WARNING):
        capture(driven, captures, monkeypatch)
    assert len(set(captures.done)) == NUM_GRAPHS
    assert not driven.lora.beside
    assert "the edge is refused" in caplog.text


TWICE = [RuntimeError("again"), RuntimeError("first")]


@pytest.mark.parametrize("refuse", [TWICE, [torch.OutOfMemoryError("full")]], ids=["twice", "memory"])
def test_what_another_order_does_not_mend_is_raised(driven, monkeypatch, refuse) -> None:
    error = type(refuse[0])
    with pytest.raises(error, match=str(refuse[0])):
        capture(driven, Captures(list(refuse)), monkeypatch)
    assert driven.lora.beside is (error is torch.OutOfMemoryError)
