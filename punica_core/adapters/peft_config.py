"""`adapter_config.json`: what of it decides the mathematics of an adapter, and refusal by name of what is not served.

Unknown keys are ignored unless they switch something on (`use_…`, `…_config`): a key that this version does not know
must not change what an adapter computes. Which modules are adapted is decided by the tensors, not by `target_modules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from punica_core.adapters.header import parse_json_object, shorten
from punica_core.errors import AdapterInvalid, AdapterTooLarge, AdapterUnsupported

MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_PATTERNS = 4096
MAX_COMPLEX_PATTERNS = 64
MAX_NAMES = 64
MAX_PATTERN_LENGTH = 300
MAX_ALPHA = 1e30

_CONFIG = "adapter_config.json"

_LITERAL = re.compile(r"\^?(?:[\w.-]|\\\.)*")
_REPEAT = re.compile(r"[*+?{]")
_PREFIX = r"(?:.*\.)?"
_REPEATS_OF_PREFIX = len(_REPEAT.findall(_PREFIX)) + 1  # and the group behind it, (?:…)
_MODEL_ID = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?", re.ASCII)
_MAX_MODEL_ID = 96
_REPEATED_GROUP = re.compile(r"\)\s*[*+{?]|\(\?|\\[1-9]")

T = TypeVar("T")


BIAS_KINDS = ("none", "all", "lora_only")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The part of a PEFT LoraConfig that an adapter is computed with.

    bias: one of BIAS_KINDS. modules_to_save: ends of module names. token_indices: end of a module name, "" for the
    input embedding → token ids of its trained rows, in the order of the rows. base_model: id of the model that it was
    trained on, for people; "" if it has none, or a path: messages reach clients.
    """

    lora_rank: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...] = ()
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...] = ()
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    modules_to_save: tuple[str, ...] = ()
    token_indices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    base_model: str = field(default="", compare=False)

    @property
    def num_patterns(self) -> int:
        return len(self.rank_pattern) + len(self.alpha_pattern)

    def matching_steps(self, paths: Iterable[str]) -> int:
        """Steps of the regular expression engine, about 1 ns each, that all patterns take with all paths at most.

        A pattern is tried behind each dot of a path. Each of its repeats (two at most) then tries every length, and
        alternatives that all match are tried one after the other.
        """
        by_repeats = [0, 0, 0]
        for pattern, _ in (*self.rank_pattern, *self.alpha_pattern):
            text = pattern.pattern
            repeats, bars = len(_REPEAT.findall(text)) - _REPEATS_OF_PREFIX, text.count("|")
            ways = (bars // 2 + 1) * ((bars + 1) // 2 + 1)
            by_repeats[repeats] += ways * (1 if repeats else len(text))
        fixed, once, twice = by_repeats
        return sum((path.count(".") + 1) * (fixed + len(path) * (once + len(path) * twice)) for path in paths)

    def rank_of(self, path: str) -> int:
        """lora_rank of the module at `path` (its name in the base model)."""
        return _first_match(self.rank_pattern, path, self.lora_rank)

    def alpha_of(self, path: str) -> float:
        """lora_alpha of the module at `path`."""
        return _first_match(self.alpha_pattern, path, self.lora_alpha)

    def scale_of(self, path: str, lora_rank: int | None = None) -> float:
        """alpha/r, or alpha/√r with rsLoRA (Kalajdzievski 2023, arXiv 2312.03732). lora_rank: `rank_of` if known."""
        alpha, rank = self.alpha_of(path), self.rank_of(path) if lora_rank is None else lora_rank
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_config(raw: bytes) -> LoraSettings:
    """Raises AdapterInvalid for damaged or missing values, AdapterUnsupported for options that are not served."""
    config = parse_json_object(raw, _CONFIG)
    _check_kind(config)
    _check_options(config)
    use_dora, lora_bias = _switch(config, "use_dora"), _switch(config, "lora_bias")
    if use_dora and lora_bias:
        raise AdapterUnsupported("use_dora and lora_bias are both true, which PEFT refuses too; train with one.")
    return LoraSettings(
        lora_rank=_positive_int(_required(config, "r"), "r"),
        lora_alpha=_finite(_required(config, "lora_alpha"), "lora_alpha"),
        use_rslora=_switch(config, "use_rslora"),
        rank_pattern=_patterns(config, "rank_pattern", _positive_int),
        alpha_pattern=_patterns(config, "alpha_pattern", _finite),
        use_dora=use_dora,
        lora_bias=lora_bias,
        bias=_bias(config),
        modules_to_save=_names(config, "modules_to_save"),
        token_indices=_token_indices(config),
        base_model=_base_model(config.get("base_model_name_or_path")),
    )


def _check_kind(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind is None:
        raise AdapterInvalid(f"{_CONFIG} has no peft_type; is this folder a PEFT adapter?")
    if kind != "LORA":
        advice = "Merge it into the base model (merge_and_unload) and serve that, or train a LoRA."
        if kind in _CANNOT_MERGE:
            advice = "It cannot be merged into the base model either; train a LoRA."
        raise AdapterUnsupported(f"peft_type is {shorten(repr(kind))}; only 'LORA' adapters are served. {advice}")
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise AdapterUnsupported(f"task_type is {shorten(repr(task))}; only 'CAUSAL_LM' adapters are served.")


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != [] and value != {} and value != ""


_UNSUPPORTED: Mapping[str, str] = {
    "alora_invocation_tokens": "Activated LoRA (aLoRA) is not served; train without it.",
    "layer_replication": "Replicated layers are another base model; serve that model instead.",
    "target_parameters": "LoRA on parameters (such as MoE experts) is not served; train with target_modules.",
    "fan_in_fan_out": "Transposed base weights (Conv1D) are not served.",
    "megatron_config": "Megatron parallel layers are not served; save the adapter from a model without them.",
    "enable_lora": "LoRA on parts of a merged projection is not served.",
    "use_qalora": "QALoRA is not served; merge it into the base model.",
    "use_bdlora": "Block-diagonal LoRA is not served; train without it.",
    "arrow_config": "Arrow routing between adapters is not served; serve the adapters themselves.",
    "kasa_config": "KaSA is not served, since it changes the base's weights; merge it into the base model.",
    "monteclora_config": "MonteCLoRA is not served; train without it.",
}
"""Options that change the mathematics, with what to tell the user; null, false and empty mean off."""

_SWITCHES = ("use_rslora", "use_dora")
"""`use_…` keys that are served."""

_TRAINING_CONFIGS = ("eva_config", "corda_config", "loftq_config", "lora_ga_config", "velora_config", "runtime_config")
"""`…_config` keys that say how an adapter was initialised or trained, not what it computes."""

_CANNOT_MERGE = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "ADAPTION_PROMPT",
    "CPT",
    "CARTRIDGE",
    "POLY",
    "SHADOW",
    "XLORA",
)
"""PEFT's methods that are no change of the base's weights: learned prompts, and what each input chooses."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the base's weights (prefixes): A and B alone are then not the whole adapter."""

_LEAVES_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""Those that do not."""


def _check_options(config: Mapping[str, Any]) -> None:
    for key, advice in _UNSUPPORTED.items():
        if _is_set(config.get(key)):
            raise AdapterUnsupported(f"{key} is {shorten(repr(config[key]))}. {advice}")
    _check_init(config.get("init_lora_weights"))
    for key, value in config.items():
        if key.startswith("use_") and key not in (*_SWITCHES, *_UNSUPPORTED) and value:
            what = "true" if value is True else shorten(repr(value))
            raise AdapterUnsupported(f"{shorten(key)} is {what}, an option this server does not know.")
        if key.endswith("_config") and key not in (*_TRAINING_CONFIGS, *_UNSUPPORTED) and _is_set(value):
            raise AdapterUnsupported(f"{shorten(key)} is set, an option this server does not know.")


def _check_init(init: Any) -> None:
    """What A and B were before the training means nothing afterwards, unless a part of the base went into them."""
    key = "init_lora_weights"
    if init is None or isinstance(init, bool):
        return
    if not isinstance(init, str):
        raise _wrong(key, init, "true, false or the name of an initialisation")
    if init.lower().startswith(_CHANGES_BASE):
        raise AdapterUnsupported(
            f"{key} is {shorten(repr(init))}: such training also changes the base's weights. Save it with "
            "path_initial_model_for_weight_conversion, which turns it into plain LoRA (all but LoftQ), or merge it "
            "into the base model it was trained on."
        )
    if init.lower() not in _LEAVES_BASE:
        raise AdapterUnsupported(
            f"{key} is {shorten(repr(init))}, an initialisation this server does not know. If it leaves the base's "
            f"weights as they are, set {key} to true in {_CONFIG}."
        )


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


def _switch(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return bool(value)


def _bias(config: Mapping[str, Any]) -> str:
    kind = config.get("bias")
    if kind is None:
        return "none"
    if kind not in BIAS_KINDS:
        raise _wrong("bias", kind, f"one of {', '.join(BIAS_KINDS)}")
    return str(kind)


def _base_model(name: Any) -> str:
    return name if isinstance(name, str) and len(name) <= _MAX_MODEL_ID and _MODEL_ID.fullmatch(name) else ""


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = config.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise _wrong(key, names, "a list of module names")
    _check_count(key, len(names))
    return tuple(dict.fromkeys(names))


def _check_count(key: str, count: int) -> None:
    if count > MAX_NAMES:
        raise AdapterTooLarge(f"{key} has {count} entries; at most {MAX_NAMES} are read.")


def _token_indices(config: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    key = "trainable_token_indices"
    found = config.get(key)
    if found is None:
        return ()
    table = {"": found} if isinstance(found, list) else found
    if not isinstance(table, dict):
        raise _wrong(key, found, "a list of token ids, or an object from module names to such lists")
    _check_count(key, len(table))
    for ids in table.values():
        if not isinstance(ids, list) or not all(type(item) is int and 0 <= item < 2**31 for item in ids):
            raise _wrong(key, ids, "a list of token ids")
        if len(set(ids)) < len(ids):
            raise _wrong(key, ids, "a list of token ids that are all different")
    return tuple((name, tuple(ids)) for name, ids in table.items() if ids)


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
        _REPEATED_GROUP.search(name) or len(_REPEAT.findall(name)) > 2 or name.count("|") > 16 or name.count("(") > 2
    ):
        raise AdapterUnsupported(f"{where} is too complex a regular expression; name the modules instead.")
    try:
        return re.compile(rf"{_PREFIX}(?:{name})$")
    except (re.error, OverflowError) as error:
        raise AdapterInvalid(f"{where} is not a regular expression: {error}.") from None


def _first_match(patterns: tuple[tuple[re.Pattern[str], T], ...], path: str, default: T) -> T:
    return next((value for pattern, value in patterns if pattern.match(path)), default)
