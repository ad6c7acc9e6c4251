"""Which adapters exist: what lies in one directory, named as the folders are, seen without a restart.

    registry = AdapterRegistry(Path("adapters"), reserved_names={"llama"})
    registry.names()             # sorted; from a listing that is at most about a second old
    registry.resolve("sql-bot")  # looks at the files themselves, never at the listing

A folder is an adapter if it has an `adapter_config.json`, and so is a file `sql-bot.punica`, packed, unless there is a
folder of that name; one nested level gives names like `org/name`. Nothing is opened here: names are checked before they
reach the file system, then files are stat'ed.

An administrator may add folders from elsewhere under names of their own (`add`), and take any name away (`remove`): a
folder of the directory is then hidden until it is added, or it has gone and comes back.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from punica_core.adapters.files import CONFIG_NAME, PICKLE_NAMES, WEIGHTS_NAME, signature_of
from punica_core.adapters.header import CONVERT_PICKLE, shorten
from punica_core.adapters.listing import DirectoryListing
from punica_core.adapters.looks import Looks
from punica_core.adapters.packed_header import SUFFIX
from punica_core.adapters.roots import AdapterRoots
from punica_core.adapters.served_names import MAX_NAME_LENGTH, close_matches, is_name, is_part
from punica_core.errors import AdapterError, AdapterInvalid, AdapterUnsupported, InvalidRequest, ModelNotFound
from punica_core.protocol import AdapterRef

_log = logging.getLogger(__name__)


class AdapterRegistry:
    """root: the adapters' directory, or None for none. reserved_names: names of the base model; they win.

    roots: where folders that are added may lie. clock: seconds, for the age of listings only.
    Safe to call from several threads: a listing is replaced as a whole, as is what was added or hidden.
    """

    def __init__(
        self,
        root: Path | None,
        reserved_names: Collection[str],
        clock: Callable[[], float] = time.monotonic,
        roots: AdapterRoots | None = None,
    ) -> None:
        self._root = None if root is None else os.path.realpath(root)
        self._reserved = frozenset(reserved_names)
        self._reported: set[str] = set()
        self._looks = Looks()
        self._listing = DirectoryListing(self._root, self._reserved, self._is_inside, self._report, self._looks, clock)
        self._roots = roots if roots is not None else AdapterRoots(())
        self._lock = threading.Lock()  # for changes of the two below
        self._added: Mapping[str, str] = {}  # name → folder
        self._hidden: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """Names of all adapters, sorted. Whether they can be served shows when one is asked for.

        Folders that do not answer another thread are left out, or stay what they were. Raises TimeoutError if the
        directory itself does not.
        """
        is_due = self._listing.is_due
        listed = self._listing.names()
        if is_due:
            self._bring_back()
        return self._names(listed)

    def names_without_config(self) -> list[str]:
        """Folders that would be adapters if they had a config, as of the last listing; sorted."""
        return [name for name in self._listing.unfinished if name not in self._added]

    @property
    def is_listing_due(self) -> bool:
        """Whether `names` would look at the directory now."""
        return self._listing.is_due

    def last_names(self) -> list[str] | None:
        """`names` as of the last listing, without a look at the directory; None before the first."""
        listed = self._listing.last
        return None if listed is None else self._names(listed)

    def held_folders(self) -> frozenset[str]:
        """What does not answer somebody who looks at it now: folders, and the directory itself."""
        return self._looks.held()

    def resolve(self, name: str, visible: Callable[[str], bool] | None = None) -> AdapterRef:
        """The adapter of that name with its files' state as of now.

        visible: whether a name exists for who asks; None: all do. One that does not is not looked for.
        Raises ModelNotFound naming close matches, AdapterUnsupported if there are only pickled weights,
        AdapterInvalid if the weights are missing or not a regular file, TimeoutError if another thread looks at its
        files and gets no answer. No message tells a path of the server, nor those of refusals the name.
        """
        if visible is not None and not visible(name):
            raise self._not_found(name, visible)
        added = self._added.get(name)
        place = self._place(name) if added is None else added
        with self._looks.at(place):
            ref = self._listed_ref(name) if added is None else self._ref(name, added, self._roots.stat)
            is_folder = ref is None and added is None and self._is_folder(name)
        if ref is None:
            raise self._not_found(name, visible, why=f": its folder has no {CONFIG_NAME}" if is_folder else "")
        return ref

    def exists(self, name: str) -> bool:
        """Whether the name is taken, be it by an adapter that cannot be served or by the base model."""
        return name in self._reserved or name in self._added or self._listed_path(name) is not None

    def locate(self, name: str, path: str) -> AdapterRef:
        """The adapter in a folder (or packed file) below the roots, under a name that it might be added with.

        Raises InvalidRequest for a name that cannot be one or a path that leads elsewhere, ModelNotFound if there is no
        adapter, and what `resolve` raises.
        """
        self._check_not_base(name)
        if len(name) > MAX_NAME_LENGTH or not all(map(is_part, name.split("/"))):
            raise InvalidRequest(
                f"lora_name is {shorten(name, 100)!r}; a name has at most {MAX_NAME_LENGTH} printable characters, no "
                "backslash, and no part between slashes that is empty or begins with a dot.",
                param="lora_name",
            )
        folder = self._roots.locate(path)
        try:
            ref = self._ref(name, folder, self._roots.stat)
        except AdapterError as error:
            raise type(error)(f"Adapter {name!r}: {error.message}", param="lora_path") from None
        if ref is None:
            raise ModelNotFound(f"The folder at lora_path has no {CONFIG_NAME}.", param="lora_path")
        return ref

    def add(self, ref: AdapterRef) -> None:
        """Serve what `locate` found, in place of whatever has that name."""
        with self._lock:
            self._added = {**self._added, ref.name: ref.path}
            self._hidden -= {ref.name}

    def removable(self, name: str) -> tuple[str, bool]:
        """The folder of a name, and whether the directory has it.

        Raises ModelNotFound, or InvalidRequest for the base model.
        """
        self._check_not_base(name)
        listed = self._listed_path(name)
        folder = self._added.get(name, listed)
        if folder is None:
            raise self._not_found(name, None, param="lora_name")
        return folder, listed is not None

    def remove(self, name: str, is_listed: bool) -> None:
        """Serve nothing under that name any more, of which `removable` told this. No look at files."""
        with self._lock:
            self._added = {other: path for other, path in self._added.items() if other != name}
            if is_listed:
                self._hidden |= {name}

    def folder_of(self, name: str) -> str | None:
        """Where an adapter is, for who may know. None also if another thread looks there and gets no answer."""
        return self._added.get(name) or self._looks.look(self._place(name), lambda _: self._listed_path(name), None)

    def serves(self, folder: str) -> bool:
        """Whether there is a name for the adapter in this folder."""
        if folder in self._added.values():
            return True
        if self._root is None or not folder.startswith(f"{self._root}{os.sep}"):
            return False
        name = os.path.relpath(folder, self._root)
        names = {name, name.removesuffix(SUFFIX)} - self._added.keys()
        return any(self._listed_path(candidate) == folder for candidate in names)

    def _names(self, listed: tuple[str, ...]) -> list[str]:
        added, hidden = self._added, self._hidden
        if not added and not hidden:
            return list(listed)
        return sorted({*added, *(name for name in listed if name not in hidden)})

    def _check_not_base(self, name: str) -> None:
        if name in self._reserved:
            raise InvalidRequest(f"{name!r} is the base model's name.", param="lora_name")

    def _listed_path(self, name: str) -> str | None:
        """What in the directory has this name and was not hidden: a folder with a config, or a packed file."""
        folder = None if name in self._hidden else self._path(name)
        if folder is not None and self._is_file_inside(os.path.join(folder, CONFIG_NAME)):
            return folder
        packed = None if name in self._hidden else self._path(name, SUFFIX)
        return packed if packed is not None and self._is_file_inside(packed) else None

    def _listed_ref(self, name: str) -> AdapterRef | None:
        """The same as a ref; raises what `resolve` raises."""
        if name in self._hidden:
            return None
        for suffix in ("", SUFFIX):
            path = self._path(name, suffix)
            ref = None if path is None else self._ref(name, path, self._stat_inside)
            if ref is not None and ref.packed is bool(suffix):  # no file under its whole name, no folder under its stem
                return ref
        return None

    def _ref(self, name: str, folder: str, stat_of: Callable[[str], os.stat_result | None]) -> AdapterRef | None:
        """The adapter in a folder or packed file; None if there is none. stat_of: the state of a file that may be
        looked at."""
        if folder.endswith(SUFFIX):
            packed = stat_of(folder)
            if packed is not None and stat.S_ISREG(packed.st_mode):
                state = signature_of(packed)
                return AdapterRef(name=name, path=folder, config_signature=state, weights_signature=state, packed=True)
        config = stat_of(os.path.join(folder, CONFIG_NAME))
        if config is None or not stat.S_ISREG(config.st_mode):
            return None
        weights = stat_of(os.path.join(folder, WEIGHTS_NAME))
        if weights is None:
            raise _without_weights(folder)
        if not stat.S_ISREG(weights.st_mode):
            raise AdapterInvalid(f"{WEIGHTS_NAME} is not a regular file.", param="model")
        return AdapterRef(
            name=name, path=folder, config_signature=signature_of(config), weights_signature=signature_of(weights)
        )

    def _path(self, name: str, suffix: str = "") -> str | None:
        """Where what a name stands for is; None, without a look at the file system, for what cannot be a name."""
        if self._root is None or name in self._reserved or not is_name(name):
            return None
        parts = f"{name}{suffix}".split("/")
        for depth in range(1, len(parts) + 1):
            if not self._is_inside(os.path.join(self._root, *parts[:depth])):
                return None
        return os.path.join(self._root, *parts)

    def _place(self, name: str) -> str:
        """How a folder or packed file of the directory is called while somebody looks at it; no look itself."""
        return f"{self._root}/{name}"

    def _is_inside(self, path: str) -> bool:
        """Whether a path below the root exists and is no symbolic link to a place outside of it."""
        try:
            if not stat.S_ISLNK(os.lstat(path).st_mode):
                return True
        except OSError:
            return False
        if os.path.realpath(path).startswith(f"{self._root}{os.sep}"):
            return True
        self._report(path, "adapter folder %r holds a symbolic link that leaves the adapters' directory: ignored")
        return False

    def _stat_inside(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path) if self._is_inside(path) else None
        except OSError:
            return None

    def _bring_back(self) -> None:
        """Hidden folders that have gone are hidden no more."""
        if not self._hidden:
            return
        gone = {name for name in self._hidden if not self._looks.look(self._place(name), self._is_there, True)}
        with self._lock:  # not while looking: that may hang
            self._hidden -= gone

    def _is_there(self, place: str) -> bool:
        return os.path.isfile(os.path.join(place, CONFIG_NAME)) or os.path.isfile(f"{place}{SUFFIX}")

    def _is_folder(self, name: str) -> bool:
        """Whether a folder of the directory has this name and was not hidden, be there an adapter in it or not."""
        folder = None if name in self._hidden else self._path(name)
        return folder is not None and os.path.isdir(folder)

    def _is_file_inside(self, path: str) -> bool:
        status = self._stat_inside(path)
        return status is not None and stat.S_ISREG(status.st_mode)

    def _report(self, path: str, message: str) -> None:
        """Log a fault of a folder once."""
        if path not in self._reported:
            self._reported.add(path)
            _log.warning(message, os.path.relpath(path, self._root) if os.path.isabs(path) else path)

    def _names_to_hint_at(self) -> list[str]:
        """The last listing; one is made only by whoever finds none, and for no one else it is waited."""
        last = self.last_names()
        if last is None and not self._listing.is_busy:
            return self.names()
        return last or []

    def _not_found(
        self, name: str, visible: Callable[[str], bool] | None, *, param: str = "model", why: str = ""
    ) -> ModelNotFound:
        others = [other for other in self._names_to_hint_at() if other != name]  # the listing may still have this one
        matches = close_matches(name, tuple(others if visible is None else filter(visible, others)))
        hint = f" Did you mean {' or '.join(map(repr, matches))}?" if matches else ""
        return ModelNotFound(f"The model {shorten(name, 100)!r} does not exist{why}.{hint}", param=param)


def _without_weights(folder: str) -> AdapterUnsupported | AdapterInvalid:
    if any(os.path.lexists(os.path.join(folder, pickle)) for pickle in PICKLE_NAMES):
        return AdapterUnsupported(f"it has pickled weights only. {CONVERT_PICKLE}", param="model")
    return AdapterInvalid(
        f"it has no weights: {WEIGHTS_NAME} is missing. If it is still being written, try again.",
        param="model",
    )
