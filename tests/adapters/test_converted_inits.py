"""PiSSA, OLoRA, CorDA and LoRA-GA take a part out of the base's weights: served once PEFT has converted them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from torch import Tensor
from transformers import PreTrainedModel

from punica_core.errors import AdapterInvalid, AdapterUnsupported
from punica_core.lora.packed import PackedReader, write_packed
from tests.support.adapter_formats import PROMPT, load_for
from tests.support.driven_runner import DrivenRunner
from tests.support.peft_adapters import edit_config, packed_ref, peft_logits, peft_warnings_ignored, tiny_llama

IDS = torch.tensor([[4, 60, 5, 9, 17, 3, 9, 7, 11, 200, 31, 77]])


def seen_by_corda(base: PreTrainedModel, config: LoraConfig) -> None:
    """Covariances of what goes into the linears, of more tokens than these have inputs."""

    def run() -> None:
        for seed in range(16):
            ids = torch.randint(3, 512, (1, 24), generator=torch.Generator().manual_seed(seed))
            base(ids)

    preprocess_corda(base, config, run_model=run)


def seen_by_lora_ga(base: PreTrainedModel, config: LoraConfig) -> None:
    """Gradients of the linears' weights."""
    preprocess_loraga(base, config, lambda: base(IDS, labels=IDS).loss.backward())


METHODS: dict[str, tuple[dict[str, Any], Callable[[PreTrainedModel, LoraConfig], None]]] = {
    "pissa": ({}, lambda base, config: None),
    "pissa_niter_4": ({}, lambda base, config: None),
    "olora": ({}, lambda base, config: None),
    "corda": ({"corda_config": CordaConfig(corda_method="kpm")}, seen_by_corda),
    "corda, ipm": ({"corda_config": CordaConfig(corda_method="ipm")}, seen_by_corda),
    "lora_ga": ({"lora_ga_config": LoraGAConfig()}, seen_by_lora_ga),
    "lora_ga, A2rBr": ({"lora_ga_config": LoraGAConfig(direction="A2rBr", scale="gd_scale")}, seen_by_lora_ga),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True, "lora_alpha": 3},
    "patterns": {"rank_pattern": {"v_proj": 2, "layers.1.*q_proj": 5}, "alpha_pattern": {"down_proj": 3}},
}


class Trained:
    """A model that PEFT initialised with `method` and that was trained a little: it computes `wanted`."""

    def __init__(self, method: str, root: Path, **options: Any) -> None:
        self.init = method.partition(",")[0]
        more, prepare = METHODS[method]
        settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]} | more | options
        config = LoraConfig(init_lora_weights=self.init, task_type="CAUSAL_LM", **settings)
        base = tiny_llama()
        with peft_warnings_ignored():
            prepare(base, config)
            self.model: PeftModel = get_peft_model(base, config).eval()
            self.initial = root / "initial"
            self._set_init(True)  # so that PEFT does not take the part out again when it loads this
            self.model.save_pretrained(self.initial)
            self._set_init(self.init)
            self._train()
            with torch.no_grad():
                self.wanted: Tensor = self.model(torch.tensor([PROMPT])).logits[0, -1]

    def save(self, folder: Path, *, converted: bool) -> Path:
        more = {"path_initial_model_for_weight_conversion": str(self.initial)} if converted else {}
        with peft_warnings_ignored():
            self.model.save_pretrained(folder, **more)
        return folder

    def _set_init(self, value: bool | str) -> None:
        self.model.peft_config["default"].init_lora_weights = value  # type: ignore[assignment]

    def _train(self) -> None:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    step = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(step * 0.5 * parameter.std())


def logits(folder: Path, driven: DrivenRunner) -> tuple[Tensor, Tensor]:
    """[V] behind the prompt: with the adapter, and of the base."""
    driven.adapters[0] = load_for(driven.loaded, folder)
    sequences = [driven.sequence(PROMPT, slot) for slot in (0, -1)]
    driven.step(sequences)
    return driven.logits_of(sequences[0])[0], driven.logits_of(sequences[1])[0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("method", METHODS)
def test_once_converted_it_is_what_was_trained(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    trained = Trained(method, tmp_path, **options)
    folder = trained.save(tmp_path / "converted", converted=True)
    driven = DrivenRunner(tiny_llama())
    got, plain = logits(folder, driven)
    torch.testing.assert_close(got, trained.wanted, rtol=0, atol=1e-3)
    torch.testing.assert_close(got, peft_logits(folder, list(PROMPT))[-1], rtol=0, atol=1e-4)
    assert (got - plain).abs().max() > 0.05, "the adapter does nothing, so this proves nothing"


@pytest.mark.parametrize("method", METHODS)
def test_as_it_is_it_is_refused_for_it_is_not_the_whole_adapter(method: str, tmp_path: Path) -> None:
    trained = Trained(method, tmp_path)
    folder = trained.save(tmp_path / "as it is", converted=False)
    driven = DrivenRunner(tiny_llama())
    with pytest.raises(AdapterUnsupported, match=rf"init_lora_weights is '{trained.init}'.*weight_conversion"):
        load_for(driven.loaded, folder)
    edit_config(folder, init_lora_weights=True)
    got, _ = logits(folder, driven)
    assert (got - trained.wanted).abs().max() > 0.05, "its A and B alone would do, so why refuse it?"


@pytest.mark.parametrize("method", ["corda", "lora_ga"])
def test_converted_and_packed_it_is_the_same(method: str, tmp_path: Path) -> None:
    folder = Trained(method, tmp_path).save(tmp_path / "converted", converted=True)
    loaded = DrivenRunner(tiny_llama()).loaded
    weights = load_for(loaded, folder)
    write_packed(str(tmp_path / "a.punica"), weights, loaded.module_shapes, torch.float32)
    with PackedReader(packed_ref(tmp_path / "a.punica"), loaded.module_shapes, torch.float32, 256) as reader:
        packed = reader.read()
    for path, module in weights.modules.items():
        assert torch.equal(packed.modules[path].b, module.b)
        assert packed.modules[path].scale == module.scale


@pytest.mark.parametrize(
    ("options", "words"),
    [({"use_dora": True}, "magnitude"), ({"modules_to_save": ["lm_head"]}, "lm_head")],
    ids=["DoRA", "modules_to_save"],
)
def test_what_peft_drops_when_it_converts_is_missed(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    """PEFT writes A and B alone then, and a config that says there is more."""
    folder = Trained("pissa", tmp_path, **options).save(tmp_path / "converted", converted=True)
    with pytest.raises(AdapterInvalid, match=words):
        load_for(DrivenRunner(tiny_llama()).loaded, folder)
