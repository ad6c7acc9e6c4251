"""Request bodies as typed structs: what is known is validated, what is not is skipped without becoming objects.

msgspec reads a body once and stops at the first thing that is wrong; skipping costs some 5 ns a byte, so that the
largest body that may be sent holds the event loop for milliseconds, whatever it consists of. Types are strict: "0.5" is
no number.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from punica_core.errors import InvalidRequest

SMALL_BODY = 1 << 16
"""Bytes up to which all fields of a body are listed, so that unknown ones can be told: beyond, only known ones are."""
_PATH = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<key>key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHOWN_BYTES = 60
_NULL = b"null"

StructT = TypeVar("StructT", bound=msgspec.Struct)
ValueT = TypeVar("ValueT")


def parse(
    kind: type[StructT],
    body: bytes,
    *,
    refused: Mapping[str, tuple[Any, ...]] | None = None,
    ignored: frozenset[str] = frozenset(),
    on_unknown: Callable[[Sequence[str]], None] = lambda names: None,
) -> StructT:
    """Validate a request body. Raises InvalidRequest that names the field and shows no more than a little of it.

    refused: known fields that are not implemented, each with the values (besides null) that ask for nothing.
    ignored: fields that are accepted without effect. on_unknown: told the names of all others.
    """
    refused = refused or {}
    fields: Mapping[str, Raw] = {}
    try:
        with collector_paused():
            fields = _top_level(kind, tuple(refused), body)
            for name in fields.keys() & refused.keys():
                if not _asks_for_nothing(bytes(fields[name]), refused[name]):
                    raise InvalidRequest(f"{name} is not supported.", param=name)
            request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _as_invalid_request(str(error), fields) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {_reason(error, body)}.") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None
    if unknown := fields.keys() - _names(kind) - refused.keys() - ignored:
        on_unknown([name[:64] for name in fields if name in unknown])
    return request


def part(kind: Any, raw: Raw, field: str, *, max_bytes: int) -> Any:
    """Decode a field that was left as it came. Raises InvalidRequest."""
    text = bytes(raw)
    if len(text) > max_bytes:
        raise InvalidRequest(f"{field} has {len(text)} bytes of JSON; at most {max_bytes} are allowed.", param=field)
    try:
        with collector_paused():
            return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise _as_invalid_request(str(error), {field: raw}, inside=field) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{field}: {error}.", param=field) from None


def is_given(raw: Raw) -> bool:
    """Whether a field that was left as it came is there and not null."""
    return bytes(raw) not in (b"", _NULL)


def _top_level(kind: type[msgspec.Struct], further: tuple[str, ...], body: bytes) -> Mapping[str, Raw]:
    """The body's fields as they came: all of a small body's, the known ones of a large one."""
    if len(body) <= SMALL_BODY:
        return msgspec.json.decode(body, type=dict[str, Raw])
    known = msgspec.json.decode(body, type=_raw_fields(kind, further))
    return {name: raw for name, raw in msgspec.structs.asdict(known).items() if bytes(raw)}


@functools.cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)


@functools.cache
def _raw_fields(kind: type[msgspec.Struct], further: tuple[str, ...]) -> type[msgspec.Struct]:
    names = {*_names(kind), *further}
    return msgspec.defstruct("Fields", [(name, Raw, Raw(b"")) for name in sorted(names)])


def _asks_for_nothing(raw: bytes, harmless: tuple[Any, ...]) -> bool:
    if len(raw) > SMALL_BODY:
        return False
    return raw == _NULL or msgspec.json.decode(raw) in harmless


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Python's garbage collector looks again and again at the many new lists of a long body, none of which is garbage
    yet: that is three quarters of the time for which such a body holds the event loop."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _as_invalid_request(error: str, fields: Mapping[str, Raw], inside: str = "") -> InvalidRequest:
    found = _PATH.match(error)
    assert found is not None  # the pattern matches any text
    problem, path = found["problem"].rstrip("."), found["path"] or ""
    names = [inside] if inside else []
    names += [name for name in re.split(r"[.\[\]]+", path) if name]
    if missing := _MISSING.match(problem):
        names, problem = [*names, missing[1]], "this field is required"
    if not names:
        return InvalidRequest(f"The request body is wrong: {_readable(problem)}.")
    shown = ""
    if len(names) == 1 and names[0] in fields:
        given = bytes(fields[names[0]])
        if given != _NULL and len(given) <= _SHOWN_BYTES:
            shown = f" (got {given.decode(errors='replace')})"
    return InvalidRequest(f"{'.'.join(names)[:200]}: {_readable(problem)}{shown}.", param=names[0][:200])


def _readable(problem: str) -> str:
    problem = problem.replace("`", "")
    return problem[0].lower() + problem[1:] if problem.startswith(("Expected", "Object", "Invalid")) else problem


def _reason(error: msgspec.DecodeError, body: bytes) -> str:
    if _LONE_SURROGATE.search(body):
        if "truncated" in str(error):
            return "it is cut off, or has half of a surrogate pair"
        if "escape" in str(error):
            return str(error).removeprefix("JSON is malformed: ") + ", such as half of a surrogate pair"
    return str(error).removeprefix("JSON is malformed: ")
