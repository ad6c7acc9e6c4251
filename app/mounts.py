"""Which folders lie on this machine's own disks: looking at them cannot wait for a network."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MOUNTS_SECONDS = 10.0
"""Age from which the table of mounts is read anew."""
_TABLE = Path("/proc/self/mountinfo")
_LOCAL = frozenset(
    ("bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "overlay", "squashfs", "tmpfs", "xfs", "zfs")
)
_ESCAPE = re.compile(rb"\\([0-7]{3})")


class LocalFolders:
    """Tells whether all of some folders, and what is mounted below them, are local. No look at the folders themselves.

    folders: absolute, without symbolic links. clock: seconds.
    """

    def __init__(
        self, folders: Sequence[str], table: Path = _TABLE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folders = [os.fsencode(folder) for folder in folders]
        self._table = table
        self._clock = clock
        self._read_at: float | None = None
        self._are_local = False

    def are_local(self) -> bool:
        """False also where that cannot be told."""
        now = self._clock()
        if self._read_at is None or now - self._read_at >= MOUNTS_SECONDS:
            self._read_at, self._are_local = now, self._read()
        return self._are_local

    def _read(self) -> bool:
        try:
            mounts = _mounts(self._table.read_bytes())
        except (OSError, ValueError, IndexError):
            return False
        return all(kind in _LOCAL for folder in self._folders for kind in _kinds(folder, mounts))


def _mounts(table: bytes) -> dict[bytes, str]:
    """The file system's type by mount point; of several mounted in one place, the last."""
    mounts: dict[bytes, str] = {}
    for line in table.splitlines():
        fields = line.split(b" ")
        point = _ESCAPE.sub(lambda escape: bytes([int(escape[1], 8)]), fields[4])
        mounts[point.rstrip(b"/")] = fields[fields.index(b"-", 6) + 1].decode()
    return mounts


def _kinds(folder: bytes, mounts: dict[bytes, str]) -> list[str]:
    """Types of what a folder lies on and of what is mounted below; unknown ones are empty."""
    above = folder.rstrip(b"/")
    while above and above not in mounts:
        above = above.rpartition(b"/")[0]
    below = [kind for point, kind in mounts.items() if point.startswith(folder.rstrip(b"/") + b"/")]
    return [mounts.get(above, ""), *below]
