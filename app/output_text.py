"""One sequence's tokens as text: detokenization, stop strings, stop tokens, and the end as OpenAI names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.batcher import SequenceStream
from app.detokenizer import Detokenizer, StopStrings
from punica_core.errors import InternalError
from punica_core.protocol import FinishReason, TokenLogprobs


@dataclass(slots=True)
class Piece:
    """What a reader of a sequence may give out now. finish_reason: "stop" or "length" in the last piece."""

    text: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell a client."""
        return not (self.text or self.logprobs or self.finish_reason)


class OutputText:
    """Reads a SequenceStream. completion_tokens counts what was given out, stop tokens included.

    Tokens that the engine generated beyond a stop string (it learns of it by our cancel) are neither given out nor
    counted. Stop strings are looked for once min_tokens are there.
    """

    __slots__ = (
        "_detokenizer",
        "_keep_stop_token",
        "_min_tokens",
        "_stops",
        "completion_tokens",
        "finish_reason",
        "stream",
    )

    def __init__(
        self,
        stream: SequenceStream,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self.stream = stream
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._keep_stop_token = include_stop
        self._min_tokens = stream.request.sampling.min_tokens

    def read(self) -> Piece:
        """What arrived since the last call. Raises the error that ended the sequence."""
        stream = self.stream
        if self.finish_reason is not None:
            return Piece("")
        if stream.error is not None:
            raise stream.error
        token_ids, logprobs = stream.take_tokens(), stream.take_logprobs()
        ended = stream.finish_reason
        if self._stops is not None:
            return self._read_by_token(token_ids, logprobs, self._stops)
        self.completion_tokens += len(token_ids)
        if ended is None:
            return Piece(self._detokenizer.push(token_ids), logprobs)
        shown = self._shown(token_ids)
        text = self._detokenizer.push(shown) + self._detokenizer.flush()
        return Piece(text, logprobs[: len(shown)], self._end(ended))

    def _read_by_token(self, token_ids: list[int], logprobs: list[TokenLogprobs], stops: StopStrings) -> Piece:
        """Token by token, so that the count ends with the token that completed a stop string."""
        texts: list[str] = []
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
                return Piece("".join(texts), logprobs[: position + 1], "stop")
        self.completion_tokens += len(token_ids) - len(shown)
        ended = self.stream.finish_reason
        if ended is None:
            return Piece("".join(texts), logprobs)
        text, found = stops.push(self._detokenizer.flush())
        texts += [text] if found else [text, stops.flush()]
        return Piece("".join(texts), logprobs[: len(shown)], self._end(ended))

    def _shown(self, token_ids: list[int]) -> list[int]:
        """Without the stop token at the end, which is no part of the text unless asked for."""
        stream = self.stream
        by_token = stream.finish_reason is FinishReason.STOP and stream.stop_token_id is not None
        if by_token and token_ids and not self._keep_stop_token:
            return token_ids[:-1]
        return token_ids

    def _end(self, reason: FinishReason) -> str:
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise InternalError(f"The engine ended the sequence with {reason.value!r}.")
        self.finish_reason = reason.value
        return self.finish_reason
