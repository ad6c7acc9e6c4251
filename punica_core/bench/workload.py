"""What a load is made of: which model each request asks for, how long it is, and when it arrives.

Everything is a function of a seed. The popularities are those of the Punica paper (arXiv 2310.18547, §7), plus zipf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from punica_core.bench.popularity import POPULARITIES, request_counts

SHUFFLE_SEED: Final = 7919
"""Seed of the order in which models of different popularity follow each other, whatever the workload's own seed."""

PROMPTS: Final = ("ids", "text")

_WORDS: Final = (
    *("the", "of", "and", "to", "in", "is", "for", "that", "was", "with", "his", "on", "be", "at", "by", "had", "are"),
    *("but", "from", "have", "they", "which", "one", "you", "were", "all", "her", "she", "there", "would", "their"),
)
"""A token each, with the space before it, in most vocabularies."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. at: seconds after the start at which it arrives; None in a closed loop, where a client sends it as
    soon as its previous one has ended. text: the prompt, if it is not to be sent as ids. ignore_eos: it generates
    max_tokens tokens, whatever they are."""

    model: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    at: float | None = None
    text: str = ""
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A load in words.

    models: names, most popular first. popularity: distinct, uniform, skewed, identical, zipf or zipf:EXPONENT.
    lengths: see `request_lengths`. arrivals: closed, or see `arrival_times`; rate: requests a second of the others.
    token_range: prompt token ids are drawn from this half-open range. prompts: ids, or text: as many words as the
    prompt should have tokens. ignore_eos: every request generates its full length. prompt_seed: of the prompts' tokens,
    None as `seed`.
    """

    models: tuple[str, ...]
    requests: int
    popularity: str = "uniform"
    lengths: str = "fixed:64:64"
    arrivals: str = "closed"
    rate: float = 1.0
    seed: int = 0
    token_range: tuple[int, int] = (300, 30_000)
    prompts: str = "ids"
    ignore_eos: bool = True
    prompt_seed: int | None = None

    def plan(self) -> list[PlannedRequest]:
        """Its requests, in order of arrival. Raises ValueError for a word or number that means nothing."""
        models = assign_models(self.popularity, self.models, self.requests, self.seed)
        lengths = request_lengths(self.lengths, self.requests, self.seed)
        times: Sequence[float | None] = [None] * self.requests
        if self.arrivals != "closed":
            times = arrival_times(self.arrivals, self.rate, self.requests, self.seed)
        if self.prompts not in PROMPTS:
            raise ValueError(f"prompts is {self.prompts!r}; it must be one of {', '.join(PROMPTS)}.")
        prompt_seed = self.seed if self.prompt_seed is None else self.prompt_seed
        generator = np.random.Generator(np.random.PCG64([prompt_seed, 1]))
        planned = []
        for model, (prompt, output), at in zip(models, lengths, times, strict=True):
            ids = tuple(generator.integers(*self.token_range, prompt).tolist())
            text = " ".join(_WORDS[token % len(_WORDS)] for token in ids) if self.prompts == "text" else ""
            planned.append(PlannedRequest(model, ids, output, at, text, self.ignore_eos))
        return planned


def assign_models(popularity: str, models: Sequence[str], requests: int, seed: int = 0) -> list[str]:
    """The model of each request. The paper's popularities say how many adapters there are and how many requests each
    gets; the i-th of these is models[i mod len(models)]. zipf:S draws the i-th model with weight i**-S."""
    if not models:
        raise ValueError("models is empty; name at least one model.")
    kind, _, exponent = popularity.partition(":")
    if kind == "zipf":
        weights = np.arange(1, len(models) + 1, dtype=np.float64) ** -_number(exponent or "1", popularity)
        generator = np.random.Generator(np.random.PCG64([seed, 2]))
        return [models[i] for i in generator.choice(len(models), requests, p=weights / weights.sum())]
    if popularity not in POPULARITIES:
        raise ValueError(f"popularity is {popularity!r}; it must be one of {', '.join(POPULARITIES)}, zipf:EXPONENT.")
    counts = request_counts(popularity, requests)
    ordered = np.repeat(np.arange(len(counts)), counts)
    np.random.Generator(np.random.PCG64(SHUFFLE_SEED)).shuffle(ordered)
    return [models[i % len(models)] for i in ordered.tolist()]


def request_lengths(lengths: str, requests: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, output) tokens of each request.

    fixed:P:O. uniform:P0:P1:O0:O1, bounds included. lognormal:P:SIGMA:O:SIGMA[:MAXP:MAXO], medians P and O, clipped to
    4…1024 and 4…512 by default. punica[:MAXLEN]: as its text-generation benchmark (prompts fit to ShareGPT's, prompt
    plus output at most MAXLEN, 2048).
    """
    kind, *rest = lengths.split(":")
    numbers = [_number(part, lengths) for part in rest]
    generator = np.random.Generator(np.random.PCG64(seed))
    match kind, numbers:
        case "fixed", [prompt, output]:
            return [(int(prompt), int(output))] * requests
        case "uniform", [p0, p1, o0, o1]:
            prompts = generator.integers(int(p0), int(p1) + 1, requests)
            outputs = generator.integers(int(o0), int(o1) + 1, requests)
        case "lognormal", [p, p_sigma, o, o_sigma, *bounds] if len(bounds) in (0, 2):
            most_p, most_o = bounds or (1024, 512)
            prompts = np.exp(generator.normal(np.log(p), p_sigma, requests)).round().clip(4, most_p)
            outputs = np.exp(generator.normal(np.log(o), o_sigma, requests)).round().clip(4, most_o)
        case "punica", bounds if len(bounds) <= 1:
            most = int(bounds[0]) if bounds else 2048
            # scipy's lognorm(s=0.8, loc=-1, scale=18)
            prompts = (generator.lognormal(np.log(18), 0.8, requests) - 1).astype(np.int64).clip(1, most - 2)
            outputs = np.maximum(prompts + 2, generator.integers(0, most, requests)) - prompts
        case _:
            raise ValueError(
                f"lengths is {lengths!r}; it must be fixed:P:O, uniform:…, lognormal:… or punica[:MAXLEN]."
            )
    return [(int(prompt), int(output)) for prompt, output in zip(prompts, outputs, strict=True)]


def arrival_times(arrivals: str, rate: float, requests: int, seed: int = 0) -> list[float]:
    """Seconds after the start at which requests arrive, `rate` a second on average; the first arrives at 0.

    poisson; gamma:CV, burstier than poisson for a coefficient of variation of the gaps above 1; constant.
    """
    if rate <= 0:
        raise ValueError(f"rate is {rate}; it must be positive (requests per second).")
    kind, _, cv = arrivals.partition(":")
    generator = np.random.Generator(np.random.PCG64([seed, 3]))
    if kind == "constant":
        gaps = np.ones(requests)
    elif kind == "poisson":
        gaps = generator.exponential(1.0, requests)
    elif kind == "gamma":
        shape = _number(cv, arrivals) ** -2
        gaps = generator.gamma(shape, 1 / shape, requests)
    else:
        raise ValueError(f"arrivals is {arrivals!r}; it must be closed, poisson, gamma:CV or constant.")
    times: list[float] = ((gaps.cumsum() - gaps[0]) / rate).tolist()
    return times


def _number(text: str, whole: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number > 0:
        raise ValueError(f"{text!r} in {whole!r} must be a positive number.")
    return number
