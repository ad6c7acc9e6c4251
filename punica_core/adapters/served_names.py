"""Names under which adapters are served."""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Collection

MAX_NAME_LENGTH = 200

_NUM_NEIGHBOURS = 48
_NUM_MATCHES = 3


def close_matches(name: str, names: Collection[str]) -> list[str]:
    """Up to three names like `name`, best first. Of many, only the alphabetical neighbours are compared."""
    wanted = name[:MAX_NAME_LENGTH].strip(" \t\r\n\"'/.")
    ordered = sorted(names) if not isinstance(names, tuple) else names
    place = bisect.bisect_left(ordered, wanted)
    near = ordered[max(0, place - _NUM_NEIGHBOURS) : place + _NUM_NEIGHBOURS]
    folded = wanted.casefold()
    same = [other for other in ordered if other.casefold() == folded][:_NUM_MATCHES]
    similar = difflib.get_close_matches(wanted, near, n=_NUM_MATCHES)
    return list(dict.fromkeys([*same, *similar]))[:_NUM_MATCHES]


def is_name(name: str) -> bool:
    """Whether an adapter of the directory can have this name: a folder's, or a folder's in one."""
    parts = name.split("/")
    return len(parts) <= 2 and all(map(is_part, parts))


def is_part(part: str) -> bool:
    """Whether a string can be a folder's name here: printable, not hidden, no way out of the directory."""
    return 0 < len(part) <= MAX_NAME_LENGTH and part[0] != "." and part.isprintable() and not {"/", "\\"} & set(part)
