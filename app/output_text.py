"""One sequence's tokens as text: detokenization, stop strings, stop tokens, and the end as OpenAI names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.detokenizer import Detokenizer, StopStrings
from app.flight import SequenceStream
from app.logprobs import clamp
from punica_core.errors import InternalError
from punica_core.protocol import FinishReason, LogprobTable

READ_TOKENS = 1024
"""Most that `read` turns into text at a time: a decoder of the SentencePiece kind takes 4 µs for each."""

_ENDS_OF_TEXT = (None, FinishReason.STOP, FinishReason.LENGTH)


_Tokens = tuple[list[int], LogprobTable, FinishReason | None]
"""Tokens with their logprobs, and how the sequence ended if they are its last."""


@dataclass(slots=True)
class Piece:
    """What a reader of a sequence may give out now. finish_reason: "stop" or "length" in the last piece."""

    text: str
    logprobs: LogprobTable = field(default_factory=LogprobTable)
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell a client."""
        return not (self.text or self.logprobs or self.finish_reason)


class OutputText:
    """Reads a SequenceStream. completion_tokens counts what was given out, stop tokens included.

    Without stop strings, tokens become text when they are read: a slow reader gets more at once. With stop strings they
    become text as they arrive, whether anybody reads or not, and a stop string that is found ends the sequence at once.
    Tokens that the engine generated beyond it (it learns of it by our cancel) are neither given out nor counted. Stop
    strings are looked for once min_tokens are there.

    include_stop: stop strings and stop tokens are part of the text. list_stop_token: the logprobs have an entry for the
    stop token also when the text has none of it.
    finish_reason: set when the end is known. is_read: the last piece was taken. has_more: many tokens were there, and
    the next call finds more of them.
    """

    __slots__ = (
        "_detokenizer",
        "_keep_stop_token",
        "_list_stop_token",
        "_logprob_sum",
        "_min_tokens",
        "_ready",
        "_rest",
        "_stops",
        "completion_tokens",
        "finish_reason",
        "is_read",
        "stream",
    )

    def __init__(
        self,
        stream: SequenceStream,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        list_stop_token: bool = False,
    ) -> None:
        self.stream = stream
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.is_read = False
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._keep_stop_token = include_stop
        self._list_stop_token = list_stop_token
        self._min_tokens = stream.request.sampling.min_tokens
        self._logprob_sum = 0.0
        self._ready = Piece("")
        self._rest: list[_Tokens] = []  # the last first
        if self._stops is not None:
            stream.on_arrival = self._look_for_stop

    @property
    def mean_logprob(self) -> float:
        """Of the tokens that count, a stop token included. Needs logprobs to have been asked for."""
        return self._logprob_sum / max(self.completion_tokens, 1)

    @property
    def has_more(self) -> bool:
        """Whether `read` left something."""
        return bool(self._rest)

    def read(self) -> Piece:
        """What arrived since the last call, or some of it. Raises the error that ended the sequence."""
        if self.is_read:
            return Piece("")
        if self.finish_reason is None and self.stream.error is not None:
            raise self.stream.error
        if self._stops is None:
            piece = self._taken()
        else:
            if self.finish_reason is None and self.stream.finish_reason is not None:
                self._end(self.stream.finish_reason)
            piece, self._ready = self._ready, Piece("")
        self.is_read = piece.finish_reason is not None
        return piece

    def _taken(self) -> Piece:
        token_ids, logprobs, ended = self._rest.pop() if self._rest else self._arrived()
        self.completion_tokens += len(token_ids)
        self._add(logprobs)
        if ended is None:
            return Piece(self._detokenizer.push(token_ids), logprobs)
        shown = self._shown(token_ids)
        text = self._detokenizer.push(shown) + self._detokenizer.flush()
        return Piece(text, self._listed(logprobs, shown), self._end(ended))

    def _arrived(self) -> _Tokens:
        """The first of what has arrived; `_rest` is the rest of it."""
        stream = self.stream
        token_ids, logprobs, ended = stream.take_tokens(), stream.take_logprobs(), stream.finish_reason
        if len(token_ids) <= READ_TOKENS:
            return token_ids, logprobs, ended
        for start in range(0, len(token_ids), READ_TOKENS):
            stop = start + READ_TOKENS
            is_last = stop >= len(token_ids)
            self._rest.append((token_ids[start:stop], logprobs.part(start, stop), ended if is_last else None))
        self._rest.reverse()
        return self._rest.pop()

    def _look_for_stop(self) -> bool:
        """Take what arrived. Returns whether it completed a stop string: then the sequence is over."""
        if self.finish_reason is not None or self.stream.finish_reason not in _ENDS_OF_TEXT:
            return False  # read() says what is wrong
        assert self._stops is not None
        found, ready = self._read_by_token(self._stops), self._ready
        ready.text += found.text
        ready.logprobs.extend(found.logprobs)
        ready.finish_reason = found.finish_reason
        return found.finish_reason is not None

    def _read_by_token(self, stops: StopStrings) -> Piece:
        """Token by token, so that the count ends with the token that completed a stop string."""
        texts: list[str] = []
        token_ids, logprobs = self.stream.take_tokens(), self.stream.take_logprobs()
        shown = self._shown(token_ids)
        for position, token_id in enumerate(shown):
            self.completion_tokens += 1
            text = self._detokenizer.push((token_id,))
            if self.completion_tokens <= self._min_tokens:
                texts.append(text)
                continue
            text, found = stops.push(text)
            texts.append(text)
            if found:
                self.finish_reason = "stop"
                logprobs = logprobs.part(0, position + 1)
                self._add(logprobs)
                return Piece("".join(texts), logprobs, "stop")
        self.completion_tokens += len(token_ids) - len(shown)
        self._add(logprobs)
        ended = self.stream.finish_reason
        if ended is None:
            return Piece("".join(texts), logprobs)
        text, found = stops.push(self._detokenizer.flush())
        texts += [text] if found else [text, stops.flush()]
        return Piece("".join(texts), self._listed(logprobs, shown), self._end(ended))

    def _add(self, logprobs: LogprobTable) -> None:
        if logprobs.token_ids:
            self._logprob_sum += sum(map(clamp, logprobs.own))

    def _shown(self, token_ids: list[int]) -> list[int]:
        """Without the stop token at the end, which is no part of the text unless asked for."""
        stream = self.stream
        by_token = stream.finish_reason is FinishReason.STOP and stream.stop_token_id is not None
        if by_token and token_ids and not self._keep_stop_token:
            return token_ids[:-1]
        return token_ids

    def _listed(self, logprobs: LogprobTable, shown: list[int]) -> LogprobTable:
        return logprobs if self._list_stop_token else logprobs.part(0, len(shown))

    def _end(self, reason: FinishReason) -> str:
        if reason not in _ENDS_OF_TEXT:
            raise InternalError(f"The engine ended the sequence with {reason.value!r}.")
        self.finish_reason = reason.value
        return self.finish_reason
