"""The limit of open files: raised as far as it goes, and shared with connections."""

from __future__ import annotations

import resource

import pytest

from app import open_files
from app.open_files import MOST_CONNECTIONS, RESERVED_FILES, max_connections

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [
        (1024, 4096, 4096, 4096 - RESERVED_FILES),
        (1024, UNLIMITED, MOST_CONNECTIONS + RESERVED_FILES, MOST_CONNECTIONS),
        (10**6, 10**6, None, MOST_CONNECTIONS),
        (UNLIMITED, UNLIMITED, None, MOST_CONNECTIONS),
        (256, 256, None, 128),
        (100, 100, None, 50),
    ],
)
@pytest.mark.parametrize("allowed", [True, False])
def test_connections_are_what_the_files_leave(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, connections: int, allowed: bool
) -> None:
    limits = (soft, hard)

    def setrlimit(what: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        if not allowed:
            raise ValueError("not allowed to raise maximum limit")
        limits = wanted

    monkeypatch.setattr(open_files.resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(open_files.resource, "setrlimit", setrlimit)
    found = max_connections()
    if raised is None or allowed:
        assert (limits, found) == ((raised or soft, hard), connections)
    else:
        assert (limits, found) == ((soft, hard), soft - RESERVED_FILES)
