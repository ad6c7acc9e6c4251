"""Punica: many LoRA adapters on one base model, in one batch.

The library is ``BatchLoRA``, ``LoRALinear`` and ``LoRAWeight``; they load torch when they are first asked for. The
other modules are what a worker process is made of, and the contracts that it shares with the front end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from punica_core.lora.batch import BatchLoRA
    from punica_core.lora.layers import LoRALinear
    from punica_core.lora.weight import LoRAWeight

__all__ = ["BatchLoRA", "LoRALinear", "LoRAWeight", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The library's classes, imported on first use so that the front end stays free of torch (PEP 562)."""
    homes = {"BatchLoRA": "batch", "LoRALinear": "layers", "LoRAWeight": "weight"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"punica_core.lora.{homes[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
