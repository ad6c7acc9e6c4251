"""How many connections the files that a process may open allow."""

from __future__ import annotations

import resource

RESERVED_FILES = 128
"""Files that are no client's: the worker's socket, logs, adapters and keys being read, connections being refused."""
MOST_CONNECTIONS = 1 << 16


def max_connections() -> int:
    """Raise the limit of open files as far as it goes, and return how many of them may be connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + RESERVED_FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    else:
        most = wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)
    return max(most - RESERVED_FILES, most // 2)
