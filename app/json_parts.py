"""JSON that is too large to be put together at once: long lists come part by part, at the places kept for them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

_encode = msgspec.json.encode


class JsonParts:
    """A document with places for lists that are made when they are written.

    parts = JsonParts()
    document = {"values": parts.place(slices)}
    for piece in parts.of(document): ...
    """

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)  # nobody's text can have it
        self._fillings: list[Iterable[Sequence[Any]]] = []

    def place(self, slices: Iterable[Sequence[Any]]) -> str:
        """What stands in the document for the list that `slices` make up, one behind the other. Places are filled in
        the order in which they were made, which must be that of the document."""
        self._fillings.append(slices)
        return self._secret

    def of(self, document: Any) -> Iterator[bytes]:
        """The document's JSON."""
        first, *rest = _encode(document).split(_encode(self._secret))
        assert len(rest) == len(self._fillings)
        yield first
        for slices, text in zip(self._fillings, rest, strict=True):
            yield from _list_parts(slices)
            yield text


def _list_parts(slices: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    separator = b"["
    for items in slices:
        if items:
            yield separator + _encode(items)[1:-1]
            separator = b","
    yield b"[]" if separator == b"[" else b"]"
