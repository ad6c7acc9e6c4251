"""The names in a directory of adapters: listed as a whole, then compared with the directory now and then.

A folder that does not answer is left out, or stays what it was: whoever hangs there is known by `Looks`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from punica_core.adapters.files import CONFIG_NAME
from punica_core.adapters.looks import Looks
from punica_core.adapters.packed_header import SUFFIX
from punica_core.adapters.served_names import is_part

LISTING_SECONDS = 1.0
"""Age from which a listing is compared with the directory."""
FULL_LISTING_SECONDS = 60.0
"""Age from which it is made anew even if no folder seems to have come or gone."""
RACY_SECONDS = 2.0
"""A directory changed this shortly before it was listed may have changed again within its timestamp's grain."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """names: sorted. folders: those that have a config. unfinished: those that lack one, and their sub-folders.
    directories: mtimes by path."""

    names: tuple[str, ...]
    folders: frozenset[str]
    unfinished: tuple[str, ...]
    directories: dict[str, int]
    checked_at: float
    made_at: float
    racy: bool


class DirectoryListing:
    """root: without symbolic links, or None for none. reserved: names that are not served.

    is_inside: whether a path below the root exists and leads to nowhere else. report: logs a fault of a path once.
    looks: of all who look at the directory. clock: seconds. Safe to call from several threads.
    """

    def __init__(
        self,
        root: str | None,
        reserved: Collection[str],
        is_inside: Callable[[str], bool],
        report: Callable[[str, str], None],
        looks: Looks,
        clock: Callable[[], float],
    ) -> None:
        self._root = root
        self._reserved = reserved
        self._is_inside = is_inside
        self._report = report
        self._looks = looks
        self._clock = clock
        self._listing: _Listing | None = None
        self._num_busy = 0

    @property
    def is_due(self) -> bool:
        """Whether `names` would look at the directory now."""
        listing = self._listing
        return listing is None or self._clock() - listing.checked_at >= LISTING_SECONDS

    @property
    def last(self) -> tuple[str, ...] | None:
        """The names as of the last look, None before the first."""
        return None if self._listing is None else self._listing.names

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Folders without a config that hold nothing which could be an adapter's folder, as of the last look. Names."""
        if self._listing is None:
            return ()
        names = [self._name(path) for path in self._listing.unfinished]
        parents = {name.rpartition("/")[0] for name in (*names, *self._listing.names)}
        return tuple(sorted(name for name in names if name not in parents))

    @property
    def is_busy(self) -> bool:
        """A thread looks at the directory now."""
        return self._num_busy > 0

    def names(self) -> tuple[str, ...]:
        """The names as of now, or of a second ago. Raises TimeoutError if the directory does not answer another
        thread."""
        listing = self._listing
        if listing is None or self.is_due:
            self._num_busy += 1
            try:
                listing = self._listing = self._renewed(listing, self._clock())
            finally:
                self._num_busy -= 1
        return listing.names

    def _renewed(self, listing: _Listing | None, now: float) -> _Listing:
        if listing is None or now - listing.made_at >= FULL_LISTING_SECONDS:
            return self._list(now, known=frozenset())
        if self._has_changed(listing):
            return replace(self._list(now, known=listing.folders), made_at=listing.made_at)
        return replace(listing, checked_at=now)

    def _has_changed(self, listing: _Listing) -> bool:
        """Folders came or went, or one that lacked its config has it now. Costs one stat for each such folder."""
        changed = (
            self._looks.look(path, _mtime_ns, mtime) != mtime  # one that does not answer has not changed
            for path, mtime in listing.directories.items()
        )
        return listing.racy or any(changed) or any(map(self._has_config, listing.unfinished))

    def _list(self, now: float, known: frozenset[str]) -> _Listing:
        """known: folders that need no second look as long as they exist."""
        root = self._root
        if root is None:
            return _Listing((), frozenset(), (), {}, now, now, racy=False)
        names: list[str] = []
        unfinished: list[str] = []
        directories: dict[str, int] = {}
        nothing: tuple[list[str], list[str]] = ([], [])
        with self._looks.at(root):
            directories[root] = _mtime_ns(root)
            folders, packed = self._entries(root)
        for folder in folders:
            path = os.path.join(root, folder)
            if folder in known or self._has_config(path):
                names.append(folder)
                continue
            unfinished.append(path)
            directories[path] = self._looks.look(path, _mtime_ns, 0)
            nested_folders, nested_packed = self._looks.look(path, self._entries, nothing)
            packed += [f"{folder}/{stem}" for stem in nested_packed]
            for nested in nested_folders:
                if self._has_config(os.path.join(path, nested)):
                    names.append(f"{folder}/{nested}")
                else:
                    unfinished.append(os.path.join(path, nested))
        racy = max(directories.values()) > time.time_ns() - RACY_SECONDS * 1e9
        with_config = frozenset(names)
        for name in packed:
            if name in with_config:
                self._report(f"{name}{SUFFIX}", "packed adapter %r is not served: a folder has its name")
        served = sorted(set(self._served([*names, *packed])))
        return _Listing(tuple(served), with_config, tuple(unfinished), directories, now, now, racy)

    def _entries(self, path: str) -> tuple[list[str], list[str]]:
        """What in a directory can be part of an adapter's name: its folders, and packed files without their suffix."""
        folders: list[str] = []
        packed: list[str] = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    stem = entry.name.removesuffix(SUFFIX)
                    if not is_part(stem):
                        continue
                    kind = self._kind_of(path, stem, entry)
                    if kind == "folder":
                        folders.append(entry.name)
                    elif kind == "file" and stem != entry.name:
                        packed.append(stem)
        except OSError as error:
            self._report(path, f"adapter folder %r cannot be listed: {error.strerror}")
        return folders, packed

    def _kind_of(self, path: str, stem: str, entry: os.DirEntry[str]) -> str:
        """That of an entry; "", and a word in the log, for one that cannot be looked at: it must hide no other."""
        try:
            return self._kind_of_link(path, stem, entry) if entry.is_symlink() else _kind(entry)
        except OSError as error:
            self._report(entry.path, f"%r in an adapter folder cannot be looked at: {error.strerror}")
            return ""

    def _kind_of_link(self, path: str, stem: str, link: os.DirEntry[str]) -> str:
        """That of what it leads to, "" for what may not be looked at: it may also lead to where nobody answers."""
        place = os.path.join(path, stem)
        try:
            with self._looks.at(place):
                return _kind(link) if self._is_inside(link.path) else ""
        except TimeoutError:
            if stem == link.name:
                return "folder" if self._had_config(place) else ""
            return "file" if self._listing is not None and self._name(place) in self._listing.names else ""

    def _has_config(self, path: str) -> bool:
        try:
            with self._looks.at(path):
                return os.path.isfile(os.path.join(path, CONFIG_NAME))
        except TimeoutError:
            return self._had_config(path)

    def _had_config(self, path: str) -> bool:
        """As of the last listing."""
        return self._listing is not None and self._name(path) in self._listing.folders

    def _name(self, path: str) -> str:
        assert self._root is not None
        return os.path.relpath(path, self._root)

    def _served(self, names: list[str]) -> Iterator[str]:
        for name in names:
            if name in self._reserved:
                self._report(name, "adapter folder %r has the name of the base model and is not served: rename it")
            else:
                yield name


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_dir():
        return "folder"
    return "file" if entry.is_file() else ""


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
