"""`torch.compile` under `BatchLoRA`: one whole graph for any mix, and no copy of the output that the ops change."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import detect_fake_mode

from punica_core import BatchLoRA, LoRALinear, LoRAWeight
from tests.support.peft_adapters import tiny_llama
from tests.support.peft_batch import prompts

COPIES = (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten.copy.default)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recorder:
    """A backend that keeps the graphs as inductor has them once it knows which mutations need a copy."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []
        self.backend = aot_autograd(fw_compiler=self._compile)

    def _compile(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own imports
            from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
            from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
            from torch._inductor.fx_utils import FakeTensorUpdater
            from torch._inductor.virtualized import V
        with V.set_fake_mode(detect_fake_mode(inputs)):
            reinplace_inplaceable_ops(FakeTensorUpdater(module), module.graph)
            decompose_auto_functionalized(module.graph)
        module.recompile()
        self.graphs.append(module.graph)
        return module.forward

    def targets(self) -> list[Any]:
        return [node.target for graph in self.graphs for node in graph.nodes if node.op == "call_function"]

    def num_copies(self) -> int:
        return sum(target in COPIES for target in self.targets())


def adapted_layer() -> tuple[LoRALinear, LoRAWeight]:
    torch.manual_seed(0)
    return LoRALinear.from_linear(nn.Linear(64, 48)), LoRAWeight(torch.randn(4, 64), torch.randn(48, 4))


def test_the_output_is_changed_in_place_without_a_copy() -> None:
    layer, weight = adapted_layer()
    x = torch.randn(3, 40, 64)
    recorder = Recorder()
    with BatchLoRA(layer, [weight]) as m:
        want = m(x, lora_indices=[0, -1, 0])
        layer.compile(backend=recorder.backend, fullgraph=True)
        assert torch.equal(m(x, lora_indices=[0, -1, 0]), want)
    assert torch.ops.punica.lora_expand.default in recorder.targets()
    assert recorder.num_copies() == 0


def test_a_caller_who_keeps_the_output_from_before_pays_one_copy() -> None:
    """The control of the test above: a needed copy is seen."""
    layer, weight = adapted_layer()
    x = torch.randn(3, 40, 64)
    recorder = Recorder()

    class Keeping:
        """The step's LoRA, and what it found."""

        def __init__(self, step: Any) -> None:
            self.step = step
            self.kept = torch.empty(0)

        def add(self, group: Any, x: Tensor, y: Tensor) -> None:
            self.kept = y.clone()
            self.step.add(group, x, y)

    with BatchLoRA(layer, [weight]) as m, torch.no_grad():
        m(x, lora_indices=[0, -1, 0])
        layer.context.step = Keeping(m._step)
        layer.compile(backend=recorder.backend, fullgraph=True)
        layer(x)
    assert recorder.num_copies() == 1


def test_one_graph_serves_every_mix(folders: list[Path]) -> None:
    model, eager = tiny_llama(), tiny_llama()
    ids = torch.stack(prompts([7] * 3))
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    model.compile(backend=backend, fullgraph=True)
    with BatchLoRA(model, folders) as compiled, BatchLoRA(eager, folders) as m:
        for lora_indices in ([0, -1, 1], [3, 3, 3], [2, 1, 0], [-1, -1, 2]):
            got = compiled(ids, lora_indices=lora_indices).logits
            torch.testing.assert_close(got, m(ids, lora_indices=lora_indices).logits, rtol=1e-5, atol=1e-5)
            assert not torch.allclose(got, m(ids, lora_indices=[0, 0, 0]).logits, atol=1e-2)
    assert len(graphs) == 1


def test_a_model_compiled_before_the_block_uses_its_adapters_and_forgets_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
    adapters = [{"0": adapted_layer()[1]}]
    x = torch.randn(2, 3, 64)
    with BatchLoRA(model, adapters) as m:
        want = m(x, lora_indices=[0, -1])
    model.compile(backend="eager")
    with torch.no_grad():
        base = model(x)
        with BatchLoRA(model, adapters) as m:
            torch.testing.assert_close(m(x, lora_indices=[0, -1]), want)
        assert torch.equal(model(x), base)
    assert not torch.allclose(base[0], want[0], atol=1e-2)
