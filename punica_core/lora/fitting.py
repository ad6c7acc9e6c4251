"""Which layers of a model take LoRA from the library, and whether an adapter fits them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from punica_core.adapters.format import samples
from punica_core.errors import AdapterInvalid, AdapterMismatch, AdapterUnsupported
from punica_core.lora.layers import LoRALinear
from punica_core.lora.weight import LoRAWeight

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_CPU_DTYPES = (torch.float32, *_KERNEL_DTYPES)


def is_target(module: nn.Module) -> bool:
    """Whether LoRA can be added to the module: a plain nn.Linear, or a LoRALinear."""
    return type(module) is nn.Linear or isinstance(module, LoRALinear)


def check_fit(modules: Mapping[str, nn.Module], weights: Mapping[str, LoRAWeight]) -> None:
    """Raise unless every one of `weights` (by module path) has a linear layer of its shape in `modules`.

    AdapterInvalid: no weights. AdapterMismatch: no such module, or another shape. AdapterUnsupported: the module is
    none that LoRA can be added to.
    """
    if not weights:
        raise AdapterInvalid("it adapts no module.")
    missing = [path for path in weights if path not in modules]
    if missing:
        targets = [path for path, module in modules.items() if is_target(module)]
        raise AdapterMismatch(
            f"{len(missing)} of {len(weights)} adapted modules are not in the model: {samples(missing)}; its linear "
            f"layers have names like {samples(targets)}."
        )
    for path, weight in weights.items():
        _check_module(path, modules[path], weight)


def common_placement(modules: Mapping[str, nn.Module]) -> tuple[torch.dtype, torch.device]:
    """The dtype and device of most linear layers.

    Raises ValueError if there is no linear layer, or if adapters cannot be computed there.
    """
    counts = Counter((m.weight.dtype, m.weight.device) for m in modules.values() if is_target(m))
    if not counts:
        raise ValueError("the model has no torch.nn.Linear that an adapter could be added to")
    (dtype, device), _ = counts.most_common(1)[0]
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the model is on {device}; adapters are computed on CPUs and CUDA devices")
    if dtype not in (_KERNEL_DTYPES if device.type == "cuda" else _CPU_DTYPES):
        raise ValueError(
            f"the model is in {dtype}; on a GPU adapters are computed in bfloat16 and float16, on a CPU in float32 too"
        )
    return dtype, device


def check_placement(
    modules: Mapping[str, nn.Module], paths: Iterable[str], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError, with its name, if one of the modules at `paths` has another dtype or device."""
    for path in paths:
        weight = modules[path].weight
        if weight.dtype != dtype or weight.device != device:
            raise ValueError(
                f"{path!r} is {weight.dtype} on {weight.device}, the adapters are {dtype} on {device}; all adapted "
                "layers must have one dtype and one device, and stay there"
            )


def _check_module(path: str, module: nn.Module, weight: LoRAWeight) -> None:
    if not is_target(module):
        kind = type(module).__name__
        raise AdapterUnsupported(f"{path!r} is of type {kind}; only plain torch.nn.Linear layers are adapted.")
    if "experts" in path.split("."):
        raise AdapterUnsupported(f"{path!r} is an expert's: it sees tokens in an order in which no adapter is known.")
    if (weight.in_features, weight.out_features) != (module.in_features, module.out_features):
        raise AdapterMismatch(
            f"{path!r} is adapted {weight.in_features} → {weight.out_features} (A {list(weight.a.shape)}, B "
            f"{list(weight.b.shape)}), the model has {module.in_features} → {module.out_features}."
        )
