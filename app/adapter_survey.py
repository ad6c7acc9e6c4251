"""What the headers of adapters tell before anybody asks for one: which of them will be refused."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from punica_core.adapters.registry import AdapterRegistry
from punica_core.adapters.report import AdapterReport, inspect_ref
from punica_core.errors import AdapterError, ModelNotFound

log = logging.getLogger(__name__)

SURVEY_SECONDS = 2.0
"""A start that is quicker waits no longer for the survey of its adapters."""
MAX_LOGGED = 20
"""Refusals that are logged one by one."""


@dataclass(frozen=True, slots=True)
class Survey:
    """refused: names. complete: all adapters were looked at. What is not refused may still not fit the base model."""

    refused: frozenset[str] = frozenset()
    complete: bool = True


class SurveyThread:
    """`survey_adapters` on a thread. A start does not depend on it, nor does an end: a file on a dead mount may hold it
    for ever, and what goes wrong in it is in the log."""

    def __init__(self, registry: AdapterRegistry, max_lora_rank: int) -> None:
        self._arguments = registry, max_lora_rank
        self._ended = threading.Event()
        self._survey = Survey(complete=False)
        threading.Thread(target=self._run, name="adapter-survey", daemon=True).start()

    def _run(self) -> None:
        self._survey = survey_adapters(*self._arguments)
        self._ended.set()

    def result(self, seconds: float = SURVEY_SECONDS) -> Survey:
        """What was found; waits so long at most."""
        self._ended.wait(seconds)
        return self._survey


def report_of(registry: AdapterRegistry, name: str, max_lora_rank: int) -> AdapterReport:
    """What the headers say of an adapter. Raises ModelNotFound if it has gone."""
    try:
        ref = registry.resolve(name)
    except AdapterError as error:
        return AdapterReport(name, str(registry.folder_of(name))).refused(error)
    return inspect_ref(ref, None, max_lora_rank)[0]


def survey_adapters(
    registry: AdapterRegistry,
    max_lora_rank: int,
    seconds: float = SURVEY_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Survey:
    """Look at the adapters' headers, for so long at most, and log why some will be refused."""
    until = clock() + seconds
    refused: list[str] = []
    complete = True
    for name in registry.names():
        if clock() >= until:
            complete = False
            break
        try:
            report = report_of(registry, name, max_lora_rank)
        except (ModelNotFound, TimeoutError):  # gone, or somebody else waits for its files already
            continue
        if not report.is_served:
            refused.append(name)
            if len(refused) <= MAX_LOGGED:
                log.warning("Adapter %r is refused: %s", name, report.reason)
    if len(refused) > MAX_LOGGED:
        log.warning("%d more adapters are refused; `punica adapters list` says why.", len(refused) - MAX_LOGGED)
    return Survey(frozenset(refused), complete)
