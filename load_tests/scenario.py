"""What `python -m load_tests.run` is asked to do: flags over a YAML scenario over defaults."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.bench.load import check_loopback
from app.bench.workload import Workload

MODES = ("closed", "open")
MAX_REQUESTS = 100_000
MAX_SECONDS = 3600.0


def _key(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One load test. Keys are the same as flags and in YAML."""

    base_url: str = _key("http://127.0.0.1:8000", "where the server is, without /v1")
    models: tuple[str, ...] = _key((), "names, most popular first (default: all that the server lists)")
    mode: str = _key("closed", "closed: a number of clients; open: requests arrive when planned")
    clients: int = _key(64, "closed loop: requests in flight")
    requests: int = _key(256, f"how many, at most {MAX_REQUESTS}")
    max_seconds: float = _key(600.0, f"cut the run off after this time, at most {MAX_SECONDS:.0f}")
    popularity: str = _key("uniform", "distinct, uniform, skewed, identical, zipf:EXPONENT")
    arrivals: str = _key("poisson", "open loop: poisson, gamma:CV, constant")
    rate: float = _key(1.0, "open loop: requests per second")
    lengths: str = _key("fixed:64:64", "fixed:P:O, uniform:P0:P1:O0:O1, lognormal:P:SIGMA:O:SIGMA, punica[:MAXLEN]")
    seed: int = _key(0, "of everything random")
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
            "requests": (1, MAX_REQUESTS),
            "max_seconds": (0.001, MAX_SECONDS),
            "token_low": (0, self.token_high - 1),
        }
        for key, (low, high) in bounds.items():
            if not low <= getattr(self, key) <= high:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be between {low} and {high}.")

    def workload(self, models: Sequence[str]) -> Workload:
        """The load it describes, over these models."""
        return Workload(
            models=tuple(models),
            requests=self.requests,
            popularity=self.popularity,
            lengths=self.lengths,
            arrivals=self.arrivals if self.mode == "open" else "closed",
            rate=self.rate,
            seed=self.seed,
            token_range=(self.token_low, self.token_high),
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every key of a scenario."""
    for key in dataclasses.fields(Scenario):
        flag, text = "--" + key.name.replace("_", "-"), f"{key.metadata['help']} (default: {key.default})"
        if key.type == "bool":
            parser.add_argument(flag, action="store_true", default=None, help=text)
        elif key.name == "mode":
            parser.add_argument(flag, choices=MODES, help=text)
        else:
            kinds: dict[Any, Any] = {"int": int, "float": float, "tuple[str, ...]": _names}
            parser.add_argument(flag, type=kinds.get(key.type, str), metavar=key.name.upper(), help=text)


def load_scenario(file: Path | None, flags: argparse.Namespace) -> Scenario:
    """The scenario of a YAML file (or the defaults) with the given flags on top, validated. Raises ValueError."""
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
    return scenario


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
