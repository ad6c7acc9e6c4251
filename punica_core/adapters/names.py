"""What a tensor is to its module, told from its name alone, in every spelling that PEFT and its trainers have used.

Accepted: with and without PEFT's `base_model.model.` prefix; with the adapter's name inside
(`lora_A.default.weight`), as raw state dicts have it; with what torch.compile, FSDP and DDP put between.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_PEFT_PREFIX = ["base_model", "model"]
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_DDP = "module"
_TOKEN_ADAPTER = "token_adapter"


class TensorRole(enum.StrEnum):
    """What a tensor is to its module."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    LORA_BIAS = "bias of lora_B"
    DORA_MAGNITUDE = "DoRA magnitude"
    TOKEN_DELTA = "trainable_tokens_delta"
    BIAS = "trained bias"
    FULL_WEIGHT = "fully trained weight (modules_to_save)"
    BASE_WEIGHT = "weight of the base model"
    UNKNOWN = "unknown tensor"


@dataclass(frozen=True, slots=True)
class TensorName:
    """path: the module's in the base model. adapter: the adapter's name if the tensor's name has it, else ""."""

    path: str
    role: TensorRole
    adapter: str = ""


_MARKERS: Mapping[str, tuple[tuple[TensorRole, str], ...]] = MappingProxyType(
    {
        "lora_A": ((TensorRole.LORA_A, "weight"),),
        "lora_B": ((TensorRole.LORA_B, "weight"), (TensorRole.LORA_BIAS, "bias")),
        "lora_embedding_A": ((TensorRole.EMBEDDING_A, ""),),
        "lora_embedding_B": ((TensorRole.EMBEDDING_B, ""),),
        "lora_magnitude_vector": ((TensorRole.DORA_MAGNITUDE, "weight"), (TensorRole.DORA_MAGNITUDE, "")),
        "trainable_tokens_delta": ((TensorRole.TOKEN_DELTA, ""),),
        "base_layer": ((TensorRole.BASE_WEIGHT, "weight"), (TensorRole.BIAS, "bias")),
        "original_module": ((TensorRole.BASE_WEIGHT, "weight"),),
        "modules_to_save": ((TensorRole.FULL_WEIGHT, "weight"), (TensorRole.BIAS, "bias")),
    }
)
"""Part of a name → the roles behind it by what the name ends with; the adapter's name may stand between."""

_OTHER_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "lora_E": "AdaLoRA",
        "ranknum": "AdaLoRA",
        "lora_diag": "KaSA",
        "hada_": "LoHa",
        "lokr_": "LoKr",
        "oft_": "OFT",
        "boft_": "BOFT",
        "ia3_": "IA3",
        "vera_": "VeRA",
        "hra_": "HRA",
        "prompt_embeddings": "prompt tuning",
        "internal_xlora": "X-LoRA",
    }
)


def parse_name(name: str) -> TensorName:
    """The parts of a tensor's name. A name that fits nothing has the role UNKNOWN."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if len(parts) > 1 and parts[0] == _DDP:
        parts = parts[1:]
    if parts[:2] == _PEFT_PREFIX:
        parts = parts[2:]
    for place in range(len(parts) - 1, 0, -1):
        if parts[place] in _MARKERS:
            return _marked(parts[:place], parts[place], parts[place + 1 :])
    roles = {"weight": TensorRole.FULL_WEIGHT, "bias": TensorRole.BIAS}
    return TensorName(".".join(parts[:-1]), roles.get(parts[-1] if len(parts) > 1 else "", TensorRole.UNKNOWN))


def classify(name: str) -> tuple[str, TensorRole]:
    """(module path in the base model, role) of a tensor's name."""
    parsed = parse_name(name)
    return parsed.path, parsed.role


def method_of(name: str) -> str:
    """The PEFT method, other than LoRA, that gives tensors such names; "" if none is known."""
    parts = name.split(".")
    return next((method for mark, method in _OTHER_METHODS.items() if any(p.startswith(mark) for p in parts)), "")


def _marked(owner: list[str], marker: str, tail: list[str]) -> TensorName:
    if len(owner) > 1 and owner[-1] == _TOKEN_ADAPTER:
        owner = owner[:-1]
    path = ".".join(owner)
    for role, end in _MARKERS[marker]:
        rest = tail
        if end:
            if rest[-1:] != [end]:
                continue
            rest = rest[:-1]
        if len(rest) <= 1:
            return TensorName(path, role, rest[0] if rest else "")
    return TensorName(path, TensorRole.UNKNOWN)
