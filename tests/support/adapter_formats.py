"""Adapters in every format that is served, on every kind of base, run together and held against PEFT's own results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from punica_core.lora.weights import AdapterWeights, load_adapter
from punica_core.model.loader import LoadedModel
from tests.support.driven_runner import DrivenRunner
from tests.support.peft_adapters import adapter_ref, save_peft_adapter, tiny_llama
from tests.support.peft_batch import adapted_model
from tests.support.tiny_models import TINY_MODELS, TINY_SIZES, spread

NEW_TOKENS = 3
PROMPT = (4, 60, 5, 9, 17, 3, 9, 7)
"""Has the tokens whose rows some adapters train (3, 5, 9)."""


def tiny_phi3() -> PreTrainedModel:
    """A random Phi-3: q, k and v are one linear of the base, gate and up another."""
    torch.manual_seed(7)
    model: PreTrainedModel = Phi3ForCausalLM(Phi3Config(**TINY_SIZES)).eval()
    spread(model)
    return model


def tiny_qwen2() -> PreTrainedModel:
    """A random Qwen2, untied: q, k and v have biases."""
    torch.manual_seed(7)
    model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**TINY_SIZES, tie_word_embeddings=False)).eval()
    spread(model)
    return model


BASES: Mapping[str, Callable[[], PreTrainedModel]] = MappingProxyType(
    {
        "llama": tiny_llama,
        "llama, tied": lambda: tiny_llama(tied=True),
        "qwen2, tied": TINY_MODELS["qwen2"],
        "qwen2, untied": tiny_qwen2,
        "gemma2, tied": TINY_MODELS["gemma2"],
        "phi3": tiny_phi3,
    }
)
"""Fresh bases by name: untied; tied; with biases; with scaled embeddings; with fused linears."""


Q = ["q_proj"]
"""The least that PEFT wants of target_modules."""

VOCABULARY: Mapping[str, dict[str, Any]] = {
    "LoRA on the embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "LoRA on the head, rsLoRA": {"target_modules": ["lm_head"], "use_rslora": True},
    "LoRA on both": {"target_modules": ["lm_head", "embed_tokens", "v_proj"], "r": 3},
    "DoRA on both": {"target_modules": ["lm_head", "embed_tokens"], "use_dora": True},
    "LoRA on both, tied": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "saved head": {"target_modules": Q, "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": Q, "modules_to_save": ["embed_tokens"]},
    "saved head and embedding": {"target_modules": Q, "modules_to_save": ["lm_head", "embed_tokens"]},
    "saved embedding, tied": {"target_modules": Q, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "saved head, LoRA on the embedding": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    "token rows": {"target_modules": Q, "trainable_token_indices": [5, 9]},
    "token rows of both": {"target_modules": Q, "trainable_token_indices": {"embed_tokens": [9, 5], "lm_head": [9, 5]}},
    "other token rows": {"target_modules": Q, "trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [3]}},
    "token rows of the head": {"target_modules": Q, "trainable_token_indices": {"lm_head": [3, 8]}},
    "token rows, LoRA on the head": {"target_modules": ["lm_head", "q_proj"], "trainable_token_indices": [5, 9]},
}
"""Configs of adapters that change embedding or head, by name."""

LAYERS: Mapping[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "DoRA with patterns and rsLoRA": {
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {"v_proj": 3, "lm_head": 5},
        "alpha_pattern": {"lm_head": 7, "layers.1.*": 2},
        "target_modules": ["q_proj", "v_proj", "lm_head"],
    },
    "lora_bias": {"lora_bias": True},
    "bias all": {"bias": "all", "target_modules": Q},
    "bias lora_only": {"bias": "lora_only", "target_modules": ["q_proj", "v_proj"]},
    "DoRA and bias all": {"bias": "all", "use_dora": True, "target_modules": ["q_proj", "v_proj"]},
    "MiCA": {"init_lora_weights": "mica", "target_modules": Q},
}
"""Of all others that are more than plain LoRA; some have LoRA on the head."""

PHI3: Mapping[str, dict[str, Any]] = {
    "native LoRA": {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "native DoRA": {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True, "r": 3},
    "lora_bias": {"target_modules": "all-linear", "lora_bias": True},
}
"""Of adapters of a base with fused linears."""


@dataclass(frozen=True)
class Case:
    """An adapter that PEFT saves with `config`, tensors of `dtype`.

    prepare: changes what was saved; PEFT and we both read the result. edit: then changes how it is written for us.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    edit: Callable[[Path], None] = lambda folder: None
    prepare: Callable[[Path], None] = lambda folder: None


def load_for(loaded: LoadedModel, folder: Path) -> AdapterWeights:
    """The adapter in `folder`, for a model that serves."""
    return load_adapter(adapter_ref(folder), loaded.module_shapes, loaded.dtype, 256, loaded.base_weights)


def errors_against_peft(base: Callable[[], PreTrainedModel], cases: Sequence[Case], root: Path) -> dict[str, float]:
    """max |Δlogprob| of each case, all of them and the base in one batch, prompts and decode steps alike.

    Asserts that greedy tokens are PEFT's, that every adapter changes the output, and that the base's rows are bitwise
    those of a batch of equal shape without adapters.
    """
    driven = DrivenRunner(base(), max_sequences=len(cases) + 1)
    references = []
    for slot, case in enumerate(cases):
        folder = save_peft_adapter(root / f"adapter{slot}", base(), seed=slot + 1, dtype=case.dtype, **case.config)
        case.prepare(folder)
        references.append(peft_of(folder, base))
        case.edit(folder)
        driven.adapters[slot] = load_for(driven.loaded, folder)
    sequences = [driven.sequence(PROMPT, slot) for slot in range(len(cases))]
    plain = driven.sequence(PROMPT)
    driven.generate([*sequences, plain], NEW_TOKENS)
    unadapted = DrivenRunner(base(), max_sequences=len(cases) + 1)
    alike = [unadapted.sequence(PROMPT) for _ in range(len(cases) + 1)]
    unadapted.generate(alike, NEW_TOKENS)
    # The base's rows come first in a step, as those of slot -1.
    assert torch.equal(unadapted.logits_of(alike[0]), driven.logits_of(plain)), "the base's rows changed"
    errors = {}
    for case, sequence, reference in zip(cases, sequences, references, strict=True):
        got = driven.logits_of(sequence).log_softmax(-1)
        wanted = reference(sequence.token_ids[:-1])[sequence.num_prompt - 1 :].log_softmax(-1)
        assert torch.equal(got.argmax(-1), wanted.argmax(-1)), case.name
        effect = float((wanted[0] - driven.logits_of(plain)[0].log_softmax(-1)).abs().max())
        assert effect > 0.01, f"{case.name}: the adapter does nothing, so this proves nothing"
        errors[case.name] = float((got - wanted).abs().max())
    return errors


def peft_of(folder: Path, base: Callable[[], PreTrainedModel]) -> Callable[[list[int]], torch.Tensor]:
    """PEFT with the adapter as it is in `folder` now: token ids → [T, V] logits."""
    model = adapted_model(folder, base)

    def logits(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return found

    return logits
