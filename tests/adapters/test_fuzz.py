"""Mutated adapter folders: each is served exactly as PEFT computes it, or refused by name, never anything else.

A failure prints its seed, which makes the same folder again. Where PEFT itself loads the folder without complaint, its
logits are the measure. Where it does not (a spelling that it does not know, a config that it cannot build a model
from), the measure is PEFT on what `punica adapters convert` makes of the folder, with a config of nothing but what the
mathematics depends on.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from transformers import PreTrainedModel

from punica_core.adapter_tools.base import BaseFolder, CheckpointWeights
from punica_core.adapter_tools.convert import convert
from punica_core.adapters.files import CONFIG_NAME
from punica_core.adapters.names import parse_name
from punica_core.adapters.registry import AdapterRegistry
from punica_core.errors import AdapterError, ModelNotFound, PunicaError
from punica_core.lora.packed import opener_for
from punica_core.lora.weights import AdapterWeights
from tests.support.adapter_faults import mutate
from tests.support.adapter_formats import tiny_qwen2
from tests.support.driven_runner import DrivenRunner
from tests.support.peft_adapters import peft_warnings_ignored, read_tensors, save_peft_adapter

QUICK_SEEDS = range(200)
ALL_SEEDS = range(1000)
PROMPT = [4, 60, 5, 9, 17, 3, 9, 7]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"r": 2, "target_modules": ["q_proj", "up_proj"]},
    "patterns": {
        "r": 3,
        "rank_pattern": {"o_proj": 2},
        "alpha_pattern": {"k_proj": 4},
        "target_modules": ["o_proj", "k_proj"],
    },
    "DoRA": {"r": 2, "target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "bias": {"r": 2, "target_modules": ["v_proj"], "bias": "all"},
    "lora_bias": {"r": 2, "target_modules": ["q_proj"], "lora_bias": True},
    "vocabulary": {"r": 2, "target_modules": ["embed_tokens", "lm_head"]},
    "saved": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "trainable_token_indices": [5, 9]},
}
MATHEMATICS = (
    *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora"),
    *("lora_bias", "bias", "modules_to_save", "trainable_token_indices"),
)


class Fuzzer:
    """One base model, and what becomes of folders on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.driven = DrivenRunner(tiny_qwen2(), max_sequences=1)
        loaded = self.driven.loaded
        self.base = BaseFolder("", loaded.module_shapes, torch.float32, CheckpointWeights(None, loaded.module_shapes))
        self.pristine = {
            name: save_peft_adapter(root / "pristine" / name, tiny_qwen2(), **config)
            for name, config in VARIANTS.items()
        }

    def run(self, seed: int) -> str:
        """What became of a seed's folder: "served", or the code of the refusal. Anything else is raised."""
        rng = random.Random(seed)
        variant = rng.choice(sorted(self.pristine))
        place = self.root / f"seed{seed}"
        folder = Path(shutil.copytree(self.pristine[variant], place / "adapters" / "a"))
        mutate(folder, rng)
        weights = self.outcome(folder)
        if isinstance(weights, PunicaError):
            assert 10 < len(weights.message) < 1500
            assert str(self.root) not in weights.message, "a message must not tell the server's paths"
            return weights.code
        assert weights.nbytes <= 16 * sum(path.stat().st_size for path in folder.iterdir()), "memory out of nothing"
        for module in weights.modules.values():
            parts = (module.a, module.b, module.row_gain, module.bias)
            assert all(torch.isfinite(part).all() for part in parts if part is not None)
        self.compare(folder, weights)
        shutil.rmtree(place)
        return "served"

    def outcome(self, folder: Path) -> AdapterWeights | AdapterError | ModelNotFound:
        """As the server does: found by name, opened for the base, read."""
        loaded = self.driven.loaded
        try:
            ref = AdapterRegistry(folder.parent, ()).resolve(folder.name)
            with opener_for(loaded.base_weights)(ref, loaded.module_shapes, loaded.dtype, 256) as source:
                return source.read()
        except (AdapterError, ModelNotFound) as error:
            return error

    def compare(self, folder: Path, weights: AdapterWeights) -> None:
        reference = peft_as_it_is(folder)
        if reference is None:
            reference = self.peft_converted(folder)
        ours = self.logits(weights)
        if ours is None or not torch.isfinite(reference).all() or reference.abs().max() > 1e5:
            assert ours is None or reference.abs().max() > 1e5 or not torch.isfinite(ours).all()
            return  # numbers that overflow on the way mean nothing, and the row is failed by name
        scale = max(1.0, float(reference.abs().max()))
        assert (ours - reference).abs().max() < 1e-4 * scale, f"{(ours - reference).abs().max()} from PEFT"

    def logits(self, weights: AdapterWeights) -> torch.Tensor | None:
        """[V] behind the prompt; None if the engine failed the row."""
        driven = self.driven
        driven.slots.clear()
        driven.sampler.logits.clear()
        driven.adapters[0] = weights
        sequence = driven.sequence(PROMPT, 0)
        result = driven.step([sequence])
        return None if result.failed else driven.logits_of(sequence)[0]

    def peft_converted(self, folder: Path) -> torch.Tensor:
        target = folder.parent.parent / "converted"
        convert(str(folder), str(target), self.base)
        config = json.loads((target / CONFIG_NAME).read_text())
        reduced = {key: config[key] for key in MATHEMATICS if config.get(key) is not None}
        paths = {parse_name(name).path for name in read_tensors(target) if "lora_" in name}
        reduced["target_modules"] = sorted(paths) or ["q_proj"]
        (target / CONFIG_NAME).write_text(json.dumps(reduced))
        reference = peft_as_it_is(target)
        assert reference is not None, "PEFT does not load what convert wrote"
        return reference


def peft_as_it_is(folder: Path) -> torch.Tensor | None:
    """[V] behind the prompt as PEFT computes it; None if it does not load the folder, or not all of it."""
    base: PreTrainedModel = tiny_qwen2()
    try:
        with peft_warnings_ignored(), torch.no_grad():
            model = PeftModel(base, PeftConfig.from_pretrained(str(folder)))
            state = load_peft_weights(str(folder), device="cpu")
            result = set_peft_model_state_dict(model, state)
            if result.unexpected_keys or any("lora_" in key or "modules_to_save" in key for key in result.missing_keys):
                return None
            logits: torch.Tensor = model.eval()(torch.tensor([PROMPT])).logits[0, -1]
            return logits
    except Exception:  # whatever PEFT makes of hostile folders
        return None


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Fuzzer(tmp_path_factory.mktemp("fuzz"))
    torch.set_num_threads(before)


def run_all(fuzzer: Fuzzer, seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcomes[fuzzer.run(seed)] += 1
        except PunicaError as error:
            raise AssertionError(f"seed {seed}: {error.code}: {error.message}") from error
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return outcomes


def test_mutated_adapters_are_served_right_or_refused(fuzzer: Fuzzer) -> None:
    outcomes = run_all(fuzzer, QUICK_SEEDS)
    assert len(QUICK_SEEDS) // 8 < outcomes["served"] < len(QUICK_SEEDS) * 3 // 4, outcomes


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_mutated_adapters_are_served_right_or_refused(fuzzer: Fuzzer) -> None:
    outcomes = run_all(fuzzer, ALL_SEEDS)
    print(outcomes)
    assert len(ALL_SEEDS) // 8 < outcomes["served"] < len(ALL_SEEDS) * 3 // 4, outcomes
    refusals = {"adapter_invalid", "adapter_unsupported", "adapter_mismatch", "adapter_too_large", "model_not_found"}
    assert outcomes.keys() == {"served", *refusals}, "every kind of refusal is met"


BREAKAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "another scale": lambda patch: patch.setattr(
        "punica_core.adapters.peft_config.LoraSettings.scale_of", lambda settings, *module: settings.lora_alpha
    ),
    "patterns ignored": lambda patch: patch.setattr(
        "punica_core.adapters.peft_config.LoraSettings.alpha_of", lambda settings, path: settings.lora_alpha
    ),
    "numbers not checked": lambda patch: patch.setattr(
        "punica_core.lora.tensor_reader._check_finite", lambda *args: None
    ),
}


@pytest.mark.parametrize("break_it", BREAKAGES.values(), ids=BREAKAGES.keys())
def test_the_fuzzer_finds_a_broken_reader(
    fuzzer: Fuzzer, break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        run_all(fuzzer, QUICK_SEEDS)
