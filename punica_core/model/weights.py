"""From a model folder to a `transformers` model with weights: read at disk speed, or random ones for benchmarks.

The model is built without memory (torch's meta device), given memory on the device, and filled in place. Buffers that
no file holds (RoPE frequencies, embedding scales) are computed by the model's own initialisation; what that leaves
undefined is noticed, never served. A checkpoint that fits the model only after a conversion (other names, tied weights
stored twice) is loaded by `transformers` itself: slower, and right.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import logging as transformers_logging

from punica_core.config import LoadFormat
from punica_core.errors import ConfigError
from punica_core.model.checkpoint import StoredTensor, read_headers, read_tensors

logger = logging.getLogger(__name__)

DUMMY_STD = 0.02
DUMMY_SEED = 0

_EAGER_REFERENCE = frozenset({"gemma2"})
"""Models whose soft-capped scores transformers' SDPA path leaves out: eager attention is the one that is right."""

_INITIALISED = "_is_hf_initialized"
"""The attribute by which `transformers` knows tensors and modules that its initialisation must leave alone."""


def load_weights(
    model_dir: Path,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[float], None] = lambda fraction: None,
    load_format: LoadFormat = "auto",
    on_built: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """The causal language model of `hf_config` on `device`, its weights in `dtype`, for inference.

    load_format "dummy": matrices from N(0, 0.02²), always the same ones; vectors as the model initialises them (norms
    1, biases 0). Needs no weight files.
    on_progress: called on this thread with the share of the weights that is there, 0 to 1. on_built: called with the
    model before it has any.
    Raises ConfigError, by name, for tensors that the folder lacks or has in another shape: none is made up.
    """
    model = _build_without_memory(hf_config, dtype)
    on_built(model)
    if load_format == "dummy":
        _give_memory(model, device)
        _fill_with_noise(model, device)
    else:
        stored = match_names(model, read_headers(model_dir), dtype)
        if stored is None:
            logger.info("%s fits the model only after a conversion, which transformers does: slower", model_dir)
            return _load_by_transformers(model_dir, hf_config, dtype, device)
        _give_memory(model, device)
        state = model.state_dict(keep_vars=True)
        read_tensors({name: state[name] for name in stored}, stored, on_progress)
        _mark(state.values())
    if not _initialise_rest(model):
        if load_format == "dummy":
            raise ConfigError(
                f"{type(model).__name__} has buffers that only a checkpoint defines.", param="load_format"
            )
        return _load_by_transformers(model_dir, hf_config, dtype, device)
    on_progress(1.0)
    return model.eval().requires_grad_(False)


def match_names(
    model: nn.Module, stored: Mapping[str, StoredTensor], dtype: torch.dtype
) -> dict[str, StoredTensor] | None:
    """The stored tensor of each weight of `model`, by the model's name for it; of tied names, the one that is stored.

    None: names or contents need a conversion, or tensors are missing, which is for `transformers` to tell.
    Raises ConfigError for shapes that differ.
    """
    if _needs_conversion(model, dtype):
        return None
    state = model.state_dict(keep_vars=True)
    matched: dict[str, StoredTensor] = {}
    unknown: list[str] = []
    for name, entry in stored.items():
        target = _own_name(name, state, model.base_model_prefix)
        if target is None:
            unknown.append(name)
        elif target in matched:
            return None
        else:
            matched[target] = entry
    filled = [id(state[name]) for name in matched]
    if len(set(filled)) < len(filled) or {id(tensor) for tensor in state.values()} - set(filled):
        return None
    _check_shapes(matched, state)
    unknown = [
        name for name in unknown if not name.endswith("rotary_emb.inv_freq")
    ]  # older files store what is computed
    if unknown:
        logger.warning(
            "%d stored tensors are not the model's and are left out: %s", len(unknown), ", ".join(unknown[:5])
        )
    return matched


def _needs_conversion(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether `transformers` would do more with this architecture's tensors than to copy and cast them."""
    names = (type(model).__name__, model.config.model_type)
    if any(get_checkpoint_conversion_mapping(name) for name in names):
        return True
    keeps_fp32 = model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
    return bool(keeps_fp32) and dtype != torch.float32


def _own_name(name: str, state: Mapping[str, Tensor], prefix: str) -> str | None:
    """What the model calls a stored tensor: checkpoints of the headless model lack the prefix, others have it twice."""
    for candidate in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
        if candidate in state:
            return candidate
    return None


def _check_shapes(matched: Mapping[str, StoredTensor], state: Mapping[str, Tensor]) -> None:
    wrong = [name for name, entry in matched.items() if entry.shape != tuple(state[name].shape)]
    if wrong:
        entry = matched[wrong[0]]
        raise ConfigError(
            f"{entry.file.parent} has {len(wrong)} of the model's tensors in another shape, such as {wrong[0]}: "
            f"{list(entry.shape)}, where config.json wants {list(state[wrong[0]].shape)}.",
            param="model",
        )


def _build_without_memory(hf_config: Any, dtype: torch.dtype) -> nn.Module:
    attention = "eager" if hf_config.model_type in _EAGER_REFERENCE else "sdpa"
    config = copy.deepcopy(hf_config)  # building writes into it
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except (ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"No model can be built from config.json: {error}", param="model") from error
    return model


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """Replace each parameter and buffer by an uninitialised one on `device`; what is shared stays shared."""
    made: dict[int, Tensor] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
        _set(model, name, made[id(parameter)])
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if id(buffer) not in made:
            made[id(buffer)] = torch.empty_like(buffer, device=device)
        _set(model, name, made[id(buffer)])


def _set(model: nn.Module, path: str, tensor: Tensor) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, tensor)


def _fill_with_noise(model: nn.Module, device: torch.device) -> None:
    """Fill all matrices; vectors are left to the model's own initialisation, which knows a norm from a bias."""
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, DUMMY_STD, generator=generator)
            _mark([parameter])


def _initialise_rest(model: nn.Module) -> bool:
    """Let the model define what is not marked. False: it left a buffer undefined.

    It is done twice, over other contents each time: what comes out different was not written.
    """
    results: list[list[Tensor]] = []
    for filling in (0, 1):
        for tensor in _unmarked(model):
            tensor.data.fill_(filling)
        for module in model.modules():
            setattr(module, _INITIALISED, False)
        model.initialize_weights()
        results.append([tensor.clone() for tensor in _unmarked(model) if not isinstance(tensor, nn.Parameter)])
    return all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def _unmarked(model: nn.Module) -> Iterator[Tensor]:
    tensors: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    return (tensor for tensor in tensors if not getattr(tensor, _INITIALISED, False))


def _mark(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        setattr(tensor, _INITIALISED, True)


def _load_by_transformers(model_dir: Path, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """As `transformers` does it, by way of the CPU; a folder that lacks tensors is refused instead of made up."""
    transformers_logging.disable_progress_bar()  # a worker has no terminal; progress goes to the front end
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=hf_config,
            dtype=dtype,
            attn_implementation="eager" if hf_config.model_type in _EAGER_REFERENCE else "sdpa",
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        raise ConfigError(f"{model_dir} cannot be loaded: {error}", param="model") from error
    lacking = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if lacking:
        raise ConfigError(
            f"{model_dir} lacks {len(lacking)} of the model's tensors or has them in another shape, "
            f"such as {', '.join(lacking[:3])}.",
            param="model",
        )
    loaded: nn.Module = model.eval().requires_grad_(False).to(device)
    return loaded
