"""What `punica bench serve` is asked to do: flags over a YAML scenario over defaults."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.bench.load import check_loopback
from punica_core.bench.workload import Workload

MODES = ("closed", "open")
BASE = "base"
"""The popularity of a load that asks for no adapter."""

NEW_PROMPTS = -1
"""The prompt_seed that stands for another one each time."""

MAX_REQUESTS = 100_000
MAX_PROCESSES = 64
MAX_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Models:
    """What a server serves. adapters: most popular first."""

    base: str
    adapters: tuple[str, ...]


def _key(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One load test. Keys are the same as flags and in YAML."""

    base_url: str = _key("http://127.0.0.1:8000", "where the server is, without /v1")
    models: tuple[str, ...] = _key((), "adapters, most popular first (default: all that the server lists)")
    base: str = _key("", "name of the base model (default: the one that the server lists as others' parent)")
    mode: str = _key("closed", "closed: a number of clients; open: requests arrive when planned")
    clients: int = _key(64, "closed loop: requests in flight")
    processes: int = _key(1, "client processes that share the clients; one sends and reads on one core")
    requests: int = _key(256, f"how many, at most {MAX_REQUESTS}")
    max_seconds: float = _key(600.0, f"cut the run off after this time, at most {MAX_SECONDS:.0f}")
    popularity: str = _key(
        "uniform",
        "base, identical, skewed, uniform, distinct, zipf:EXPONENT; several with commas run one after another",
    )
    arrivals: str = _key("poisson", "open loop: poisson, gamma:CV, constant")
    rate: float = _key(1.0, "open loop: requests per second")
    lengths: str = _key("fixed:64:64", "fixed:P:O, uniform:P0:P1:O0:O1, lognormal:P:SIGMA:O:SIGMA, punica[:MAXLEN]")
    prompts: str = _key("ids", "ids: prompts as token ids; text: as words, a token each in most vocabularies")
    ignore_eos: bool = _key(True, "generate the whole length, which a strict OpenAI server has no field for")
    warmup: bool = _key(False, "first ask every model for two tokens, so that all adapters are loaded")
    seed: int = _key(0, "of everything random but the prompts' tokens")
    prompt_seed: int = _key(
        NEW_PROMPTS, "of the prompts' tokens, plus one for each further run; -1: prompts that no server has cached"
    )
    token_low: int = _key(300, "lowest prompt token id")
    token_high: int = _key(30_000, "prompt token ids are below this")
    allow_remote: bool = _key(False, "allow a server that is not on the loopback interface")

    def validate(self) -> None:
        """Raise ValueError naming the first key whose value cannot be."""
        if not self.allow_remote:
            check_loopback(self.base_url)
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; it must be one of {', '.join(MODES)}.")
        bounds = {
            "clients": (1, MAX_REQUESTS),
            "processes": (1, MAX_PROCESSES),
            "requests": (1, MAX_REQUESTS),
            "max_seconds": (0.001, MAX_SECONDS),
            "token_low": (0, self.token_high - 1),
            "prompt_seed": (NEW_PROMPTS, 2**63),
        }
        for key, (low, high) in bounds.items():
            if not low <= getattr(self, key) <= high:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be between {low} and {high}.")

    @property
    def popularities(self) -> tuple[str, ...]:
        """What `popularity` lists: one run each."""
        return _names(self.popularity)

    def workload(self, popularity: str, models: Models) -> Workload:
        """The load it describes; "base" asks for the base model alone, as does a server without adapters."""
        is_base = popularity == BASE or not models.adapters
        return Workload(
            models=(models.base,) if is_base else models.adapters,
            requests=self.requests,
            popularity="identical" if is_base else popularity,
            lengths=self.lengths,
            arrivals=self.arrivals if self.mode == "open" else "closed",
            rate=self.rate,
            seed=self.seed,
            token_range=(self.token_low, self.token_high),
            prompts=self.prompts,
            ignore_eos=self.ignore_eos,
            prompt_seed=_drawn(self.prompt_seed) + self.popularities.index(popularity),
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every key of a scenario."""
    for key in dataclasses.fields(Scenario):
        flag, text = "--" + key.name.replace("_", "-"), f"{key.metadata['help']} (default: {key.default})"
        if key.type == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif key.name == "mode":
            parser.add_argument(flag, choices=MODES, help=text)
        else:
            kinds: dict[Any, Any] = {"int": int, "float": float, "tuple[str, ...]": _names}
            parser.add_argument(flag, type=kinds.get(key.type, str), metavar=key.name.upper(), help=text)


def load_scenario(file: Path | None, flags: argparse.Namespace) -> Scenario:
    """The scenario of a YAML file (or the defaults) with the given flags on top, validated. Raises ValueError.

    Its prompt_seed is a number, drawn here if new prompts are wanted.
    """
    known = {key.name: key for key in dataclasses.fields(Scenario)}
    values: dict[str, Any] = yaml.safe_load(file.read_text()) or {} if file else {}
    if not isinstance(values, dict):
        raise ValueError(f"{file} must be a mapping of keys to values.")
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Known keys: {', '.join(known)}."
            raise ValueError(f"{file}: there is no key {name!r}.{hint}")
    for name in known:
        if (value := getattr(flags, name)) is not None:
            values[name] = value
    if isinstance(models := values.get("models"), str | list):
        values["models"] = _names(models) if isinstance(models, str) else tuple(models)
    scenario = Scenario(**values)
    scenario.validate()
    return dataclasses.replace(scenario, prompt_seed=_drawn(scenario.prompt_seed))


def _drawn(prompt_seed: int) -> int:
    return secrets.randbits(48) if prompt_seed == NEW_PROMPTS else prompt_seed


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
