"""What the headers of adapters tell before anybody asks for one: which of them will be refused.

Headers are read while the worker starts. Whether they fit the base model is looked at when the worker is ready, since
it is the worker who knows the base's shapes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from punica_core.adapters.files import CONFIG_NAME
from punica_core.adapters.overview import look_at
from punica_core.adapters.registry import AdapterRegistry
from punica_core.adapters.report import AdapterParts, check_base_fits
from punica_core.adapters.shapes import ModelShapes
from punica_core.errors import AdapterError, ModelNotFound

log = logging.getLogger(__name__)

SURVEY_SECONDS = 2.0
"""A start that is quicker waits no longer for the survey of its adapters."""
MAX_LOGGED = 20
"""Refusals that are logged one by one."""


@dataclass(frozen=True, slots=True)
class Survey:
    """refused: names. complete: all adapters were looked at. The numbers of what is not refused were not read."""

    refused: frozenset[str] = frozenset()
    complete: bool = True


class SurveyThread:
    """`survey_adapters` on a thread. A start does not depend on it, nor does an end: a file on a dead mount may hold it
    for ever, and what goes wrong in it is in the log."""

    def __init__(self, registry: AdapterRegistry, max_lora_rank: int) -> None:
        self._arguments = registry, max_lora_rank
        self._base_known = threading.Event()
        self._base: ModelShapes | None = None
        self._ended = threading.Event()
        self._survey = Survey(complete=False)
        threading.Thread(target=self._run, name="adapter-survey", daemon=True).start()

    def _run(self) -> None:
        self._survey = survey_adapters(*self._arguments, self._wait_for_base)
        self._ended.set()

    def _wait_for_base(self) -> ModelShapes | None:
        self._base_known.wait()
        return self._base

    def result(self, base: ModelShapes | None, seconds: float = SURVEY_SECONDS) -> Survey:
        """What was found; waits so long at most. base: what adapters must fit, None if the engine does not tell."""
        self._base = base
        self._base_known.set()
        self._ended.wait(seconds)
        return self._survey


class _Refusals:
    """Names of refused adapters. The reasons of the first are logged, the others counted."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def add(self, name: str, reason: str) -> None:
        self.names.add(name)
        if len(self.names) <= MAX_LOGGED:
            log.warning("Adapter %r is refused: %s", name, reason)

    def end(self) -> frozenset[str]:
        if len(self.names) > MAX_LOGGED:
            log.warning(
                "%d more adapters are refused; `punica adapters list --model` says why.", len(self.names) - MAX_LOGGED
            )
        return frozenset(self.names)


def _samples(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:MAX_LOGGED]))
    return shown if len(names) <= MAX_LOGGED else f"{shown} and {len(names) - MAX_LOGGED} more"


def survey_adapters(
    registry: AdapterRegistry,
    max_lora_rank: int,
    wait_for_base: Callable[[], ModelShapes | None] = lambda: None,
    seconds: float = SURVEY_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Survey:
    """Look at the adapters' headers, then at whether they fit the base, each for so long at most, and log why some will
    be refused. wait_for_base: gives the base's shapes when they are known, None if they never will be."""
    refusals = _Refusals()
    sound: list[tuple[str, AdapterParts]] = []
    complete = True
    until = clock() + seconds
    for name in registry.names():
        if clock() >= until:
            complete = False
            break
        try:
            report, parts = look_at(registry, name, None, max_lora_rank)
        except (ModelNotFound, TimeoutError):  # gone, or somebody else waits for its files already
            continue
        if parts is None:
            refusals.add(name, report.reason)
        else:
            sound.append((name, parts))
    no_config = registry.names_without_config()
    if no_config:
        log.warning("Without %s, and so no adapters: %s.", CONFIG_NAME, _samples(no_config))
    base = wait_for_base()
    until = clock() + seconds
    for name, parts in sound:
        if base is None:
            break
        if clock() >= until:
            complete = False
            break
        try:
            check_base_fits(parts, base, max_lora_rank)
        except AdapterError as error:
            refusals.add(name, error.message)
    return Survey(refusals.end(), complete)
