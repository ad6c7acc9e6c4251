"""How choices look in JSON: chat and completions, whole and as chunks of a stream.

A chunk with nothing but text, the usual one, is put together from bytes made once for each choice and the encoded text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from app import logprobs as shapes
from app.generation import Job
from app.json_parts import JsonParts
from app.output_text import OutputText, Piece
from app.tokenizer import Tokenizer
from punica_core.protocol import LogprobTable

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all chunks of a response share."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        """As the beginning of a response object."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def usage(job: Job, outputs: Sequence[OutputText]) -> dict[str, Any]:
    """Tokens of a request: each prompt counts once, however many choices it has."""
    prompt_tokens = sum(len(prompt.ids) for prompt in job.prompts)
    completion_tokens = sum(output.completion_tokens for output in outputs)
    cached = sum(outputs[index * job.n].stream.cached_tokens for index in range(len(job.prompts)))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Format(Protocol):
    """One request's answers. `pieces` are those of choice `index`, in order."""

    def begin(self, head: Head, *, usage_follows: bool) -> None:
        """Called once, when the first output is there and before any other method.

        usage_follows: chunks carry `"usage": null`, because the stream ends with a usage chunk.
        """

    def chunks(self, index: int, piece: Piece) -> Iterator[bytes]:
        """SSE events for a non-empty piece of a choice: many logprobs come in several."""

    def usage_chunk(self, job: Job, outputs: Sequence[OutputText]) -> bytes:
        """The SSE event that has usage and no choices."""

    def whole(self, job: Job, outputs: Sequence[OutputText], pieces: Sequence[Sequence[Piece]]) -> Iterator[bytes]:
        """The body of a response that is not streamed, part by part: many logprobs come in several."""


class _Chunks:
    """SSE events of one response. kind: the chunks' object name."""

    def __init__(self, head: Head, kind: str, *, usage_follows: bool) -> None:
        self._fields = head.fields(kind)
        self._prefix = b"data: " + _encode(self._fields)[:-1]
        self._end = b',"usage":null}\n\n' if usage_follows else b"}\n\n"

    def event(self, choice: dict[str, Any]) -> bytes:
        """An event with one choice."""
        return self._prefix + b',"choices":[' + _encode(choice) + b"]" + self._end

    def text_event_parts(self, choice: dict[str, Any], mark: str) -> tuple[bytes, bytes]:
        """What stands before and after the JSON text `mark` in an event with this choice."""
        before, _, after = self.event(choice).partition(_encode(mark))
        return before, after

    def usage_event(self, numbers: dict[str, Any]) -> bytes:
        """The event with usage and no choices."""
        return b"data: " + _encode(self._fields | {"choices": [], "usage": numbers}) + b"\n\n"


_MARK = "\ue000text\ue000"


class ChatFormat:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool, prompt_logprobs: int | None = None) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._with_logprobs = with_logprobs
        self._prompt_logprobs = prompt_logprobs
        self._parts: dict[int, tuple[bytes, bytes]] = {}

    def begin(self, head: Head, *, usage_follows: bool) -> None:
        self._head = head
        self._chunks = _Chunks(head, "chat.completion.chunk", usage_follows=usage_follows)

    def chunks(self, index: int, piece: Piece) -> Iterator[bytes]:
        if index not in self._parts:
            yield self._role_event(index)
        if piece.logprobs:
            text = piece.text
            for entries in self._entries([piece]):
                yield self._chunks.event(_delta(index, {"content": text}, {"content": entries, "refusal": None}))
                text = ""
        elif piece.text:
            before, after = self._parts[index]
            yield before + _encode(piece.text) + after
        if piece.finish_reason is not None:
            yield self._chunks.event(_delta(index, {}, None, piece.finish_reason))

    def _role_event(self, index: int) -> bytes:
        self._parts[index] = self._chunks.text_event_parts(_delta(index, {"content": _MARK}), _MARK)
        return self._chunks.event(_delta(index, {"role": "assistant", "content": ""}))

    def _entries(self, pieces: Sequence[Piece]) -> Iterator[list[dict[str, Any]]]:
        for table in shapes.sliced(piece.logprobs for piece in pieces):
            yield shapes.chat_entries(table, self._token_bytes)

    def usage_chunk(self, job: Job, outputs: Sequence[OutputText]) -> bytes:
        return self._chunks.usage_event(usage(job, outputs))

    def whole(self, job: Job, outputs: Sequence[OutputText], pieces: Sequence[Sequence[Piece]]) -> Iterator[bytes]:
        choices = []
        parts = JsonParts()
        for index, of_choice in enumerate(pieces):
            message = {"role": "assistant", "content": "".join(piece.text for piece in of_choice), "refusal": None}
            logprobs = None
            if self._with_logprobs:
                logprobs = {"content": parts.place(self._entries(of_choice)), "refusal": None}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": outputs[index].finish_reason,
                }
            )
        body = self._head.fields("chat.completion") | {"choices": choices, "usage": usage(job, outputs)}
        if self._prompt_logprobs is not None:
            scored = outputs[0].stream.prompt_logprobs or LogprobTable()
            body["prompt_logprobs"] = parts.place(
                shapes.prompt_entries(scored, self._prompt_logprobs, self._token_bytes)
            )
        return parts.of(body)


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class CompletionFormat:
    """`text_completion`, whole and as chunks; `echo` puts the prompt (and its logprobs) before each choice's text.

    outputs: the readers of the choices; an echo takes the prompt's logprobs from them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        job: Job,
        outputs: Sequence[OutputText],
        *,
        echo: bool,
        alternatives: int | None,
        prompt_logprobs: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._job = job
        self._echo = echo
        self._prompt_logprobs = prompt_logprobs
        self._alternatives = alternatives
        self._collectors: dict[int, shapes.CompletionLogprobs] = {}
        self._parts: dict[int, tuple[bytes, bytes]] = {}
        self._outputs = outputs

    def begin(self, head: Head, *, usage_follows: bool) -> None:
        self._head = head
        self._chunks = _Chunks(head, "text_completion", usage_follows=usage_follows)

    def chunks(self, index: int, piece: Piece) -> Iterator[bytes]:
        if index not in self._parts:
            yield from self._first_events(index)
        if piece.finish_reason is None and not piece.logprobs:
            before, after = self._parts[index]
            yield before + _encode(piece.text) + after
            return
        text, rest = piece.text, len(piece.logprobs) if self._alternatives is not None else 0
        for rows in shapes.output_rows([piece.logprobs]) if rest else ():
            rest -= len(rows.ids)
            lists = self._collector(index).lists(rows)
            yield self._chunks.event(_text_choice(index, text, lists, None if rest else piece.finish_reason))
            text = ""
        if self._alternatives is None or not piece.logprobs:
            yield self._chunks.event(_text_choice(index, text, None, piece.finish_reason))

    def _first_events(self, index: int) -> Iterator[bytes]:
        self._parts[index] = self._chunks.text_event_parts(_text_choice(index, _MARK), _MARK)
        if not self._echo:
            return
        text = self._prompt_text(index)
        for rows in self._prompt_rows(index):
            yield self._chunks.event(_text_choice(index, text, self._collector(index).lists(rows)))
            text = ""
        if self._alternatives is None:
            yield self._chunks.event(_text_choice(index, text))

    def _prompt_text(self, index: int) -> str:
        return self._job.prompts[index // self._job.n].text

    def _collector(self, index: int) -> shapes.CompletionLogprobs:
        found = self._collectors.get(index)
        if found is None:
            tokenizer, prompt = self._tokenizer, self._prompt_text(index)
            found = self._collectors[index] = shapes.CompletionLogprobs(
                tokenizer.token_bytes, self._alternatives or 0, tokenizer.is_special, prompt
            )
        return found

    def _prompt_rows(self, index: int) -> Iterator[shapes.Rows]:
        """Of an echoed prompt that was scored."""
        logprobs = self._scored(index)
        if self._alternatives is not None and logprobs is not None:
            yield from shapes.prompt_rows(self._job.prompts[index // self._job.n].ids, logprobs)

    def _scored(self, index: int) -> LogprobTable | None:
        """The logprobs of the prompt of sequence `index`: its own, or those of the prompt's first."""
        own = self._outputs[index].stream.prompt_logprobs
        return self._outputs[index - index % self._job.n].stream.prompt_logprobs if own is None else own

    def usage_chunk(self, job: Job, outputs: Sequence[OutputText]) -> bytes:
        return self._chunks.usage_event(usage(job, outputs))

    def whole(self, job: Job, outputs: Sequence[OutputText], pieces: Sequence[Sequence[Piece]]) -> Iterator[bytes]:
        parts = JsonParts()
        choices = [
            self._choice(place, index, outputs[index], pieces[index], parts)
            for place, index in enumerate(_given_back(job, outputs))
        ]
        return parts.of(self._head.fields("text_completion") | {"choices": choices, "usage": usage(job, outputs)})

    def _choice(
        self, place: int, index: int, output: OutputText, pieces: Sequence[Piece], parts: JsonParts
    ) -> dict[str, Any]:
        """Sequence `index` as choice `place`."""
        text = "".join(piece.text for piece in pieces)
        choice = _text_choice(
            place,
            self._prompt_text(index) + text if self._echo else text,
            self._lists(index, pieces, parts) if self._alternatives is not None else None,
            output.finish_reason,
        )
        if self._prompt_logprobs is not None:
            scored = self._scored(index) or LogprobTable()
            entries = shapes.prompt_entries(scored, self._prompt_logprobs, self._tokenizer.token_bytes)
            choice["prompt_logprobs"] = parts.place(entries)
        return choice

    def _lists(self, index: int, pieces: Sequence[Piece], parts: JsonParts) -> dict[str, Any]:
        def rows() -> Iterator[shapes.Rows]:
            if self._echo:
                yield from self._prompt_rows(index)
            yield from shapes.output_rows(piece.logprobs for piece in pieces)

        columns = self._collector(index).columns
        return {name: parts.place(map(values, rows())) for name, values in columns.items()}


def _given_back(job: Job, outputs: Sequence[OutputText]) -> list[int]:
    """The sequences that become choices, in order: of each prompt's candidates those with the highest mean logprob."""
    if job.choices == job.n:
        return list(range(len(outputs)))
    chosen: list[int] = []
    for start in range(0, len(outputs), job.n):
        ranked = sorted(range(start, start + job.n), key=lambda index: -outputs[index].mean_logprob)
        chosen += ranked[: job.choices]
    return chosen


def _text_choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
