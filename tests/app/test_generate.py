"""Generation over HTTP: what comes back, streamed and not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from punica_core.errors import AdapterInvalid, AdapterMismatch, WorkerLost
from punica_core.protocol import NewSequence
from tests.app.conftest import BASE, MakeServer, Server, events
from tests.support.tokenizer_folders import CHATML, IM_END, IM_START, byte_level_tokenizer, write_folder

TOKENIZER = byte_level_tokenizer()


def saying(text: str) -> Any:
    """A reply function: this text, then the end-of-sequence token."""
    return lambda sequence: TOKENIZER.encode(text).ids


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


async def test_chat_prompt_is_the_rendered_template_with_its_special_tokens_once(server: Server) -> None:
    await server.chat(messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": "hi"}])
    (sequence,) = server.engine.submissions[0]
    expected = "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(sequence.prompt_ids, skip_special_tokens=False) == expected
    assert sequence.prompt_ids.count(IM_START) == 3


async def test_chat_completions_and_ids_of_the_same_prompt_reach_the_engine_equally(server: Server) -> None:
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    await server.chat(messages=[{"role": "user", "content": "hi"}], model="sql")
    await server.complete(prompt=rendered, model="sql")
    await server.complete(prompt=TOKENIZER.encode(rendered).ids, model="sql")
    sequences = [sequence for message in server.engine.submissions for sequence in message]
    assert len({tuple(sequence.prompt_ids) for sequence in sequences}) == 1
    assert {sequence.adapter.name for sequence in sequences if sequence.adapter} == {"sql"}


async def test_chat_response_has_the_shape_of_the_sdk(make_server: MakeServer) -> None:
    async with make_server(reply=saying("Hi 😀!")) as server:
        response = await server.chat(max_tokens=50, model="sql")
    answer = ChatCompletion.model_validate(response.json(), strict=True)
    assert answer.choices[0].message.content == "Hi 😀!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "sql"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(TOKENIZER.encode("Hi 😀!").ids) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.endswith(":base:key-of-sql")


@pytest.mark.parametrize(("model", "end"), [("sql", ":base:key-of-sql"), (BASE, ":base")])
async def test_a_prompt_that_is_only_scored_tells_adapter_and_cached_tokens_too(
    server: Server, model: str, end: str
) -> None:
    response = await server.complete(model=model, prompt="hello", echo=True, logprobs=1, max_tokens=0)
    answer = response.json()
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert answer["system_fingerprint"].endswith(end)


async def test_chat_stream_joins_to_the_answer_that_is_not_streamed(make_server: MakeServer) -> None:
    async with make_server(reply=saying("Grüße 😀 日本")) as server:
        whole = (await server.chat(max_tokens=50)).json()
        chunks = events(await server.chat(max_tokens=50, stream=True))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert text_of(chunks) == whole["choices"][0]["message"]["content"] == "Grüße 😀 日本"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert all("finish_reason" in chunk["choices"][0] for chunk in chunks)
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("\ufffd" in str(chunk) for chunk in chunks)


async def test_no_chunk_is_without_choices_unless_usage_was_asked_for(server: Server) -> None:
    plain = events(await server.chat(stream=True))
    assert all(chunk["choices"] for chunk in plain)
    assert all("usage" not in chunk for chunk in plain)
    with_usage = events(await server.chat(stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in with_usage[:-1]] == [None] * (len(with_usage) - 1)
    assert with_usage[-1]["choices"] == []
    assert with_usage[-1]["usage"]["completion_tokens"] == 8


async def test_completion_has_the_shape_of_the_sdk(make_server: MakeServer) -> None:
    async with make_server(reply=saying(" there")) as server:
        response = await server.complete(max_tokens=50)
        chunks = events(await server.complete(max_tokens=50, stream=True))
    answer = Completion.model_validate(response.json(), strict=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" there", "stop")
    assert text_of(chunks) == " there"
    Completion.model_validate(chunks[-1], strict=True)  # the SDK's type knows no chunk without an end


async def test_every_prompt_has_n_choices_in_order(server: Server) -> None:
    response = await server.complete(prompt=["ab", "cd"], n=2, max_tokens=2)
    assert [(choice["index"], choice["text"]) for choice in response.json()["choices"]] == [
        (0, "ab"), (1, "ab"), (2, "cd"), (3, "cd"),
    ]  # fmt: skip
    assert response.json()["usage"]["prompt_tokens"] == 4
    chunks = events(await server.complete(prompt=["ab", "cd"], n=2, max_tokens=2, stream=True))
    assert [text_of(chunks, index) for index in range(4)] == ["ab", "ab", "cd", "cd"]


async def test_choices_of_a_seeded_request_have_seeds_of_their_own(server: Server) -> None:
    await server.chat(n=3, seed=2**63 - 1)
    seeds = [sequence.sampling.seed for sequence in server.engine.submissions[0]]
    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1]


async def test_stop_string_ends_the_text_and_cancels_the_rest(make_server: MakeServer) -> None:
    async with make_server(reply=saying("one END two"), auto=False) as server:
        request = asyncio.create_task(server.chat(stop="END", max_tokens=50))
        while not server.engine.submissions:
            await asyncio.sleep(0)
        for _ in range(7):
            server.engine.step()
        response = await request
        for _ in range(3):
            await asyncio.sleep(0)
        assert server.engine.cancelled == [1]
        assert server.service.batcher.in_flight == 0
    answer = response.json()
    assert answer["choices"][0]["message"]["content"] == "one "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 7


async def test_tokens_beyond_a_stop_string_are_neither_sent_nor_counted(make_server: MakeServer) -> None:
    async with make_server(reply=saying("one END two"), auto=False) as server:
        request = asyncio.create_task(server.chat(stop=["END"], max_tokens=50, logprobs=True))
        while not server.engine.submissions:
            await asyncio.sleep(0)
        for _ in range(12):  # all in one turn of the reader
            server.engine.step()
        answer = (await request).json()
    assert answer["usage"]["completion_tokens"] == 7
    assert len(answer["choices"][0]["logprobs"]["content"]) == 7


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_never_leaks_and_held_text_is_flushed(make_server: MakeServer, stream: bool) -> None:
    async with make_server(reply=saying("a<b</sto")) as server:
        response = await server.chat(stop=["</stop>"], max_tokens=50, stream=stream)
    text = text_of(events(response)) if stream else response.json()["choices"][0]["message"]["content"]
    assert text == "a<b</sto"


async def test_stop_string_may_be_part_of_the_output(make_server: MakeServer) -> None:
    async with make_server(reply=saying("one END two")) as server:
        response = await server.complete(stop="END", max_tokens=50, include_stop_str_in_output=True)
    assert response.json()["choices"][0]["text"] == "one END"


async def test_min_tokens_outlast_a_stop_string(make_server: MakeServer) -> None:
    async with make_server(reply=saying("x.y.z.")) as server:
        response = await server.complete(stop=".", max_tokens=50, min_tokens=3)
    assert response.json()["choices"][0]["text"] == "x.y"


async def test_a_stop_token_that_is_text_is_not_shown(make_server: MakeServer) -> None:
    (letter,) = TOKENIZER.encode("x").ids
    async with make_server(reply=saying("ab"), stop_token_id=letter) as server:
        shown = await server.complete(max_tokens=50, stop_token_ids=[letter])
        included = await server.complete(max_tokens=50, stop_token_ids=[letter], include_stop_str_in_output=True)
    assert shown.json()["choices"][0]["text"] == "ab"
    assert included.json()["choices"][0]["text"] == "abx"


async def test_chat_logprobs_have_text_bytes_and_alternatives(make_server: MakeServer) -> None:
    async with make_server(reply=saying("é")) as server:
        whole = (await server.chat(max_tokens=2, logprobs=True, top_logprobs=2)).json()
        chunks = events(await server.chat(max_tokens=2, logprobs=True, top_logprobs=2, stream=True))
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert [entry["top_logprobs"][0]["logprob"] for entry in content] == [entry["logprob"] for entry in content]
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == content


async def test_without_logprobs_there_are_none(server: Server) -> None:
    assert (await server.chat()).json()["choices"][0]["logprobs"] is None
    assert (await server.complete()).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(("max_tokens", "generated"), [(0, 0), (1, 1)])
async def test_echo_with_logprobs_covers_prompt_and_output(server: Server, max_tokens: int, generated: int) -> None:
    response = await server.complete(prompt="hey", echo=True, logprobs=1, max_tokens=max_tokens)
    (choice,) = response.json()["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "heyh"[: 3 + generated]
    assert logprobs["tokens"] == list("heyh")[: 3 + generated]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][:2] == [None, {"e": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3][: 3 + generated]


async def test_echo_streams_the_prompt_first(server: Server) -> None:
    chunks = events(await server.complete(prompt="hey", echo=True, max_tokens=2, stream=True))
    assert chunks[0]["choices"][0]["text"] == "hey"
    assert text_of(chunks) == "heyhe"


@pytest.mark.parametrize(
    "given", [{"max_tokens": 600}, {"max_completion_tokens": 600}, {"max_tokens": 2, "max_completion_tokens": 600}]
)
async def test_too_many_tokens_are_the_fault_of_the_field_that_asks_for_them(
    server: Server, given: dict[str, int]
) -> None:
    response = await server.chat(**{"max_tokens": None} | given)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", list(given)[-1])


async def test_max_completion_tokens_is_honoured(server: Server) -> None:
    response = await server.chat(max_tokens=None, max_completion_tokens=3)
    assert response.json()["usage"]["completion_tokens"] == 3


async def test_default_length_of_a_chat_is_what_fits(make_server: MakeServer) -> None:
    async with make_server(max_model_len=40) as server:
        response = await server.chat(max_tokens=None)
        usage = response.json()["usage"]
    assert usage["total_tokens"] == 40


async def test_the_final_message_can_be_continued(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Dear"}]
    await server.chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    (sequence,) = server.engine.submissions[0]
    text = TOKENIZER.decode(sequence.prompt_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nDear")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_adapter_is_a_status_also_for_a_stream(make_server: MakeServer, stream: bool) -> None:
    async with make_server(reply=lambda sequence: AdapterMismatch("shapes differ")) as server:
        response = await server.chat(model="sql", stream=stream)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "shapes differ", "type": "invalid_request_error", "param": "model", "code": "adapter_mismatch",
    }  # fmt: skip


async def test_one_refused_request_does_not_touch_the_others(make_server: MakeServer) -> None:
    def reply(sequence: NewSequence) -> Any:
        return AdapterInvalid("damaged") if sequence.adapter else TOKENIZER.encode("fine").ids

    async with make_server(reply=reply) as server:
        answers = await asyncio.gather(*(server.chat(model=("sql", BASE)[index % 2]) for index in range(10)))
    assert [answer.status_code for answer in answers] == [400, 200] * 5
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers[1::2]} == {"fine"}


async def test_losing_the_worker_ends_a_running_stream_with_an_error_event(make_server: MakeServer) -> None:
    async with make_server(auto=False) as server:
        request = asyncio.create_task(server.chat(stream=True))
        while not server.engine.submissions:
            await asyncio.sleep(0)
        server.engine.step()
        await asyncio.sleep(0.01)
        server.engine.lose()
        chunks = events(await request)
    assert chunks[-1]["error"]["code"] == WorkerLost.code
    assert "killed by signal 9" in chunks[-1]["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_losing_the_worker_before_the_first_token_is_a_503(make_server: MakeServer, stream: bool) -> None:
    async with make_server(auto=False) as server:
        request = asyncio.create_task(server.chat(stream=stream))
        while not server.engine.submissions:
            await asyncio.sleep(0)
        server.engine.lose()
        response = await request
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_lost"
    assert int(response.headers["retry-after"]) >= 1


async def test_a_base_without_a_template_says_so_and_still_completes(make_server: MakeServer, tmp_path: Any) -> None:
    folder = write_folder(tmp_path / "plain", byte_level_tokenizer(), template=None)
    async with make_server(settings={"model": str(folder), "served_model_name": BASE}, model_dir=str(folder)) as server:
        chat, completion = await server.chat(), await server.complete()
    assert chat.status_code == 400
    assert "no chat template" in chat.json()["error"]["message"]
    assert completion.status_code == 200


async def test_a_template_that_refuses_the_messages_is_a_400(make_server: MakeServer, tmp_path: Any) -> None:
    template = "{{ raise_exception('roles must alternate') }}" + CHATML
    folder = write_folder(tmp_path / "strict", byte_level_tokenizer(), template=template)
    async with make_server(settings={"model": str(folder), "served_model_name": BASE}, model_dir=str(folder)) as server:
        response = await server.chat()
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]


async def test_special_tokens_are_shown_on_request(make_server: MakeServer) -> None:
    async with make_server(reply=lambda sequence: [IM_START, *TOKENIZER.encode("a").ids, IM_END, IM_END]) as server:
        hidden = await server.complete(max_tokens=4)
        shown = await server.complete(max_tokens=4, skip_special_tokens=False)
    assert hidden.json()["choices"][0]["text"] == "a"
    assert shown.json()["choices"][0]["text"] == "<|im_start|>a<|im_end|><|im_end|>"


async def test_64_requests_over_http_arrive_as_few_messages_of_mixed_adapters(server: Server) -> None:
    names = [BASE, "sql", "pirate", "sql"]
    for name in names:  # an adapter's files are first looked at by a thread, later in place
        await server.complete(model=name)
    server.engine.submissions.clear()
    await asyncio.gather(*(server.complete(model=names[index % 4]) for index in range(64)))
    assert [len(message) for message in server.engine.submissions] == [64]
