"""Log-probabilities in OpenAI's two shapes: a list of entries (chat), parallel lists (completions)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from punica_core.protocol import LogprobTable, TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

SLICE_VALUES = 4096
"""Logprobs that are Python objects at a time while an answer is written: some 2 MB."""

TokenBytes = Callable[[int], bytes]


def clamp(logprob: float) -> float:
    """A logprob as JSON can say it."""
    return logprob if logprob > LOWEST and math.isfinite(logprob) else LOWEST


def token_text(piece: bytes) -> str:
    """One token's bytes as text; what is not UTF-8 by itself reads `bytes:\\xf0\\x9f`, so that tokens stay distinct."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def sliced(tables: Iterable[LogprobTable]) -> Iterator[LogprobTable]:
    """The rows of tables in small tables, so that few of them are objects at a time."""
    for table in tables:
        count = max(1, SLICE_VALUES // table.width)
        if len(table) <= count:
            if table.token_ids:
                yield table
            continue
        for start in range(0, len(table), count):
            yield table.part(start, start + count)


def chat_entries(logprobs: Iterable[TokenLogprobs], token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """Of the `content` list of a chat choice's logprobs."""
    return [
        _chat_entry(entry.token_id, entry.logprob, token_bytes)
        | {"top_logprobs": [_chat_entry(token, logprob, token_bytes) for token, logprob in entry.top]}
        for entry in logprobs
    ]


def _chat_entry(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    piece = token_bytes(token_id)
    return {"token": piece.decode(errors="replace"), "logprob": clamp(logprob), "bytes": list(piece)}


def prompt_entries(
    logprobs: LogprobTable, alternatives: int, token_bytes: TokenBytes
) -> Iterator[list[dict[str, Any] | None]]:
    """`prompt_logprobs` as vLLM has it, in slices: for each position token id → logprob, rank and text; None for the
    first.

    rank: place among the alternatives, from 1; null for a token that is not one of them.
    """
    yield [None]
    for rows in sliced([logprobs]):
        yield [_prompt_entry(entry, alternatives, token_bytes) for entry in rows]


def _prompt_entry(entry: TokenLogprobs, alternatives: int, token_bytes: TokenBytes) -> dict[str, Any]:
    ranks: dict[int, int] = {}
    shown = {entry.token_id: entry.logprob}
    for rank, (token, logprob) in enumerate(entry.top, 1):
        ranks[token] = rank
        if rank <= alternatives:
            shown.setdefault(token, logprob)
    return {
        str(token): {
            "logprob": clamp(logprob),
            "rank": ranks.get(token),
            "decoded_token": token_bytes(token).decode(errors="replace"),
        }
        for token, logprob in shown.items()
    }


class Rows(NamedTuple):
    """Some tokens of a completion's choice. entries: None for the very first token of a prompt, which has none."""

    ids: Sequence[int]
    entries: Sequence[TokenLogprobs | None]
    of_prompt: bool = False


def output_rows(tables: Iterable[LogprobTable]) -> Iterator[Rows]:
    """Generated tokens, a few at a time."""
    for table in sliced(tables):
        entries = list(table)
        yield Rows([entry.token_id for entry in entries], entries)


def prompt_rows(ids: Sequence[int], logprobs: LogprobTable) -> Iterator[Rows]:
    """The prompt's tokens, a few at a time."""
    yield Rows(ids[:1], [None], of_prompt=True)
    done = 1
    for table in sliced([logprobs]):
        yield Rows(ids[done : done + len(table)], list(table), of_prompt=True)
        done += len(table)


class CompletionLogprobs:
    """One choice's parallel lists, part by part in order; offsets count characters of the choice's text.

    alternatives: how many to show of those that there are. prompt: the text of an echoed prompt; special tokens that
    were added to it (BOS) have no characters in it.
    """

    def __init__(
        self, token_bytes: TokenBytes, alternatives: int, is_special: Callable[[int], bool], prompt: str
    ) -> None:
        self._token_bytes = token_bytes
        self._alternatives = alternatives
        self._is_special = is_special
        self._prompt = prompt
        self._offset = 0
        self.columns: dict[str, Callable[[Rows], list[Any]]] = {
            "tokens": lambda rows: [token_text(self._token_bytes(token_id)) for token_id in rows.ids],
            "token_logprobs": lambda rows: [entry and clamp(entry.logprob) for entry in rows.entries],
            "top_logprobs": lambda rows: [entry and self._alternatives_of(entry) for entry in rows.entries],
            "text_offset": self._offsets,
        }
        """What makes each of the lists, by its name."""

    def lists(self, rows: Rows) -> dict[str, list[Any]]:
        """The lists of these tokens, which follow those of the last call."""
        return {name: values(rows) for name, values in self.columns.items()}

    def _offsets(self, rows: Rows) -> list[int]:
        """Where the next tokens begin. Moves on."""
        found = []
        for token_id in rows.ids:
            found.append(self._offset)
            text = self._token_bytes(token_id).decode(errors="replace")
            was_added = rows.of_prompt and self._is_special(token_id) and not self._prompt.startswith(text, found[-1])
            self._offset += 0 if was_added else len(text)
        return found

    def _alternatives_of(self, entry: TokenLogprobs) -> dict[str, float] | None:
        if not self._alternatives:
            return None
        top = entry.top[: self._alternatives]  # prompt_logprobs may have asked for more
        found = {token_text(self._token_bytes(token)): clamp(logprob) for token, logprob in top}
        found.setdefault(token_text(self._token_bytes(entry.token_id)), clamp(entry.logprob))
        return found
