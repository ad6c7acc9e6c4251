"""Fused norms compute what the model's own do, or leave them alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from punica_core.model.norms import FusedRMSNorm, fuse_norms
from tests.support.tiny_models import TINY_MODELS


class PlusOneRMSNorm(LlamaRMSNorm):
    """As Gemma does it: the weight is stored less 1."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return super().forward(hidden_states) + hidden_states * scale


def holder(norm: nn.Module) -> nn.Module:
    parent = nn.Module()
    parent.norm = norm
    return parent


@pytest.mark.parametrize(("name", "norms"), [("llama", 7), ("qwen3", 13)])
def test_all_norms_of_a_model_are_fused_and_compute_the_same(name: str, norms: int) -> None:
    model, plain = TINY_MODELS[name](), TINY_MODELS[name]()
    assert fuse_norms(model) == norms
    x = torch.randn(3, 48)
    with torch.inference_mode():
        torch.testing.assert_close(model.model.norm(x), plain.model.norm(x), rtol=1e-5, atol=1e-6)
    assert isinstance(model.model.norm, FusedRMSNorm)


def test_a_norm_that_does_something_else_stays() -> None:
    parent = holder(PlusOneRMSNorm(16))
    assert fuse_norms(parent) == 0
    assert isinstance(parent.norm, PlusOneRMSNorm)


def test_a_norm_without_eps_stays() -> None:
    norm = LlamaRMSNorm(16)
    del norm.variance_epsilon
    assert fuse_norms(holder(norm)) == 0


def test_sixteen_bit_norms_stay() -> None:
    assert fuse_norms(holder(LlamaRMSNorm(16).to(torch.bfloat16))) == 0


def test_a_layer_norm_is_no_rms_norm() -> None:
    assert fuse_norms(holder(nn.LayerNorm(16))) == 0
