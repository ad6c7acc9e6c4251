"""What the headers of adapters tell before anybody asks for one: which of them will be refused.

They are looked at as soon as the worker has told the base's shapes, while it reads the weights; a start does not wait
for it. What is left when the server is ready is looked at beside its requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from punica_core.adapters.files import CONFIG_NAME
from punica_core.adapters.kinds import KnownKinds
from punica_core.adapters.registry import AdapterRegistry
from punica_core.adapters.shapes import ModelShapes
from punica_core.errors import ModelNotFound
from punica_core.protocol import Progress

log = logging.getLogger(__name__)

SURVEY_SECONDS = 2.0
"""The words of a server that is ready wait so long at most for the survey of its adapters; its requests never do."""
MAX_LOGGED = 20
"""Refusals that are logged one by one."""
_REST = 4
"""Beside requests it rests so many times as long as it works: for these the front end has one interpreter."""


@dataclass(frozen=True, slots=True)
class Survey:
    """refused: names. complete: all adapters were looked at. The numbers of what is not refused were not read."""

    refused: frozenset[str] = frozenset()
    complete: bool = True


class SurveyThread:
    """`survey_adapters` on a thread. A start does not depend on it, nor does an end: a file on a dead mount may hold it
    for ever, and what goes wrong in it is in the log."""

    def __init__(self, max_lora_rank: int) -> None:
        self._max_lora_rank = max_lora_rank
        self._base: ModelShapes | None = None
        self._base_known = threading.Event()
        self._beside_requests = threading.Event()
        self._ended = threading.Event()
        self._refused: set[str] = set()
        self._looked_at_all = False

    def begin(self, registry: AdapterRegistry) -> None:
        """Look at these adapters once the base is known."""
        threading.Thread(target=self._run, args=(registry,), name="adapter-survey", daemon=True).start()

    def on_progress(self, progress: Progress) -> None:
        """The worker's start has come so far: it may have told the base's shapes."""
        if progress.shapes is not None and not self._base_known.is_set():
            self._base = progress.shapes
            self._base_known.set()

    def _run(self, registry: AdapterRegistry) -> None:
        self._base_known.wait()
        try:
            survey_adapters(registry, self._base, self._max_lora_rank, self._refused, self._rest)
            self._looked_at_all = True
        except TimeoutError:
            log.warning("The adapters' directory does not answer: which are refused shows when they are asked for.")
        except Exception:
            log.exception("The adapters were not all looked at; those that were not are when they are asked for.")
        finally:
            self._ended.set()

    def _rest(self, worked: float) -> None:
        if self._beside_requests.is_set():
            time.sleep(_REST * worked)

    def result(self, seconds: float = SURVEY_SECONDS) -> Survey:
        """What was found; waits so long at most, and has the rest looked at beside requests. Call it when the worker
        is ready: if it has not told the base's shapes by then it never will, and what fits them is not looked at."""
        self._base_known.set()
        self._ended.wait(seconds)
        self._beside_requests.set()
        complete = self._looked_at_all  # before what it found: that may still grow
        return Survey(frozenset(self._refused), complete)


def _samples(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:MAX_LOGGED]))
    return shown if len(names) <= MAX_LOGGED else f"{shown} and {len(names) - MAX_LOGGED} more"


def survey_adapters(
    registry: AdapterRegistry,
    base: ModelShapes | None,
    max_lora_rank: int,
    refused: set[str],
    rest: Callable[[float], None] = lambda worked: None,
) -> None:
    """Look at the headers of all adapters, add to `refused` the names of those that will be, and log the reasons of the
    first. base: what they must fit, None if the engine does not tell. rest: called after each adapter with the seconds
    that it took. Raises TimeoutError if the directory itself does not answer."""
    kinds = KnownKinds(base, max_lora_rank)
    for name in registry.names():
        began = time.monotonic()
        try:
            reason = kinds.refusal(registry, name)
        except (ModelNotFound, TimeoutError):  # gone, or somebody else waits for its files already
            continue
        if reason:
            refused.add(name)
            if len(refused) <= MAX_LOGGED:
                log.warning("Adapter %r is refused: %s", name, reason)
        rest(time.monotonic() - began)
    no_config = registry.names_without_config()
    if no_config:
        log.warning("Without %s, and so no adapters: %s.", CONFIG_NAME, _samples(no_config))
    more = len(refused) - MAX_LOGGED
    if more > 0:
        log.warning("%d more adapters are refused; `punica adapters list --model` says why.", more)
