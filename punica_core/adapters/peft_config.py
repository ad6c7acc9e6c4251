"""`adapter_config.json`: what of it decides the mathematics of a plain LoRA, and refusal by name of the rest.

Unknown keys are ignored unless they switch something on (`use_…: true`): a key that this version does not know must
not change what an adapter computes. Which modules are adapted is decided by the tensors, never by `target_modules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from punica_core.adapters.header import parse_json_object, shorten
from punica_core.errors import AdapterInvalid, AdapterTooLarge, AdapterUnsupported

MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_PATTERNS = 4096
MAX_COMPLEX_PATTERNS = 64
MAX_PATTERN_LENGTH = 300
MAX_ALPHA = 1e30

_CONFIG = "adapter_config.json"

_LITERAL = re.compile(r"\^?(?:[\w.-]|\\\.)*")
_REPEATED_GROUP = re.compile(r"\)\s*[*+{?]|\(\?|\\[1-9]")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The part of a PEFT LoraConfig that plain LoRA computes with."""

    lora_rank: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...] = ()
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...] = ()

    @property
    def num_patterns(self) -> int:
        return len(self.rank_pattern) + len(self.alpha_pattern)

    def rank_of(self, path: str) -> int:
        """lora_rank of the module at `path` (its name in the base model)."""
        return _first_match(self.rank_pattern, path, self.lora_rank)

    def scale_of(self, path: str) -> float:
        """alpha/r, or alpha/√r with rsLoRA (Kalajdzievski 2023, arXiv 2312.03732)."""
        alpha = _first_match(self.alpha_pattern, path, self.lora_alpha)
        rank = self.rank_of(path)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_config(raw: bytes) -> LoraSettings:
    """Raises AdapterInvalid for damaged or missing values, AdapterUnsupported for options that are not plain LoRA."""
    config = parse_json_object(raw, _CONFIG)
    _check_kind(config)
    _check_options(config)
    rank = _positive_int(_required(config, "r"), "r")
    alpha = _finite(_required(config, "lora_alpha"), "lora_alpha")
    rslora = config.get("use_rslora")
    if rslora is not None and not isinstance(rslora, bool):
        raise _wrong("use_rslora", rslora, "true or false")
    return LoraSettings(
        lora_rank=rank,
        lora_alpha=alpha,
        use_rslora=bool(rslora),
        rank_pattern=_patterns(config, "rank_pattern", _positive_int),
        alpha_pattern=_patterns(config, "alpha_pattern", _finite),
    )


def _check_kind(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind is None:
        raise AdapterInvalid(f"{_CONFIG} has no peft_type; is this folder a PEFT adapter?")
    if kind != "LORA":
        raise AdapterUnsupported(f"peft_type is {shorten(repr(kind))}; only 'LORA' adapters are served.")
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise AdapterUnsupported(f"task_type is {shorten(repr(task))}; only 'CAUSAL_LM' adapters are served.")


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != [] and value != {} and value != ""


_UNSUPPORTED: Mapping[str, str] = {
    "use_dora": "DoRA is not served; train with use_dora=false, or merge it into the base model.",
    "lora_bias": "LoRA with a bias on lora_B is not served; train with lora_bias=false.",
    "modules_to_save": "Fully trained modules are not served; train without modules_to_save.",
    "trainable_token_indices": "Trained token embeddings (trainable_tokens_delta) are not served.",
    "alora_invocation_tokens": "Activated LoRA (aLoRA) is not served.",
    "layer_replication": "Replicated layers are another base model; serve that model instead.",
    "target_parameters": "LoRA on parameters (such as MoE experts) is not served.",
    "fan_in_fan_out": "Transposed base weights (Conv1D) are not served.",
    "megatron_config": "Megatron parallel layers are not served.",
    "enable_lora": "LoRA on parts of a merged projection is not served.",
    "use_qalora": "QALoRA is not served.",
    "use_bdlora": "Block-diagonal LoRA is not served.",
    "arrow_config": "Arrow routing between adapters is not served.",
    "kasa_config": "KaSA is not served.",
    "monteclora_config": "MonteCLoRA is not served.",
}
"""Options that change the mathematics, with what to tell the user; null, false and empty mean off."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the base's weights (prefixes): A and B alone are then not the whole adapter."""


def _check_options(config: Mapping[str, Any]) -> None:
    for key, advice in _UNSUPPORTED.items():
        if _is_set(config.get(key)):
            raise AdapterUnsupported(f"{key} is {shorten(repr(config[key]))}. {advice}")
    bias = config.get("bias")
    if bias not in (None, "none"):
        raise AdapterUnsupported(f"bias is {shorten(repr(bias))}. Trained biases are not served; use bias='none'.")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise AdapterUnsupported(
            f"init_lora_weights is {shorten(repr(init))}: such training also changes the base's weights. Save it with "
            "path_initial_model_for_weight_conversion, which turns it into plain LoRA."
        )
    for key, value in config.items():
        if key.startswith("use_") and key not in ("use_rslora", *_UNSUPPORTED) and value is True:
            raise AdapterUnsupported(f"{shorten(key)} is true, an option this server does not know.")


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise AdapterInvalid(f"{_CONFIG} has no {key}; the scale of an adapter is computed from it.")
    return config[key]


def _positive_int(value: Any, key: str) -> int:
    if type(value) is not int or value < 1:
        raise _wrong(key, value, "an integer of at least 1")
    return value


def _finite(value: Any, key: str) -> float:
    if type(value) not in (int, float) or abs(value) > MAX_ALPHA or not math.isfinite(value):
        raise _wrong(key, value, f"a number of at most {MAX_ALPHA:g}")
    return float(value)


def _wrong(key: str, value: Any, wanted: str) -> AdapterInvalid:
    return AdapterInvalid(f"{_CONFIG}: {shorten(key)} is {shorten(repr(value))}; it must be {wanted}.")


def _patterns(
    config: Mapping[str, Any], key: str, read: Callable[[Any, str], T]
) -> tuple[tuple[re.Pattern[str], T], ...]:
    table = config.get(key)
    if table is None:
        return ()
    if not isinstance(table, dict):
        raise _wrong(key, table, "an object from module names to numbers")
    num_complex = sum(not _LITERAL.fullmatch(name) for name in table)
    if len(table) > MAX_PATTERNS or num_complex > MAX_COMPLEX_PATTERNS:
        raise AdapterTooLarge(
            f"{key} has {len(table)} entries, {num_complex} of them regular expressions; "
            f"at most {MAX_PATTERNS} and {MAX_COMPLEX_PATTERNS} are read."
        )
    return tuple((_compile(name, key), read(value, f"{key}[{shorten(name)!r}]")) for name, value in table.items())


def _compile(name: str, key: str) -> re.Pattern[str]:
    """PEFT's rule: the name, a regular expression, matches a whole path or its end behind a dot.

    Bounds keep matching cheap: Python's engine backtracks, and repeated groups cost time exponential in the path.
    """
    where = f"{key}[{shorten(name)!r}]"
    if len(name) > MAX_PATTERN_LENGTH:
        raise AdapterTooLarge(f"{where} has {len(name)} characters; at most {MAX_PATTERN_LENGTH} are allowed.")
    if not _LITERAL.fullmatch(name) and (
        _REPEATED_GROUP.search(name)
        or len(re.findall(r"[*+?{]", name)) > 2
        or name.count("|") > 16
        or name.count("(") > 2
    ):
        raise AdapterUnsupported(f"{where} is too complex a regular expression; name the modules instead.")
    try:
        return re.compile(rf"(?:.*\.)?(?:{name})$")
    except (re.error, OverflowError) as error:
        raise AdapterInvalid(f"{where} is not a regular expression: {error}.") from None


def _first_match(patterns: tuple[tuple[re.Pattern[str], T], ...], path: str, default: T) -> T:
    return next((value for pattern, value in patterns if pattern.match(path)), default)
