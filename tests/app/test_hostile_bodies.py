"""Bodies made to cost much cost little."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from app import output_text, streaming
from app.formats import CompletionFormat
from app.generation import fitting_ids
from app.messages import FunctionCall
from app.output_text import OutputText, Piece
from app.schemas import ChatRequest, CompletionRequest, parse
from app.tokenizer import LONG_TEXT, Tokenizer
from punica_core import protocol
from punica_core.errors import ContextLengthExceeded, InvalidRequest
from punica_core.protocol import FinishReason, LogprobTable, SequenceOutput, TokenLogprobs
from tests.app.conftest import BASE, MakeServer, events
from tests.support.tokenizer_folders import BYTE_LEVEL_VOCAB, byte_level_tokenizer, sentencepiece_tokenizer


@pytest.mark.parametrize("ok", [True, False])
def test_a_body_of_many_lists_is_read_without_collecting_garbage(ok: bool) -> None:
    collections: list[str] = []
    body = json.dumps({"model": BASE, "prompt": "a", "metadata": [[]] * 20_000, "n": 1 if ok else 0}).encode()

    def watch(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.collect()
    gc.callbacks.append(watch)
    try:
        with contextlib.nullcontext() if ok else pytest.raises(InvalidRequest):
            parse(CompletionRequest, body)
        during = len(collections)
    finally:
        gc.callbacks.remove(watch)
    assert during <= 2  # at most the one that was due when parsing had ended
    assert gc.isenabled()


_MANY = 20_000
_OBJECT = {f"k{index}": 1 for index in range(_MANY)}


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (CompletionRequest, _OBJECT),
        (CompletionRequest, {"metadata": _OBJECT}),
        (CompletionRequest, {"odd": [[]] * _MANY}),
        (CompletionRequest, {"logit_bias": _OBJECT}),
        (CompletionRequest, {"prompt": [{}] * _MANY}),
        (CompletionRequest, {"prompt": [[1]] * _MANY}),
        (CompletionRequest, {"prompt": [[{}] * 200] * 100}),
        (ChatRequest, {"messages": [{}] * _MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"} | _OBJECT]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * _MANY}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * _MANY}]}),
        (ChatRequest, {"chat_template_kwargs": _OBJECT}),
        (ChatRequest, {"tools": [[]] * _MANY}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_what_is_unknown_or_wrong_in_a_body_does_not_become_objects(kind: type[Any], field: dict[str, Any]) -> None:
    body = json.dumps({"model": BASE, "messages": [{"role": "user", "content": "a"}], "prompt": "a"} | field).encode()
    assert memory_of(lambda: json.loads(body)) > 6 * len(body)  # what a parser of everything makes of it

    def read() -> None:
        with contextlib.suppress(InvalidRequest):
            request = parse(kind, body)
            request.biases()
            request.prompts() if kind is CompletionRequest else request.template_variables()

    read()  # once for what is made once
    assert memory_of(read) < 3 * len(body)  # a copy or two of a part of it


def memory_of(work: Callable[[], object]) -> int:
    """Bytes in use at the worst moment of `work` beyond those before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


SENTENCEPIECE = Tokenizer(sentencepiece_tokenizer(), 400, {"bos_token": "<s>"}, None)


@pytest.mark.parametrize("text", ["lo world ", "x", "é" * 3 + " ", "\U0001f600"])
def test_a_text_that_cannot_fit_is_known_from_its_beginning(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Of a decoder of which nothing can be said beforehand."""
    looked_at = 0

    class Counting:
        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            nonlocal looked_at
            looked_at += sum(map(len, texts))
            return rust.encode_batch(texts, **options)

    rust, limit = SENTENCEPIECE._rust, 3000
    long = text * (1_000_000 // len(text))
    assert SENTENCEPIECE.fewest_tokens(long) == 0
    assert len(SENTENCEPIECE.encode(long, add_special_tokens=False)) > 4 * limit
    monkeypatch.setattr(SENTENCEPIECE, "_rust", Counting())
    assert SENTENCEPIECE.surely_exceeds(long, limit)
    assert looked_at < 100_000
    with pytest.raises(ContextLengthExceeded, match="at least 3001 tokens"):
        fitting_ids(long, SENTENCEPIECE, limit, "prompt", add_special_tokens=True)


@settings(max_examples=30, deadline=None)
@given(
    words=st.lists(st.sampled_from(["lo", "world", "é", "x" * 40, " "]), min_size=1, max_size=8),
    limit=st.integers(1, 4000),
)
def test_no_text_that_fits_is_refused_for_its_length(words: list[str], limit: int) -> None:
    text = " ".join(words * 5000)[:20_000]
    if SENTENCEPIECE.surely_exceeds(text, limit):
        assert len(SENTENCEPIECE.encode(text, add_special_tokens=False)) > limit


async def test_a_hopelessly_long_text_is_refused_without_being_tokenized(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[int] = []
    encode = Tokenizer.encode

    def counted(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenized.append(len(text))
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    async with make_server(max_model_len=40) as server:
        text = "x" * 1000  # the longest token has 13 bytes
        completion = await server.complete(prompt=text)
        chat = await server.chat(messages=[{"role": "user", "content": text}])
        hopeful = await server.complete(prompt="x" * 45)
    for response, field in ((completion, "prompt"), (chat, "messages"), (hopeful, "prompt")):
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert response.json()["error"]["param"] == field
    assert tokenized == [45]


@pytest.mark.parametrize("text", ["", "x", "<|endoftext|>" * 50, "é" * 50, "a\u0301" * 50, " " * 99])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_the_fewest_tokens_of_a_text_are_never_more_than_it_has(text: str, normalizer: Any) -> None:
    rust = byte_level_tokenizer()
    rust.normalizer = normalizer
    tokenizer = Tokenizer(rust, BYTE_LEVEL_VOCAB, {}, None)
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("long", [True, False])
@pytest.mark.parametrize("form", ["tool_calls", "function_call"])
async def test_long_arguments_of_calls_are_rendered_on_a_thread(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, form: str, long: bool
) -> None:
    rendered_by: list[threading.Thread] = []
    for_template = FunctionCall.for_template

    def watched(call: FunctionCall) -> dict[str, Any]:
        rendered_by.append(threading.current_thread())
        return for_template(call)

    monkeypatch.setattr(FunctionCall, "for_template", watched)
    call = {"name": "f", "arguments": json.dumps({"a": [[]] * (LONG_TEXT if long else 1)})}
    calls = {form: [{"function": call}] if form == "tool_calls" else call}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"} | calls]
    async with make_server() as server:
        answers = [
            await server.chat(messages=messages),
            await server.http.post("/tokenize", json={"messages": messages}),
        ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [thread is not threading.current_thread() for thread in rendered_by] == [long, long]


def test_many_ids_are_decoded_as_few_are() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), BYTE_LEVEL_VOCAB, {}, None)
    ids = [token % BYTE_LEVEL_VOCAB for token in range(LONG_TEXT + 1)]
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert whole == tokenizer._rust.decode(ids, skip_special_tokens=skip)
        assert len(whole) > LONG_TEXT // 2


def test_other_threads_run_while_many_ids_are_decoded() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), BYTE_LEVEL_VOCAB, {}, None)
    ids = [65] * 300_000

    def turns(decode: Callable[[], str]) -> int:
        """How often another thread had its turn meanwhile."""
        counts = [0, 0]
        done = threading.Event()

        def count() -> None:
            while not done.is_set():
                counts[0] += 1
                time.sleep(0)  # one turn at a time

        other = threading.Thread(target=count)
        other.start()
        try:
            before = counts[0]
            decode()
            counts[1] = counts[0] - before
        finally:
            done.set()
            other.join()
        return counts[1]

    held = turns(lambda: tokenizer._rust.decode(ids))
    assert turns(lambda: tokenizer.decode(ids)) > 10 * (held + 1)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("repeats", [2, 2000])
async def test_what_a_template_makes_of_little_is_handled_on_a_thread(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, model_dir: Path, route: str, repeats: int
) -> None:
    template = "{% for message in messages %}{{ date }}{{ message.content }}{% endfor %}"
    (model_dir / "chat_template.jinja").write_text(template)
    by: dict[str, threading.Thread] = {}
    for name in ("encode", "render_chat"):
        work = getattr(Tokenizer, name)

        def watched(*arguments: Any, name: str = name, work: Any = work, **options: Any) -> Any:
            by[name] = threading.current_thread()
            return work(*arguments, **options)

        monkeypatch.setattr(Tokenizer, name, watched)
    messages = [{"role": "user", "content": "a"}] * 10
    body = {"model": BASE, "messages": messages, "chat_template_kwargs": {"date": "x" * repeats}, "max_tokens": 1}
    async with make_server(max_model_len=100_000) as server:
        response = await server.http.post(route, json=body)
    assert response.status_code == 200
    here = threading.current_thread()
    assert [thread is not here for thread in by.values()] == [repeats == 2000] * 2


async def test_a_long_template_is_tokenized_on_a_thread(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, model_dir: Path
) -> None:
    (model_dir / "chat_template.jinja").write_text("be kind. " * 2000 + "{{ messages[0].content }}")
    threads: list[threading.Thread] = []
    encode = Tokenizer.encode

    def watched(*arguments: Any, **options: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(*arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    async with make_server(max_model_len=100_000) as server:
        assert (await server.chat()).status_code == 200
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("length", [2, 400])
@pytest.mark.parametrize(
    "asked", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}, {"echo": True, "logprobs": 2, "stream": True}]
)
async def test_many_logprobs_are_written_on_a_thread(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], length: int
) -> None:
    written_by: set[threading.Thread] = set()
    for name in ("whole", "chunks"):
        write = getattr(CompletionFormat, name)

        def watched(answer: CompletionFormat, *arguments: Any, write: Any = write) -> Iterator[bytes]:
            for part in write(answer, *arguments):
                written_by.add(threading.current_thread())
                yield part

        monkeypatch.setattr(CompletionFormat, name, watched)
    async with make_server() as server:
        response = await server.complete(prompt=[65] * length, max_tokens=1, **asked)
    assert response.status_code == 200
    assert response.text.count("-0.") >= length
    assert (threading.current_thread() not in written_by) is (length == 400)


def test_many_logprobs_are_received_as_few_objects() -> None:
    entries = [TokenLogprobs(1, -0.5, [(1000 + token, -0.1 * token) for token in range(20)]) for _ in range(2000)]
    table = LogprobTable.of(entries)
    frame = protocol.encode(protocol.Outputs([protocol.SequenceOutput(1, prompt_logprobs=table)]))
    assert memory_of(lambda: protocol.decode_event(frame[4:])) < 3 * len(frame) < 2000 * 21 * 8 * 4
    objects = msgspec.msgpack.encode(entries)
    assert memory_of(lambda: msgspec.msgpack.decode(objects, type=list[TokenLogprobs])) > 10 * len(frame)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("slice_tokens", [1024, 10**9])
async def test_others_have_their_turn_while_many_tokens_become_text(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, stream: bool, slice_tokens: int
) -> None:
    """All choices of a request end at once, or a slow client's tokens have gathered."""
    monkeypatch.setattr(output_text, "READ_TOKENS", slice_tokens)
    monkeypatch.setattr(streaming, "READ_TOKENS", slice_tokens)
    turns, read_at = 0, list[tuple[int, int]]()
    read = OutputText.read

    def watched(output: OutputText) -> Piece:
        before = output.completion_tokens
        piece = read(output)
        read_at.append((turns, output.completion_tokens - before))
        return piece

    monkeypatch.setattr(OutputText, "read", watched)
    ids = [65 + place % 26 for place in range(5000)]
    table = LogprobTable.of([TokenLogprobs(token, -0.5) for token in ids])
    async with make_server(auto=False, max_model_len=100_000) as server:
        asked = {"prompt": [[66], [67], [68]], "max_tokens": 5000, "logprobs": 0, "stream": stream}
        request = asyncio.create_task(server.complete(**asked))
        while not server.engine.running:
            await asyncio.sleep(0)
        outputs = [SequenceOutput(i, ids, FinishReason.LENGTH, table) for i in server.engine.running]
        server.engine.emit(protocol.Outputs(outputs))
        while not request.done():
            turns += 1
            await asyncio.sleep(0)
        text = server.service.tokenizer.decode(ids)
    if stream:
        chunks = [chunk["choices"][0] for chunk in events(request.result())]
        texts = ["".join(c["text"] for c in chunks if c["index"] == index) for index in range(3)]
        counts = [sum(len(c["logprobs"]["tokens"]) for c in chunks if c["index"] == index) for index in range(3)]
    else:
        choices = request.result().json()["choices"]
        texts, counts = [c["text"] for c in choices], [len(c["logprobs"]["tokens"]) for c in choices]
    assert (texts, counts) == ([text] * 3, [5000] * 3)
    in_one_turn = Counter[int]()
    for turn, count in read_at:
        in_one_turn[turn] += count
    assert sum(in_one_turn.values()) == 15_000
    assert (max(in_one_turn.values()) <= 2 * 1024) is (slice_tokens == 1024)
