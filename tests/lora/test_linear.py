"""`LoRALinear` on its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from punica_core import BatchLoRA, LoRALinear, LoRAWeight


def random_weight(lora_rank: int, scale: float = 1.0, in_features: int = 24, out_features: int = 16) -> LoRAWeight:
    generator = torch.Generator().manual_seed(lora_rank)
    a = torch.randn(lora_rank, in_features, generator=generator)
    return LoRAWeight(a, torch.randn(out_features, lora_rank, generator=generator), scale=scale)


def layer_of(*, bias: bool = True) -> tuple[nn.Linear, LoRALinear]:
    torch.manual_seed(1)
    source = nn.Linear(24, 16, bias=bias)
    return source, LoRALinear.from_linear(source)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(6, 24), (6, 3, 24), (6, 2, 2, 24)], ids=str)
def test_each_row_gets_its_own_adapter(shape: tuple[int, ...], bias: bool) -> None:
    source, layer = layer_of(bias=bias)
    weights = [random_weight(3, 0.5), random_weight(17)]
    indices = [1, 0, -1, -1, 0, 1]
    x = torch.randn(shape)
    with BatchLoRA(layer, weights) as m:
        got = m(x, lora_indices=indices)
    with torch.no_grad():
        base = source(x)
    for row, index in enumerate(indices):
        want = base[row]
        if index >= 0:
            want = want + weights[index].scale * x[row] @ weights[index].a.T @ weights[index].b.T
            assert not torch.allclose(want, base[row], atol=1e-2)
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-4)


def test_inputs_may_be_strided() -> None:
    _, layer = layer_of()
    x = torch.randn(3, 24, 2).transpose(1, 2)
    with BatchLoRA(layer, [random_weight(4)]) as m:
        assert torch.equal(m(x, lora_indices=[0, -1, 0]), m(x.contiguous(), lora_indices=[0, -1, 0]))


def test_without_a_block_it_is_the_linear_it_was_made_from() -> None:
    source, layer = layer_of()
    x = torch.randn(5, 24)
    torch.testing.assert_close(layer(x), source(x))
    assert layer.weight is source.weight
    assert layer.bias is source.bias
    assert (layer.in_features, layer.out_features) == (24, 16)


def _turn_gradients_on(*_: object) -> None:
    torch.set_grad_enabled(True)


def test_a_gradient_that_would_lack_the_adapters_part_is_refused() -> None:
    _, layer = layer_of()
    lora = BatchLoRA(layer, [random_weight(4)])
    layer.register_forward_pre_hook(_turn_gradients_on)
    try:
        with lora as m, pytest.raises(RuntimeError, match="no gradient"):
            m(torch.randn(1, 24), lora_indices=[0])
    finally:
        torch.set_grad_enabled(True)


def test_a_bare_linear_is_told_to_be_wrapped() -> None:
    with pytest.raises(TypeError, match="from_linear"):
        BatchLoRA(nn.Linear(24, 16), [random_weight(4)]).__enter__()


def test_a_subclass_of_linear_is_refused() -> None:
    class Quantized(nn.Linear):
        pass

    with pytest.raises(TypeError, match="Quantized"):
        LoRALinear.from_linear(Quantized(4, 4))
