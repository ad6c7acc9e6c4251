"""The block of `BatchLoRA`: what it leaves behind, and what it refuses, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from punica_core import BatchLoRA, LoRALinear, LoRAWeight
from punica_core.errors import AdapterError, AdapterInvalid, AdapterMismatch, AdapterTooLarge, AdapterUnsupported
from tests.support.peft_adapters import save_peft_adapter, tiny_llama
from tests.support.peft_batch import prompts

IDS = torch.stack(prompts([6] * 2))


class State:
    """Everything about a model that a block must leave as it was."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module, type(module), id(module)) for name, module in model.named_modules()]
        self._parameters = [(name, id(p), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()]
        self._values = {name: value.clone() for name, value in model.state_dict().items()}
        self._hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        with torch.no_grad():
            self._logits = model(IDS).logits

    def assert_same(self, model: nn.Module) -> None:
        now = State(model)
        assert now._modules == self._modules
        assert now._parameters == self._parameters
        assert now._hooks == self._hooks
        assert now._values.keys() == self._values.keys()
        assert all(torch.equal(now._values[name], value) for name, value in self._values.items())
        assert torch.equal(now._logits, self._logits)


def test_the_model_is_bitwise_as_before_after_the_block(folders: list[Path]) -> None:
    model = tiny_llama()
    before = State(model)
    with BatchLoRA(model, folders) as m:
        m(IDS, lora_indices=[0, 2])
        m.generate(IDS, attention_mask=torch.ones_like(IDS), lora_indices=[1, 3], max_new_tokens=2)
        with pytest.raises(AssertionError):
            before.assert_same(model)
    before.assert_same(model)


def test_the_model_is_bitwise_as_before_after_an_exception_in_a_layer(folders: list[Path]) -> None:
    model = tiny_llama()
    before = State(model)
    handle = model.model.layers[1].register_forward_hook(_fail)
    with pytest.raises(_Failure), BatchLoRA(model, folders) as m:
        m(IDS, lora_indices=[0, 2])
    handle.remove()
    before.assert_same(model)


def test_after_a_failed_call_the_next_one_is_right(folders: list[Path]) -> None:
    model = tiny_llama()
    with BatchLoRA(model, folders) as m:
        want = m(IDS, lora_indices=[0, 2]).logits
        handle = model.model.layers[1].register_forward_hook(_fail)
        with pytest.raises(_Failure):
            m(IDS, lora_indices=[1, 1])
        handle.remove()
        base = model(IDS).logits
        assert torch.equal(m(IDS, lora_indices=[0, 2]).logits, want)
    assert not torch.allclose(base, want, atol=1e-2), "outside of m's calls the model is the base"
    torch.testing.assert_close(base, model(IDS).logits)


def test_a_block_can_be_entered_again(folders: list[Path]) -> None:
    lora = BatchLoRA(tiny_llama(), folders)
    with lora as m:
        first = m(IDS, lora_indices=[0, 2]).logits
    with lora as m:
        assert torch.equal(m(IDS, lora_indices=[0, 2]).logits, first)


def test_nested_use_is_refused_and_leaves_the_outer_block_working(folders: list[Path]) -> None:
    model = tiny_llama()
    inner = BatchLoRA(model, folders[:1])
    with BatchLoRA(model, folders) as m:
        want = m(IDS, lora_indices=[0, 2]).logits
        for other in (inner, m, BatchLoRA(model, folders[1:])):
            with pytest.raises(RuntimeError, match="inside a BatchLoRA already"):
                other.__enter__()
        assert torch.equal(m(IDS, lora_indices=[0, 2]).logits, want)
    with inner as m:
        m(IDS, lora_indices=[0, -1])


def test_calls_outside_of_the_block_are_refused(folders: list[Path]) -> None:
    lora = BatchLoRA(tiny_llama(), folders)
    with pytest.raises(RuntimeError, match="inside its block"):
        lora(IDS, lora_indices=[0, 1])


def test_a_model_that_moved_is_refused(folders: list[Path]) -> None:
    model = tiny_llama()
    lora = BatchLoRA(model, folders)
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"_proj' is torch\.bfloat16 .* adapters are torch\.float32"):
        lora.__enter__()


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0], "1 lora_indices for a batch of 2"),
        ([0, 1, 1], "3 lora_indices for a batch of 2"),
        ([0, 4], r"lora_indices\[1\] is 4; there are 4 adapters"),
        ([-2, 0], r"lora_indices\[0\] is -2"),
        ([0.0, 1.0], "must be integers"),
        ([True, False], "must be integers"),
        ([[0, 1]], "one for each row"),
        (torch.tensor([0, 9]), r"lora_indices\[1\] is 9"),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", ["__call__", "generate"])
def test_wrong_indices_are_named(folders: list[Path], call: str, indices: Any, message: str) -> None:
    with BatchLoRA(tiny_llama(), folders) as m, pytest.raises(ValueError, match=message):
        getattr(m, call)(IDS, lora_indices=indices)


def test_a_call_without_inputs_is_named(folders: list[Path]) -> None:
    with BatchLoRA(tiny_llama(), folders) as m, pytest.raises(ValueError, match="no batch was found"):
        m(lora_indices=[0])


def test_a_layer_whose_rows_are_not_the_batchs_is_named(folders: list[Path]) -> None:
    model = tiny_llama()
    model.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0][:, :1].repeat(1, 3, 1)[0], *args[1:]))
    with BatchLoRA(model, folders) as m, pytest.raises(ValueError, match="got 3 rows, which 2 lora_indices"):
        m(IDS, lora_indices=[0, 1])


def weight(in_features: int = 64, out_features: int = 64) -> LoRAWeight:
    return LoRAWeight(torch.ones(2, in_features), torch.ones(out_features, 2))


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("adapter", "error", "message"),
    [
        ({}, AdapterInvalid, "adapter 0: it adapts no module"),
        ({"model.layers.7.q": weight()}, AdapterMismatch, r"adapter 0: 1 of 1 .*'model\.layers\.7\.q'.*names like"),
        ({Q: weight(32)}, AdapterMismatch, r"q_proj' is adapted 32 → 64 .* the model has 64 → 64"),
        ({Q: weight(64, 32)}, AdapterMismatch, "adapted 64 → 32"),
        ({"model.embed_tokens": weight()}, AdapterUnsupported, "'model.embed_tokens' is of type Embedding"),
        (weight(), AdapterUnsupported, "'' is of type LlamaForCausalLM"),
        ("/nowhere/at/all", AdapterInvalid, r"adapter 0 \('/nowhere/at/all'\): .*neither a folder nor"),
    ],
    ids=["empty", "no module", "in", "out", "embedding", "bare weight", "no folder"],
)
def test_adapters_that_do_not_fit_are_named(adapter: Any, error: type[AdapterError], message: str) -> None:
    with pytest.raises(error, match=message):
        BatchLoRA(tiny_llama(), [adapter])


@pytest.mark.parametrize("adapters", ["ab", Path("ab"), {Q: weight()}, weight()], ids=lambda one: type(one).__name__)
def test_one_adapter_in_the_place_of_a_list_is_refused(adapters: Any) -> None:
    with pytest.raises(TypeError, match=rf"adapters is one {type(adapters).__name__}; give a list"):
        BatchLoRA(tiny_llama(), adapters)
    BatchLoRA(tiny_llama(), ({Q: weight()},))


@pytest.mark.parametrize(("lora_rank", "served"), [(256, True), (257, False)])
def test_too_high_a_rank_is_refused_without_a_word_of_the_server(tmp_path: Path, lora_rank: int, served: bool) -> None:
    folder = save_peft_adapter(tmp_path / "a", tiny_llama(), r=lora_rank)
    if served:
        BatchLoRA(tiny_llama(), [folder])
        return
    with pytest.raises(AdapterTooLarge, match="has rank 257; 1 to 256 are served") as caught:
        BatchLoRA(tiny_llama(), [folder])
    assert "--" not in caught.value.message


def test_an_adapter_of_another_base_is_named(tmp_path: Path, folders: list[Path]) -> None:
    other = save_peft_adapter(tmp_path / "other", tiny_llama(hidden_size=128))
    with pytest.raises(AdapterMismatch, match=r"adapter 1 \('.*other'\): .*→ 128 .*the model has 176 → 64"):
        BatchLoRA(tiny_llama(), [folders[0], other])


class Routed(nn.Module):
    """One expert of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(64, 64)])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Embedding(3, 4), "no torch.nn.Linear"),
        (lambda: tiny_llama().double(), "is in torch.float64"),
        (lambda: tiny_llama().to("meta"), "is on meta"),
    ],
    ids=["no linear", "float64", "meta"],
)
def test_models_that_cannot_be_adapted_are_named(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchLoRA(build(), [])


def test_an_encoder_decoder_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(is_encoder_decoder=True)
    with pytest.raises(ValueError, match="only decoders"):
        BatchLoRA(model, [])


def test_lora_on_an_expert_is_refused() -> None:
    with pytest.raises(AdapterUnsupported, match=r"'experts\.0' is an expert's"):
        BatchLoRA(Routed(), [{"experts.0": weight()}])


def test_modules_without_a_config_run_too() -> None:
    """A batch through a plain module, its layers already LoRALinears or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), LoRALinear.from_linear(nn.Linear(32, 8)))
    x = torch.randn(3, 5, 64)
    adapters = [{"0": weight(64, 32)}, {"0": weight(64, 32), "2": weight(32, 8)}]
    layer = model[2]
    with BatchLoRA(model, adapters) as m:
        got = m(x, lora_indices=[1, -1, 0])
    assert model[2] is layer
    for row, index in enumerate([1, -1, 0]):
        want = _plain(model, x[row], adapters[index] if index >= 0 else {})
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[1], got[1])


def _plain(model: Sequence[nn.Module], x: Tensor, adapter: dict[str, LoRAWeight]) -> Tensor:
    with torch.no_grad():
        for name in ("0", "1", "2"):
            y = model[int(name)](x)
            if name in adapter:
                y = y + adapter[name].scale * x @ adapter[name].a.T @ adapter[name].b.T
            x = y
    return x


class _Failure(Exception):
    pass


def _fail(*_: Any) -> None:
    raise _Failure
