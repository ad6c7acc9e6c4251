"""From token ids to text, piece by piece.

The joined pieces equal the decoding of all ids at once; a character that several tokens make up is never split, and
U+FFFD appears only where the bytes are no UTF-8 (or the output was cut inside a character).
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_MAX_HELD = 16
"""Undecodable ids in a row after which they are given out as they are; a character never needs that many."""


class Decode(Protocol):
    """Decodes ids at once; what the tokenizer does."""

    def __call__(self, ids: Sequence[int]) -> str: ...


class Detokenizer(Protocol):
    """One sequence's text so far."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these further ids complete; may be empty."""

    def flush(self) -> str:
        """What is still held back at the end of the sequence."""


class ByteDetokenizer:
    """For byte-level vocabularies: every token is a fixed string of bytes, so decoding is a table look-up.

    pieces: bytes of each token id; an id that is absent (skipped special token, unknown id) is no text.
    """

    __slots__ = ("_decoder", "_pieces")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        if len(ids) == 1:
            return self._decoder.decode(pieces[ids[0]])
        return self._decoder.decode(b"".join([pieces[token] for token in ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any other decoder (SentencePiece and its kind), where a token's text depends on its neighbours.

    Decodes a short window twice, without and with the new ids: the difference is the new text.
    context: ids before the first one (the end of the prompt), when the text continues that of the prompt.
    """

    __slots__ = ("_decode", "_given", "_ids", "_prefix", "_read")

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context)
        self._prefix = 0  # window start
        self._read = len(self._ids)  # ids before it are given out completely
        self._given = len(decode(self._ids)) if self._ids else 0  # characters of the window's text given out

    def push(self, ids: Sequence[int]) -> str:
        # One by one: several that end inside a character can pass the end of one before and still be held.
        return "".join(map(self._push, ids))

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids[self._prefix :])
        held = text.endswith(REPLACEMENT) and len(self._ids) - self._read <= _MAX_HELD
        if held:
            text = text.rstrip(REPLACEMENT)
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        if not held:
            self._advance()
        return piece

    def _advance(self) -> None:
        """Move the window, unless what would be left of it has no text: decoders strip a space from the very first."""
        known = self._decode(self._ids[self._read :])
        if known:
            self._prefix, self._given = self._read, len(known)
        self._read = len(self._ids)

    def flush(self) -> str:
        text = self._decode(self._ids[self._prefix :])
        piece = text[self._given :]
        self._given = len(text)
        return piece


class StopStrings:
    """Finds stop strings in a text that arrives in pieces, and holds back what may become one.

    Each character costs the same, whatever the stop strings are (Knuth, Morris and Pratt): of each of them it is known
    how much of it the text ends with.

    include: the stop string found is part of the output.
    """

    __slots__ = ("_held", "_include", "_matched", "_stops")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple((stop, _borders(stop)) for stop in stops)
        self._include = include
        self._matched = [0] * len(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """(text that may be given out, whether a stop string was found; then nothing follows)."""
        text = self._held + piece
        if self._advance(piece):
            self._held = ""
            at, stop = min((at, stop) for stop, _ in self._stops if (at := text.find(stop)) >= 0)
            return text[: at + len(stop)] if self._include else text[:at], True
        keep = max(self._matched)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _advance(self, piece: str) -> bool:
        """Follow the stop strings through further text. Returns whether one is complete."""
        for index, (stop, borders) in enumerate(self._stops):
            matched = self._matched[index]
            if not matched and stop[0] not in piece:
                continue
            for char in piece:
                while matched and stop[matched] != char:
                    matched = borders[matched - 1]
                matched += stop[matched] == char
                if matched == len(stop):
                    return True
            self._matched[index] = matched
        return False

    def flush(self) -> str:
        """What was held back: no stop string came of it."""
        text, self._held = self._held, ""
        return text


@functools.lru_cache(maxsize=256)
def _borders(text: str) -> tuple[int, ...]:
    """For each beginning of the text, how long the longest other beginning is that it ends with. Kept, since all
    choices of a request look for the same."""
    borders = [0] * len(text)
    length = 0
    for place in range(1, len(text)):
        while length and text[length] != text[place]:
            length = borders[length - 1]
        length += text[length] == text[place]
        borders[place] = length
    return tuple(borders)
