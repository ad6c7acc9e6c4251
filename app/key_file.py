"""A file of keys as it is written: its entries, or what is wrong with which of them.

No message repeats what may be a key: neither a value, nor a name that cannot be one, nor a field that is not a known
one's misspelling.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml

from app.settings import YAML_VALUE_ERRORS
from punica_core.errors import ConfigError

MAX_FILE_BYTES = 4 * 2**20
NAME = r"(?!pk-[A-Za-z0-9_-]{43}\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Names are public: what `punica keys new` makes cannot be one, so that a key in a name's place is shown to nobody."""
NAME_RULE = "1 to 64 letters, digits, '.', '_' and '-' are expected, and no key"

_PATH = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`\Z")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(\w*)")

_StructT = TypeVar("_StructT", bound=msgspec.Struct)
_Name = Annotated[str, msgspec.Meta(pattern=rf"^{NAME}\Z")]
_Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=10**9)]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key, with what its holder may do (see `app.keys.ApiKey`). key: a token, or `sha256:` and its hash."""

    name: _Name
    key: str
    adapters: list[_Pattern] | _Pattern = "*"
    base: bool = True
    metrics: bool = False
    admin: bool = False
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_concurrent: _Limit | None = None


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[list[Any], msgspec.Meta(min_length=1, max_length=10_000)]


def read_entries(file: Path) -> list[Entry]:
    """The entries of a YAML file. Raises ConfigError."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise wrong_file(f"Cannot read the keys in {file}: {error.strerror}.") from None
    if len(content) > MAX_FILE_BYTES:
        raise wrong_file(f"{file} has more than {MAX_FILE_BYTES} bytes.")
    found = _converted(file, _parse(file, content), _Document).keys
    return [_converted(file, entry, Entry, number) for number, entry in enumerate(found, 1)]


def entry_label(number: int, name: object) -> str:
    """How messages call the entry of that number, from 1 on."""
    is_name = isinstance(name, str) and re.fullmatch(NAME, name)
    return f"entry {number} ({name!r})" if is_name else f"entry {number}"


def wrong_file(message: str) -> ConfigError:
    return ConfigError(message, param="api_keys_file")


class _FieldTwice(yaml.MarkedYAMLError):
    """YAML forbids it; PyYAML takes the last, so that a second `keys:` would revoke all of the first."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """mark: where the value begins that was made last, or could not be."""

    mark: yaml.Mark | None = None

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        self.mark = node.start_mark
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen: set[str] = set()
        for name, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(name, yaml.ScalarNode):
                if name.value in seen:
                    raise _FieldTwice(problem_mark=name.start_mark)
                seen.add(name.value)
        return super().construct_mapping(node, deep)


def _parse(file: Path, content: bytes) -> Any:
    loader = None
    try:
        loader = _Loader(content)
        return loader.get_single_data()
    except yaml.YAMLError as error:
        what = "gives a field twice" if isinstance(error, _FieldTwice) else "is not valid YAML"
        raise wrong_file(f"{file} {what}{_place(getattr(error, 'problem_mark', None))}.") from None
    except YAML_VALUE_ERRORS:  # such as a date that does not exist, or `!!bool maybe`
        place = _place(loader.mark if loader is not None else None)
        raise wrong_file(f"{file} has a value that YAML cannot read{place}.") from None


def _place(mark: yaml.Mark | None) -> str:
    return f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""


def _converted(file: Path, found: Any, kind: type[_StructT], number: int | None = None) -> _StructT:
    """number: of an entry."""
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        field, complaint = _complaint(str(error), kind.__struct_fields__)
        places = [field] if field else []
        if number is not None:
            places.insert(0, entry_label(number, found.get("name") if isinstance(found, dict) else None))
        raise wrong_file(f"{file}: {', '.join(places)}{': ' if places else ''}{complaint}.") from None


def _complaint(error: str, known: tuple[str, ...]) -> tuple[str, str]:
    """The field of msgspec's error, if it has one, and what is wrong."""
    unknown = _UNKNOWN_FIELD.match(error)
    if unknown is not None:
        meant = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.7)
        if meant:
            return "", f"unknown field {unknown[1]!r} (did you mean {meant[0]!r}?)"
        return "", f"an unknown field; known ones are {', '.join(known)}"
    path = _PATH.search(error)
    if path is None:
        return "", error
    if path[1]:
        return "", "a field's name that is not text"
    what, field = error[: path.start()], path[2]
    return field, NAME_RULE if field == "name" and "regex" in what else what
