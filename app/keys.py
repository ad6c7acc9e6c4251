"""API keys: who a request comes from, and what that caller may do.

    store = KeyStore(single="", file=Path("keys.yaml"), enable_admin=False)
    key = store.find([b"Bearer pk-..."])      # raises InvalidApiKey

Of the keys themselves only digests are kept. A token is looked up by a digest that is keyed with a secret of this
process, so that the time of a look-up tells nothing about the tokens that exist; what is found is compared in constant
time. The file is read again when it has changed and on SIGHUP; one that is wrong changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path

from app.file_threads import FileThreads
from app.key_file import NAME, NAME_RULE, Entry, entry_label, read_entries, wrong_file
from punica_core.adapters.files import signature_of
from punica_core.errors import ConfigError, InvalidApiKey
from punica_core.protocol import FileSignature

log = logging.getLogger(__name__)

HASH_PREFIX = "sha256:"
SINGLE_NAME = "default"
"""Name of the key given by `api_key`."""
WATCH_SECONDS = 1.0
"""Between two looks at the state of the file."""
READ_SECONDS = 30.0
"""How long it takes the largest file, or one that does not answer, to be read."""

_BEARER = re.compile(rb"bearer +([\x21-\x7e]{1,4096}) *", re.IGNORECASE)
_TOKEN = re.compile(r"[\x21-\x7e]{8,512}")
_WILDCARD = re.compile(r"[*?\[]")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None: no limit. max_concurrent: of unfinished sequences (prompts times n)."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A caller. name: public; "" where no keys are configured.

    adapters: patterns of the adapters it may use (`*` stands for anything, slashes included). base: it may use the base
    model. metrics: it may read /metrics, which names all adapters and keys. admin: it may load and unload adapters.
    digest: of its token, by which a key is known again under another name.
    """

    name: str
    adapters: tuple[str, ...] = ("*",)
    base: bool = True
    metrics: bool = False
    admin: bool = False
    limits: KeyLimits = KeyLimits()
    digest: bytes = field(default=b"", repr=False, compare=False)
    _names: frozenset[str] = field(init=False, repr=False, compare=False)
    _wildcards: re.Pattern[str] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # a name is looked up, and all wildcards are one expression: a key may have a thousand, and there may be as many
        # adapters, all of which are looked at whenever it lists them
        wildcards = [pattern for pattern in self.adapters if _WILDCARD.search(pattern)]
        expression = re.compile("|".join(map(translate, wildcards))) if wildcards else None
        object.__setattr__(self, "_names", frozenset(self.adapters).difference(wildcards))
        object.__setattr__(self, "_wildcards", expression)

    @property
    def sees_all(self) -> bool:
        """Whether every adapter exists for this caller."""
        return "*" in self.adapters

    def may_use(self, adapter: str) -> bool:
        """Whether an adapter of that name exists for this caller. Depends on the name alone, not on what there is."""
        return adapter in self._names or (self._wildcards is not None and self._wildcards.match(adapter) is not None)


class KeyRing:
    """Keys by the SHA-256 digest of their token; immutable."""

    def __init__(self, keys: Iterable[tuple[bytes, ApiKey]]) -> None:
        self._secret = secrets.token_bytes(32)
        self._by_tag = {self._tag(digest): (digest, key) for digest, key in keys}

    @property
    def keys(self) -> list[ApiKey]:
        return [key for _, key in self._by_tag.values()]

    def __len__(self) -> int:
        return len(self._by_tag)

    def find(self, token: bytes) -> ApiKey | None:
        """The key of a token."""
        digest = hashlib.sha256(token).digest()
        stored, key = self._by_tag.get(self._tag(digest), (b"", None))
        return key if hmac.compare_digest(stored, digest) else None

    def _tag(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


class KeyStore:
    """The keys of a server as they are now. single: a token, or ""; file: see `read_keys`.

    enable_admin: callers without keys, or the single key, may load and unload adapters. on_change: told of the keys
    after every change.
    Raises ConfigError if the token or the file is wrong.
    """

    def __init__(
        self,
        single: str = "",
        file: Path | None = None,
        *,
        enable_admin: bool = False,
        on_change: Callable[[Sequence[ApiKey]], None] = lambda keys: None,
    ) -> None:
        self._file = file
        self._on_change = on_change
        self._single: list[tuple[bytes, ApiKey]] = []
        if single:
            digest = _token_digest(single, "api_key")
            self._single.append((digest, ApiKey(SINGLE_NAME, metrics=True, admin=enable_admin, digest=digest)))
        self._anybody = None if single or file else ApiKey("", metrics=True, admin=enable_admin)
        self._signature, self._ring = self._read()
        self._asked = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """No keys are configured: everybody may do what needs none."""
        return self._anybody is not None

    @property
    def count(self) -> int:
        """How many keys there are."""
        return len(self._ring)

    @property
    def keys(self) -> list[ApiKey]:
        """All keys, without their tokens."""
        return self._ring.keys

    def find(self, authorization: Sequence[bytes]) -> ApiKey:
        """The caller. authorization: values of the headers of that name. Raises InvalidApiKey."""
        if self._anybody is not None:
            return self._anybody
        if not authorization:
            raise InvalidApiKey("No API key was given; send it as `Authorization: Bearer KEY`.")
        bearer = _BEARER.fullmatch(authorization[0]) if len(authorization) == 1 else None
        key = self._ring.find(bearer[1]) if bearer else None
        if key is None:
            raise InvalidApiKey("The API key is not valid. It is sent as `Authorization: Bearer KEY`.")
        return key

    def ask_reload(self) -> None:
        """Have `watch` read the file now."""
        self._asked.set()

    async def watch(self) -> None:
        """Read the file again whenever it has changed, for ever. Returns at once without a file.

        While the file does not answer the keys stay as they are, and one thread waits for it.
        """
        if self._file is None:
            return
        threads, seen, asked, answers = FileThreads(READ_SECONDS, max_threads=1), self._signature, False, True
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._asked.wait(), WATCH_SECONDS)
                asked = asked or self._asked.is_set()
                self._asked.clear()
                try:
                    seen = await self._look(threads, self._file, seen, asked)
                except TimeoutError:
                    if answers:
                        log.error("The keys stay as they are: the file system of %s does not answer.", self._file)
                    answers = False
                else:
                    asked, answers = False, True
        finally:
            threads.stop()

    async def _look(
        self, threads: FileThreads, file: Path, seen: FileSignature | None, asked: bool
    ) -> FileSignature | None:
        """The file's state; it is read if it has changed, or if asked. seen: its state before. Raises TimeoutError."""
        now = await threads.run(lambda: _state(file), "state")
        # A file that changed since the last look may be half written: it is read once it has come to rest.
        if asked or (now == seen and now != self._signature):
            await self._reload(threads, now)
        return now

    async def _reload(self, threads: FileThreads, state: FileSignature | None) -> None:
        try:
            self._signature, ring = await threads.run(self._read, "read")
        except ConfigError as error:
            self._signature = state  # told once for each state of the file
            log.error("The keys stay as they are: %s", error.message)
            return
        before, after = {key.name for key in self.keys}, {key.name for key in ring.keys}
        self._ring = ring
        self._on_change(ring.keys)
        changes = [f"{what} {', '.join(names)}" for what, names in _changes(before, after) if names]
        log.info("Keys read again: %d in all%s.", len(ring.keys), "".join(f"; {change}" for change in changes))

    def _read(self) -> tuple[FileSignature | None, KeyRing]:
        if self._file is None:
            return None, KeyRing(self._single)
        state = _state(self._file)
        keys = [*self._single, *read_keys(self._file)]
        _check_distinct(keys, len(self._single), self._file)
        return state, KeyRing(keys)


def read_keys(file: Path) -> list[tuple[bytes, ApiKey]]:
    """The keys of a YAML file with their digests. Raises ConfigError, which repeats no token."""
    entries = read_entries(file)
    digests = [
        _digest(entry.key, f"{file}, {entry_label(number, entry.name)}") for number, entry in enumerate(entries, 1)
    ]
    return [(digest, _api_key(entry, digest)) for entry, digest in zip(entries, digests, strict=True)]


def _api_key(entry: Entry, digest: bytes) -> ApiKey:
    patterns = (entry.adapters,) if isinstance(entry.adapters, str) else tuple(entry.adapters)
    limits = KeyLimits(entry.requests_per_minute, entry.tokens_per_minute, entry.max_concurrent)
    metrics = entry.metrics or entry.admin
    return ApiKey(
        entry.name, patterns, base=entry.base, metrics=metrics, admin=entry.admin, limits=limits, digest=digest
    )


def _check_distinct(keys: Sequence[tuple[bytes, ApiKey]], num_single: int, file: Path) -> None:
    """num_single: of the first keys, which are not the file's."""
    names: dict[str, str] = {}
    owners: dict[bytes, str] = {}
    for number, (digest, key) in enumerate(keys, 1 - num_single):
        label = entry_label(number, key.name) if number > 0 else "the key given by api_key"
        if key.name in names:
            raise wrong_file(f"{file}: {label} has the name of {names[key.name]}.")
        if digest in owners:
            raise wrong_file(f"{file}: {label} has the same key as {owners[digest]}.")
        names[key.name] = owners[digest] = label


def hash_of(token: str) -> str:
    """What a file of keys may hold in place of the token. Raises ConfigError for what cannot be a token."""
    return HASH_PREFIX + _token_digest(token, "this cannot be a key").hex()


def check_name(name: str) -> None:
    """Raise ConfigError for what cannot be the name of a key."""
    if not re.fullmatch(NAME, name):
        raise ConfigError(f"{name!r} cannot be a key's name: {NAME_RULE}.")


def new_token() -> str:
    """A key that nobody can guess: 256 random bits."""
    return f"pk-{secrets.token_urlsafe(32)}"


def _digest(value: str, source: str) -> bytes:
    if not value.startswith(HASH_PREFIX):
        return _token_digest(value, source)
    digits = value.removeprefix(HASH_PREFIX).lower()
    if not _HASH.fullmatch(digits):
        raise ConfigError(f"{source}: after {HASH_PREFIX} 64 hexadecimal digits are expected (`punica keys hash`).")
    return bytes.fromhex(digits)


def _token_digest(token: str, source: str) -> bytes:
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"{source}: a key has 8 to 512 printable ASCII characters and no spaces; `punica keys new` makes one."
        )
    return hashlib.sha256(token.encode()).digest()


def _state(file: Path) -> FileSignature | None:
    try:
        return signature_of(file.stat())
    except OSError:
        return None


def _changes(before: set[str], after: set[str]) -> list[tuple[str, list[str]]]:
    return [("new:", sorted(after - before)), ("gone:", sorted(before - after))]
