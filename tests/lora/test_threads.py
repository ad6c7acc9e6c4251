"""Products get all threads where that is measured to be faster, and one elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from punica_core.lora import threads as module
from punica_core.lora.threads import TRIALS, TRIED_AGAIN_AFTER, Threads

COUNT = 2


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(module.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(module, "linear", machine.linear)
    return machine


class Machine:
    """A clock that products move on. milliseconds: of a product by (outputs, threads)."""

    def __init__(self) -> None:
        self.now = 0.0
        self.milliseconds: Callable[[int, int], float] = lambda outputs, threads: 1.0
        self.used: list[int] = []

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.used.append(torch.get_num_threads())
        self.now += 1e-3 * self.milliseconds(weight.size(0), self.used[-1])
        return torch.nn.functional.linear(x, weight, bias)

    def threads_of(self, threads: Threads, outputs: int, rows: int = 1, products: int = 1) -> set[int]:
        """Numbers of threads that the next products use."""
        self.used.clear()
        threads.use_one()
        for _ in range(products):
            threads.linear(torch.ones(rows, 3), torch.ones(outputs, 3), None)
        assert torch.get_num_threads() == 1
        return set(self.used)


def try_out(machine: Machine, threads: Threads, outputs: int, rows: int = 1) -> None:
    assert machine.threads_of(threads, outputs, rows, 2 * TRIALS) == {1, COUNT}


def test_what_is_faster_on_all_threads_gets_them_and_nothing_else_does(machine: Machine) -> None:
    machine.milliseconds = lambda outputs, threads: outputs / threads + 2.0 * (threads - 1)
    threads = Threads(COUNT)
    for outputs in (100, 1):
        try_out(machine, threads, outputs)
    assert machine.threads_of(threads, 100, products=5) == {COUNT}
    assert machine.threads_of(threads, 1, products=5) == {1}


def test_a_little_faster_is_not_worth_the_other_threads(machine: Machine) -> None:
    machine.milliseconds = lambda outputs, threads: 1.0 if threads == 1 else 0.95
    threads = Threads(COUNT)
    try_out(machine, threads, 4)
    assert machine.threads_of(threads, 4) == {1}


def test_one_slow_product_does_not_decide(machine: Machine) -> None:
    machine.milliseconds = lambda outputs, threads: 1.0 if threads == 1 or len(machine.used) == 1 else 0.5
    threads = Threads(COUNT)
    try_out(machine, threads, 4)
    assert machine.threads_of(threads, 4) == {COUNT}


def test_few_and_many_rows_are_tried_apart(machine: Machine) -> None:
    machine.milliseconds = lambda outputs, threads: 1.0 if threads == 1 else 0.5
    threads = Threads(COUNT)
    try_out(machine, threads, 4, rows=1)
    try_out(machine, threads, 4, rows=8)
    assert machine.threads_of(threads, 4, rows=9) == {COUNT}


def test_a_machine_that_becomes_busy_is_noticed_after_a_while(machine: Machine) -> None:
    machine.milliseconds = lambda outputs, threads: 1.0 if threads == 1 else 0.5
    threads = Threads(COUNT)
    try_out(machine, threads, 4)
    machine.milliseconds = lambda outputs, threads: 1.0 if threads == 1 else 3.0
    assert machine.threads_of(threads, 4, products=100) == {COUNT}
    machine.now += TRIED_AGAIN_AFTER
    machine.threads_of(threads, 4)
    try_out(machine, threads, 4)
    assert machine.threads_of(threads, 4, products=100) == {1}


def test_one_thread_has_nothing_to_choose(machine: Machine) -> None:
    torch.set_num_threads(1)
    assert machine.threads_of(Threads(1), 4, products=3 * TRIALS) == {1}


def test_the_product_is_that_of_linear() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 7), torch.randn(5, 7), torch.randn(5)
    threads = Threads(COUNT)
    threads.use_one()
    for _ in range(3 * TRIALS):
        y = threads.linear(x, weight, bias)
        torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias))
    threads.use_all()
    assert torch.get_num_threads() == COUNT
