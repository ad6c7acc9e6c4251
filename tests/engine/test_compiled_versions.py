"""The layers' code may be compiled for as many kinds of steps as there are, not only as often as torch's default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from punica_core.engine.forward import MOST_VERSIONS, compile_layers

DEFAULT = 8


class Kinds(nn.Module):  # type: ignore[misc]
    """A layer whose code depends on the kind of the step, as a decoder layer's on the order of its adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.kind


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Kinds()])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=DEFAULT):
        yield
    torch._dynamo.reset()


def run_kinds(layer: Kinds, count: int) -> list[float]:
    found = []
    for kind in range(count):
        layer.kind = kind
        found.append(float(layer(torch.zeros(3))[0]))
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_more_kinds_of_steps_than_torch_allows_by_default_are_compiled() -> None:
    model = Model()
    compile_layers(model, backend="eager")
    (layer,) = model.model.layers
    assert run_kinds(layer, 3 * DEFAULT) == list(range(3 * DEFAULT))
    assert torch._dynamo.config.recompile_limit == MOST_VERSIONS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_without_that_torch_refuses() -> None:
    model = Model()
    compile_layers(model, backend="eager")
    (layer,) = model.model.layers
    with torch._dynamo.config.patch(recompile_limit=DEFAULT), pytest.raises(FailOnRecompileLimitHit):
        run_kinds(layer, 3 * DEFAULT)


def test_a_higher_limit_stays() -> None:
    with torch._dynamo.config.patch(recompile_limit=2 * MOST_VERSIONS):
        compile_layers(Model(), backend="eager")
        assert torch._dynamo.config.recompile_limit == 2 * MOST_VERSIONS
