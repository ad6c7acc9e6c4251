"""Folders below which adapters may be named by path, whatever symbolic links lie between.

A path is resolved once, and what it resolves to must lie below a root. Files are then reached from the root step by
step without following links, so that nobody who swaps a folder for a link meanwhile gets another place looked at. The
worker opens by path, but counts on the state of the files (inode, times) that was seen here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from punica_core.adapters.packed_header import SUFFIX
from punica_core.errors import InvalidRequest, ModelNotFound

MAX_PATH_LENGTH = 4096

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)


class AdapterRoots:
    """roots: folders; their own links were the administrator's choice and are resolved at once."""

    def __init__(self, roots: Iterable[str]) -> None:
        self._roots = tuple(dict.fromkeys(os.path.realpath(root) for root in roots))

    def locate(self, path: str) -> str:
        """The folder or packed file that `path` stands for: absolute, or relative to the first root that has it.

        Raises InvalidRequest, in the same words whether there is something or not, for a path that leads elsewhere;
        ModelNotFound if there is neither.
        """
        if not self._roots:
            raise InvalidRequest(
                "No adapters can be loaded by path: start the server with --adapters or --adapter-roots.",
                param="lora_path",
            )
        if not 0 < len(path) <= MAX_PATH_LENGTH or "\0" in path:
            raise InvalidRequest(
                f"lora_path must have 1 to {MAX_PATH_LENGTH} characters, none of them NUL.", param="lora_path"
            )
        # joining an absolute path gives that path
        places = [os.path.realpath(os.path.join(root, path)) for root in self._roots]
        allowed = [place for place in places if self._split(place) is not None]
        if not allowed:
            raise InvalidRequest("lora_path does not lie below one of the adapter roots.", param="lora_path")
        for place in allowed:
            status = self._stat(place)
            if status is not None and (
                stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and place.endswith(SUFFIX))
            ):
                return place
        raise ModelNotFound(f"There is no folder and no {SUFFIX} file at lora_path.", param="lora_path")

    def stat(self, path: str) -> os.stat_result | None:
        """The state of the file that `path` leads to now; None if there is none, or none below a root."""
        return self._stat(os.path.realpath(path))

    def _stat(self, place: str) -> os.stat_result | None:
        parts = self._split(place)
        if parts is None:
            return None
        root, *folders, name = parts
        try:
            at = os.open(root, _FOLDER)
        except OSError:
            return None
        try:
            for folder in folders:
                inner = os.open(folder, _FOLDER, dir_fd=at)
                os.close(at)
                at = inner
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
        except OSError:
            return None
        finally:
            os.close(at)
        return None if stat.S_ISLNK(status.st_mode) else status

    def _split(self, place: str) -> list[str] | None:
        """[root, folder, …, name] of a resolved path below a root."""
        for root in self._roots:
            prefix = root.rstrip(os.sep) + os.sep
            if place.startswith(prefix):
                return [root, *place[len(prefix) :].split(os.sep)]
        return None
