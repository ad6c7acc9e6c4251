"""Every PEFT method and every field of its LoraConfig is served, known to change nothing, or refused by name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from peft import LoraConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner

from punica_core.adapters.peft_config import LoraSettings, parse_config
from punica_core.errors import AdapterInvalid, AdapterUnsupported

SERVED = {
    *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora"),
    *("lora_bias", "bias", "modules_to_save", "trainable_token_indices", "init_lora_weights"),
}
REFUSED: dict[str, Any] = {
    "fan_in_fan_out": True,
    "megatron_config": {"tensor_model_parallel_size": 2},
    "layer_replication": [[0, 2], [1, 3]],
    "alora_invocation_tokens": [1, 2],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 0.1},
    "monteclora_config": {"num_samples": 4},
}
CHANGES_NOTHING: dict[str, Any] = {
    "auto_mapping": {"base_model_class": "LlamaForCausalLM"},
    "base_model_name_or_path": "nobody/does-not-exist",
    "revision": "main",
    "inference_mode": False,
    "peft_version": "0.21.2",
    "target_modules": ".*",
    "exclude_modules": ["lm_head"],
    "layers_to_transform": [1],
    "layers_pattern": "layers",
    "lora_dropout": 0.5,
    "megatron_core": "megatron.core",
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "kpm"},
    "lora_ga_config": {"direction": "ArB2r"},
    "velora_config": {"num_groups": 2},
    "qalora_group_size": 32,
    "runtime_config": {"ephemeral_gpu_offload": True},
    "ensure_weight_tying": True,
}


def parsed(**changes: Any) -> LoraSettings:
    return parse_config(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | changes).encode())


def test_every_field_of_pefts_config_is_accounted_for() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - SERVED - REFUSED.keys() - CHANGES_NOTHING.keys() == set()
    assert not SERVED & REFUSED.keys()


@pytest.mark.parametrize(("key", "value"), REFUSED.items(), ids=REFUSED.keys())
def test_what_is_not_served_is_refused_by_name_and_off_when_empty(key: str, value: Any) -> None:
    with pytest.raises(AdapterUnsupported, match=key):
        parsed(**{key: value})
    assert parsed(**{key: None}) == parsed(**{key: False}) == parsed()


@pytest.mark.parametrize(("key", "value"), CHANGES_NOTHING.items(), ids=CHANGES_NOTHING.keys())
def test_what_changes_nothing_is_ignored(key: str, value: Any) -> None:
    assert parsed(**{key: value}) == parsed()


@pytest.mark.parametrize("kind", [kind.value for kind in PeftType if kind is not PeftType.LORA])
def test_every_other_method_is_refused_by_name(kind: str) -> None:
    with pytest.raises(AdapterUnsupported, match=f"peft_type is '{kind}'.*train a LoRA"):
        parsed(peft_type=kind)


@pytest.mark.parametrize("kind", [kind.value for kind in PeftType if kind is not PeftType.LORA])
def test_merging_is_advised_only_where_peft_can_merge(kind: str) -> None:
    adapts_layers = issubclass(PEFT_TYPE_TO_TUNER_MAPPING[PeftType(kind)], BaseTuner)
    merges = adapts_layers and kind not in ("POLY", "SHADOW", "XLORA")  # no fixed change of weights: the input chooses
    with pytest.raises(AdapterUnsupported) as refusal:
        parsed(peft_type=kind)
    assert ("merge_and_unload" in refusal.value.message) == merges


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "PiSSA"])
def test_an_initialisation_that_changes_the_base_is_refused_by_name(init: str) -> None:
    with pytest.raises(AdapterUnsupported, match=f"init_lora_weights is '{init}'.*path_initial_model"):
        parsed(init_lora_weights=init)


@pytest.mark.parametrize("init", ["moon", "true", ""])
def test_one_that_is_not_known_is_refused_by_name(init: str) -> None:
    with pytest.raises(AdapterUnsupported, match=rf"init_lora_weights is '{init}', an init.*set init_lora_weights to"):
        parsed(init_lora_weights=init)


@pytest.mark.parametrize("init", [["pissa"], 1, {}])
def test_one_that_is_none_is_refused(init: Any) -> None:
    with pytest.raises(AdapterInvalid, match=r"init_lora_weights is .*; it must be true, false or the name"):
        parsed(init_lora_weights=init)


@pytest.mark.parametrize("value", [True, 1, "yes", {"n": 2}, [1]])
@pytest.mark.parametrize("key", ["use_moonlora", "moon_config"])
def test_an_unknown_option_that_is_on_is_refused_however_it_is_spelled(key: str, value: Any) -> None:
    with pytest.raises(AdapterUnsupported, match=rf"{key} is .*this server does not know"):
        parsed(**{key: value})
    assert parsed(**{key: None}) == parsed(**{key: False}) == parsed(**{key: {}}) == parsed()


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_one_that_does_not_is_ignored(init: Any) -> None:
    assert parsed(init_lora_weights=init) == parsed()
