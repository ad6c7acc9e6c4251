"""One module's LoRA matrices as a value: from tensors, or from a folder that PEFT saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from punica_core.adapters.files import CONFIG_NAME, WEIGHTS_NAME, SourceFile
from punica_core.adapters.format import read_manifest
from punica_core.adapters.locate import ref_of
from punica_core.errors import AdapterTooLarge, AdapterUnsupported
from punica_core.lora.weights import load_adapter
from punica_core.ops.layout import MAX_RANK


class LoRAWeight:
    """What one adapter adds to one linear layer: ``y += scale * (x @ a.T) @ b.T``.

    Args:
        a: A ``[R, I]``, floating point, any device.
        b: B ``[O, R]``, of A's device.
        scale: factor of the product; default ``alpha / R``, or 1 without alpha.
        alpha: PEFT's ``lora_alpha``; excludes scale.
        dtype: cast both matrices to it; default: as they are.

    Raises:
        ValueError: shapes that do not multiply, a lora_rank outside 1…256, other than floating-point tensors, or
            scale and alpha together.
    """

    __slots__ = ("a", "b", "scale")

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        *,
        scale: float | None = None,
        alpha: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_pair(a, b)
        if scale is not None and alpha is not None:
            raise ValueError(f"got scale={scale} and alpha={alpha}; give one of them (scale = alpha / rank)")
        if scale is None:
            scale = 1.0 if alpha is None else alpha / a.size(0)
        self.a = a.detach().to(dtype or a.dtype)
        self.b = b.detach().to(dtype or b.dtype)
        self.scale = float(scale)

    @classmethod
    def from_peft(cls, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Mapping[str, LoRAWeight]:
        """Read an adapter that PEFT saved: module path in the base model → weights, on the CPU.

        Args:
            folder: holds ``adapter_config.json`` and ``adapter_model.safetensors``.
            dtype: of the matrices.

        Raises:
            AdapterError: the files are missing or damaged, use something that is not plain LoRA or a lora_rank above
                256, or hold values that are not finite in ``dtype``. The message names the fault.
        """
        ref = ref_of(os.fspath(folder))
        if ref.packed:
            raise AdapterUnsupported(f"{os.fspath(folder)!r} is a packed adapter; give the folder it was made from.")
        with (
            SourceFile(os.path.join(ref.path, CONFIG_NAME), ref.config_signature) as config,
            SourceFile(os.path.join(ref.path, WEIGHTS_NAME), ref.weights_signature) as weights,
        ):
            manifest = read_manifest(config, weights)
        if manifest.extras:
            raise AdapterUnsupported(
                f"it has {' and '.join(manifest.extras)}; LoRAWeight holds lora_A and lora_B of linear layers only."
            )
        modules = manifest.modules
        for path, module in modules.items():
            if module.lora_rank > MAX_RANK:
                raise AdapterTooLarge(f"{path!r} has rank {module.lora_rank}; 1 to {MAX_RANK} are served.")
        shapes = {path: (module.in_features, module.out_features) for path, module in modules.items()}
        read = load_adapter(ref, shapes, dtype, MAX_RANK)
        return MappingProxyType(
            {path: cls(module.a, module.b, scale=module.scale) for path, module in read.modules.items()}
        )

    @property
    def lora_rank(self) -> int:
        return int(self.a.size(0))

    @property
    def in_features(self) -> int:
        return int(self.a.size(1))

    @property
    def out_features(self) -> int:
        return int(self.b.size(0))

    def __repr__(self) -> str:
        return f"LoRAWeight(a={list(self.a.shape)}, b={list(self.b.shape)}, scale={self.scale:g}, {self.a.dtype})"


def _check_pair(a: Tensor, b: Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.size(0) != b.size(1):
        raise ValueError(f"A is {list(a.shape)} and B {list(b.shape)}; they must be [rank, in] and [out, rank]")
    if not 1 <= a.size(0) <= MAX_RANK:
        raise ValueError(f"A {list(a.shape)} has rank {a.size(0)}; 1 to {MAX_RANK} are served")
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ValueError(f"A is {a.dtype} and B {b.dtype}; both must be floating point")
    if a.device != b.device:
        raise ValueError(f"A is on {a.device} and B on {b.device}; they must be on one device")
