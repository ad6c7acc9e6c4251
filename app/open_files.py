"""How many connections the files that a process may open allow."""

from __future__ import annotations

import contextlib
import resource

RESERVED_FILES = 128
"""Files that are no client's: the worker's socket, logs, adapters and keys being read, connections being refused."""
MOST_CONNECTIONS = 1 << 16


def max_connections() -> int:
    """Raise the limit of open files as far as it goes, and return how many of them may be connections."""
    wanted = MOST_CONNECTIONS + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _least(hard, wanted)
    if _least(soft, most) < most:
        with contextlib.suppress(ValueError, OSError):  # macOS has a limit of its own, which it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    most = _least(resource.getrlimit(resource.RLIMIT_NOFILE)[0], wanted)
    return max(most - RESERVED_FILES, most // 2)


def _least(limit: int, wanted: int) -> int:
    return wanted if limit == resource.RLIM_INFINITY else min(limit, wanted)
