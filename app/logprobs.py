"""Log-probabilities in OpenAI's two shapes: a list of entries (chat), parallel lists (completions)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from punica_core.protocol import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

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


def chat_entries(logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """The `content` list of a chat choice's logprobs."""
    return [
        _chat_entry(entry.token_id, entry.logprob, token_bytes)
        | {"top_logprobs": [_chat_entry(token, logprob, token_bytes) for token, logprob in entry.top]}
        for entry in logprobs
    ]


def _chat_entry(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    piece = token_bytes(token_id)
    return {"token": piece.decode(errors="replace"), "logprob": clamp(logprob), "bytes": list(piece)}


def prompt_entries(
    logprobs: Sequence[TokenLogprobs | None], alternatives: int, token_bytes: TokenBytes
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM has it: for each position token id → logprob, rank and text; None for the first.

    rank: place among the alternatives, from 1; null for a token that is not one of them.
    """
    return [None if entry is None else _prompt_entry(entry, alternatives, token_bytes) for entry in logprobs]


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


class CompletionLogprobs:
    """Collects one choice's parallel lists; offsets count characters of the choice's text."""

    def __init__(self, token_bytes: TokenBytes, alternatives: int) -> None:
        self._token_bytes = token_bytes
        self._alternatives = alternatives
        self._offset = 0

    def lists(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """tokens, token_logprobs, top_logprobs and text_offset of further output tokens."""
        result = _empty()
        for entry in logprobs:
            piece = self._token_bytes(entry.token_id)
            self._append(result, piece, clamp(entry.logprob), self._alternatives_of(entry, piece))
        return result

    def prompt_lists(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], is_special: Callable[[int], bool], text: str
    ) -> dict[str, Any]:
        """The same for an echoed prompt; the first token has no logprob. Special tokens that were added to the text
        (BOS) have no characters in it."""
        result = _empty()
        for token_id, entry in zip(ids, logprobs, strict=True):
            piece = self._token_bytes(token_id)
            shown = not (is_special(token_id) and not text.startswith(piece.decode(errors="replace"), self._offset))
            alternatives = None if entry is None else self._alternatives_of(entry, piece)
            self._append(result, piece, None if entry is None else clamp(entry.logprob), alternatives, shown=shown)
        return result

    def _alternatives_of(self, entry: TokenLogprobs, piece: bytes) -> dict[str, float] | None:
        if not self._alternatives:
            return None
        top = entry.top[: self._alternatives]  # prompt_logprobs may have asked for more
        found = {token_text(self._token_bytes(token)): clamp(logprob) for token, logprob in top}
        found.setdefault(token_text(piece), clamp(entry.logprob))
        return found

    def _append(
        self,
        result: dict[str, Any],
        piece: bytes,
        logprob: float | None,
        alternatives: dict[str, float] | None,
        *,
        shown: bool = True,
    ) -> None:
        result["tokens"].append(token_text(piece))
        result["token_logprobs"].append(logprob)
        result["top_logprobs"].append(alternatives)
        result["text_offset"].append(self._offset)
        if shown:
            self._offset += len(piece.decode(errors="replace"))


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several results of `lists` as one."""
    result = _empty()
    for part in parts:
        for name, values in result.items():
            values += part[name]
    return result
