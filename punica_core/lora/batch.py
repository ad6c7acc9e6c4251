"""`BatchLoRA`: a plain Hugging Face model runs batches whose rows use different adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from punica_core.errors import AdapterError
from punica_core.lora.adapter_set import AdapterSet
from punica_core.lora.batch_step import BatchStep
from punica_core.lora.fitting import check_fit, check_placement, common_placement
from punica_core.lora.layers import LinearGroup, LoRAContext, LoRALinear
from punica_core.lora.segments import Int32Array
from punica_core.lora.weight import LoRAWeight
from punica_core.ops import cuda
from punica_core.scheduler.plan import BASE_SLOT

Adapter: TypeAlias = str | Path | LoRAWeight | Mapping[str, LoRAWeight]
"""A folder that PEFT saved, or module path → weights; for a model that is itself a LoRALinear, its weights."""

Indices: TypeAlias = Sequence[int] | Tensor | np.ndarray[Any, Any]

_BATCH_INPUTS = ("input_ids", "inputs_embeds", "inputs")


class _BatchContext(LoRAContext):
    """Marks the layers of a model that is inside a `BatchLoRA`."""

    __slots__ = ()


class BatchLoRA:
    """Runs `model` with an adapter of its own for each row of a batch::

        with BatchLoRA(model, ["adapters/sql", "adapters/pirate"]) as m:
            m(input_ids, attention_mask=mask, lora_indices=[0, 1, -1])
            m.generate(input_ids, attention_mask=mask, lora_indices=[0, 1, -1], num_beams=4)

    `lora_indices` has an entry for each row of the inputs: the adapter's place in `adapters`, or -1 for the base model.
    `generate` repeats it for beams and num_return_sequences. Adapters may differ in rank, scale and targets. Inside
    the block the adapted linear layers are `LoRALinear`s; leaving it, also by an exception, puts the very same
    modules back. Parameters are never changed. Calls of `model` itself compute the base model. Inference only.

    Args:
        model: a decoder, or any nn.Module whose layers see the batch `[B, L, ...]` or flattened `[B*L, ...]`; on the
            CPU, or on a GPU in bfloat16 or float16.
        adapters: copied to the model's device, in its dtype, when this object is made; it may be entered again.

    Raises:
        AdapterError: an adapter cannot be read or does not fit the model; the message names adapter and module.
        TypeError: `adapters` is one adapter, not a list of them.
        ValueError: the model is of a kind that is not supported; the message says which.
        BuildError: there are no kernels for this GPU; the message says what to install.
    """

    def __init__(self, model: nn.Module, adapters: Sequence[Adapter]) -> None:
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise ValueError(f"{type(model).__name__} has an encoder and a decoder; only decoders are supported")
        if isinstance(adapters, str | Path | LoRAWeight | Mapping):  # a str would be read letter by letter
            raise TypeError(f"adapters is one {type(adapters).__name__}; give a list, also of one: [adapter]")
        self.model = model
        modules = dict(model.named_modules())
        self._dtype, self._device = common_placement(modules)
        read = [_read(index, adapter, self._dtype, modules) for index, adapter in enumerate(adapters)]
        if self._device.type == "cuda":
            cuda.load()
        self._adapters = AdapterSet(read, dtype=self._dtype, device=self._device)
        self._step = BatchStep(self._adapters)
        self._context = _BatchContext()
        self._undo: ExitStack | None = None
        check_placement(modules, self._adapters.paths, self._dtype, self._device)

    def __enter__(self) -> BatchLoRA:
        """Install the adapters.

        Raises RuntimeError if the model is inside a BatchLoRA already, ValueError if it has moved since this was made.
        """
        modules = dict(self.model.named_modules())
        if self._undo is not None or any(_is_claimed(module) for module in modules.values()):
            raise RuntimeError(
                f"this {type(self.model).__name__} is inside a BatchLoRA already; leave that one first, or give all "
                "the adapters to one"
            )
        check_placement(modules, self._adapters.paths, self._dtype, self._device)
        with ExitStack() as undo:
            for index, path in enumerate(self._adapters.paths):
                self._install(index, path, modules[path], undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the model's own modules back."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()

    def __call__(self, *args: Any, lora_indices: Indices, **kwargs: Any) -> Any:
        """`model(*args, **kwargs)` without gradients, with the adapter lora_indices[b] for row b.

        Raises ValueError for lora_indices that do not fit the inputs or the adapters, RuntimeError outside the block.
        """
        inputs = _batch_inputs(args, kwargs)
        indices = self._checked(lora_indices, inputs.size(0))
        return self._run(self.model, indices, (_num_rows(inputs),), args, kwargs)

    forward = __call__

    def generate(self, *args: Any, lora_indices: Indices, **kwargs: Any) -> Any:
        """`model.generate(*args, **kwargs)`; each prompt's beams and returned sequences use its adapter.

        Raises as a call does.
        """
        inputs = _batch_inputs(args, kwargs)
        copies = self._copies_per_prompt(args, kwargs)
        indices = self._checked(lora_indices, inputs.size(0)).repeat(copies)
        num_rows = (_num_rows(inputs) * copies, len(indices))
        return self._run(self.model.generate, indices, num_rows, args, kwargs)

    def _install(self, index: int, path: str, module: nn.Module, undo: ExitStack) -> None:
        group = LinearGroup(index, (path,), module.in_features, (module.out_features,))
        if isinstance(module, LoRALinear):
            undo.callback(setattr, module, "group", module.group)
            undo.callback(setattr, module, "context", module.context)
            module.group, module.context = group, self._context
            return
        if not path:
            raise TypeError("the model is a torch.nn.Linear itself; give LoRALinear.from_linear(model)")
        parent_path, _, name = path.rpartition(".")
        parent = self.model.get_submodule(parent_path)
        layer = LoRALinear.from_linear(module, group)
        layer.context = self._context
        undo.callback(setattr, parent, name, module)
        setattr(parent, name, layer)

    def _checked(self, lora_indices: Indices, batch: int) -> Int32Array:
        """lora_indices as int32 [B]. Raises ValueError with what is wrong."""
        values = lora_indices.cpu().numpy() if isinstance(lora_indices, Tensor) else np.asarray(lora_indices)
        if values.ndim != 1 or (values.dtype.kind not in "iu" and len(values)):
            raise ValueError(
                f"lora_indices must be integers, one for each row; got {values.dtype} {list(values.shape)}"
            )
        if len(values) != batch or batch == 0:
            raise ValueError(f"got {len(values)} lora_indices for a batch of {batch}")
        wrong = np.flatnonzero((values < BASE_SLOT) | (values >= self._adapters.num_adapters))
        if len(wrong):
            raise ValueError(
                f"lora_indices[{wrong[0]}] is {values[wrong[0]]}; there are {self._adapters.num_adapters} adapters, "
                f"counted from 0, and {BASE_SLOT} is the base model"
            )
        return values.astype(np.int32)

    def _copies_per_prompt(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Rows that `generate` makes out of each prompt."""
        config = args[1] if len(args) > 1 else kwargs.get("generation_config")
        config = self.model.generation_config if config is None else config
        names = ("num_beams", "num_return_sequences")
        return max(int(kwargs.get(name) or getattr(config, name, None) or 1) for name in names)

    def _run(
        self,
        call: Callable[..., Any],
        indices: Int32Array,
        num_rows: Sequence[int],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Make the call with a plan ready for each of num_rows."""
        if self._undo is None:
            raise RuntimeError("use this inside its block: with BatchLoRA(model, adapters) as m: m(...)")
        with torch.no_grad():
            if (indices == BASE_SLOT).all():
                return call(*args, **kwargs)
            self._step.set_indices(indices)
            for count in num_rows:
                self._step.prepare(count)
            self._context.step = self._step
            try:
                return call(*args, **kwargs)
            finally:
                self._context.step = None


def _read(
    index: int, adapter: Adapter, dtype: torch.dtype, modules: Mapping[str, nn.Module]
) -> Mapping[str, LoRAWeight]:
    """An adapter in any of its forms, checked against the model; its place and folder are told in errors."""
    label = f"adapter {index}"
    try:
        if isinstance(adapter, str | Path):
            label += f" ({str(adapter)!r})"
            weights = LoRAWeight.from_peft(adapter, dtype=dtype)
        else:
            weights = {"": adapter} if isinstance(adapter, LoRAWeight) else adapter
        check_fit(modules, weights)
    except AdapterError as error:
        raise type(error)(f"{label}: {error.message}") from None
    return weights


def _is_claimed(module: nn.Module) -> bool:
    return isinstance(module, LoRALinear) and isinstance(module.context, _BatchContext)


def _batch_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor whose first dimension is the batch."""
    candidates = [*args[:1], *(kwargs.get(name) for name in _BATCH_INPUTS)]
    for candidate in candidates:
        if isinstance(candidate, Tensor) and candidate.dim() > 0:
            return candidate
    raise ValueError(f"no batch was found: give the inputs first, or one of {', '.join(_BATCH_INPUTS)}")


def _num_rows(inputs: Tensor) -> int:
    """Rows that a layer sees of token ids [B, L], or of activations [B, ..., I]."""
    return int(inputs.numel() // inputs.size(-1) if inputs.is_floating_point() else inputs.numel())
