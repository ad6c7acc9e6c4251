"""What servers like this offer beyond OpenAI's API, and `best_of`: prompt logprobs, tokenization, chat templates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app import responses
from punica_core.errors import ConfigError
from punica_core.protocol import NewSequence
from tests.app.conftest import BASE, MakeServer, Server
from tests.support.tokenizer_folders import byte_level_tokenizer, write_folder

TOKENIZER = byte_level_tokenizer()
SHOUT = "{% for m in messages %}!{{ m['content'] }}{% endfor %}"


def prompt_of(server: Server) -> str:
    """The last prompt that reached the engine, as text."""
    return TOKENIZER.decode(server.engine.submissions[-1][-1].prompt_ids, skip_special_tokens=False)


async def test_prompt_logprobs_have_vllms_shape(server: Server) -> None:
    completion = await server.complete(prompt=["hey", "ab"], prompt_logprobs=2, max_tokens=1)
    answer = msgspec.json.decode(completion.content, type=responses.Completion)
    hey, ab = (choice.prompt_logprobs for choice in answer.choices)
    assert isinstance(hey, list)
    assert isinstance(ab, list)
    assert (len(hey), len(ab)) == (3, 2)
    assert hey[0] is None
    token = str(TOKENIZER.encode("e").ids[0])
    assert hey[1] is not None
    assert hey[1][token] == responses.PromptToken(-0.5, 1, "e")
    assert len(hey[1]) == 2
    assert {entry.logprob for entry in hey[1].values()} == {-0.5, -9999.0}  # JSON has no infinity


async def test_prompt_logprobs_of_a_chat_are_beside_its_choices(server: Server) -> None:
    chat = await server.chat(prompt_logprobs=0, n=2, max_tokens=1)
    answer = msgspec.json.decode(chat.content, type=responses.ChatCompletion)
    assert isinstance(answer.prompt_logprobs, list)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert answer.prompt_logprobs[0] is None
    assert all(entry is not None and len(entry) == 1 for entry in answer.prompt_logprobs[1:])
    assert [entry.rank for entry in (answer.prompt_logprobs[1] or {}).values()] == [None]  # 0 alternatives rank nobody
    assert "prompt_logprobs" not in (await server.chat()).json()


async def test_echo_and_prompt_logprobs_each_keep_their_own_number_of_alternatives(server: Server) -> None:
    response = await server.complete(prompt="hey", echo=True, logprobs=1, prompt_logprobs=3, max_tokens=1)
    (choice,) = response.json()["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [1, 1]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3, 3]
    assert server.engine.submissions[0][0].sampling.prompt_logprobs == 3


@pytest.mark.parametrize("stop", [None, ["zzz"]])
async def test_a_completions_stop_token_has_a_logprob_and_a_chats_has_none(
    make_server: MakeServer, stop: list[str] | None
) -> None:
    async with make_server(reply=lambda sequence: []) as server:  # it ends at once
        scored = await server.complete(prompt="hey", echo=True, logprobs=1, max_tokens=1, stop=stop)
        chat = await server.chat(logprobs=True, stop=stop)
    (choice,) = scored.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hey", "stop")
    assert choice["logprobs"]["tokens"] == ["h", "e", "y", "<|im_end|>"]
    assert {len(entries) for entries in choice["logprobs"].values()} == {4}
    assert choice["logprobs"]["text_offset"][-1] == 3
    assert chat.json()["choices"][0]["logprobs"]["content"] == []


def by_seed(sequence: NewSequence) -> Any:
    return TOKENIZER.encode(f"seed {sequence.sampling.seed}").ids


async def test_best_of_gives_the_likeliest_candidates_best_first(make_server: MakeServer) -> None:
    logprobs = {7: -1.0, 8: -0.25, 9: -2.0, 10: -0.5}
    async with make_server(reply=by_seed, logprob=lambda sequence: logprobs[sequence.sampling.seed or 0]) as server:
        response = await server.complete(prompt=["a", "b"], best_of=4, n=2, seed=7, max_tokens=50)
        plain = await server.complete(n=2, seed=7, max_tokens=50)
    answer = response.json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "seed 8"), (1, "seed 10"), (2, "seed 8"), (3, "seed 10"),
    ]  # fmt: skip
    assert {choice["logprobs"] for choice in answer["choices"]} == {None}  # they were not asked for
    generated = sum(len(f"seed {seed}") + 1 for seed in logprobs)
    assert answer["usage"]["completion_tokens"] == 2 * generated  # those thrown away cost as much
    assert [choice["text"] for choice in plain.json()["choices"]] == ["seed 7", "seed 8"]


@pytest.mark.parametrize("special", [None, False])
async def test_tokenize_gives_what_a_completion_would_have(server: Server, special: bool | None) -> None:
    response = await server.http.post("/tokenize", json={"prompt": "hé", "add_special_tokens": special})
    answer = msgspec.json.decode(response.content, type=responses.TokenizeResponse)
    await server.complete(prompt="hé")
    assert answer.tokens == server.engine.submissions[0][0].prompt_ids
    assert (answer.count, answer.max_model_len, answer.token_strs) == (3, 512, None)


async def test_tokenize_renders_messages_as_a_chat_would(server: Server) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    response = await server.http.post(
        "/tokenize", json={"model": "sql", "messages": messages, "return_token_strs": True}
    )
    await server.chat(model="sql", messages=messages)
    answer = response.json()
    assert answer["tokens"] == server.engine.submissions[0][0].prompt_ids
    assert answer["token_strs"][0] == "<|im_start|>"
    assert len(answer["token_strs"]) == answer["count"]


async def test_detokenize_is_the_way_back(server: Server) -> None:
    ids = TOKENIZER.encode("<|im_start|>Grüße 😀").ids
    response = await server.http.post("/detokenize", json={"model": BASE, "tokens": ids})
    assert response.json() == {"prompt": "<|im_start|>Grüße 😀"}
    assert (await server.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
async def test_a_wrong_field_of_tokenization_is_a_400_that_names_it(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    response = await server.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_tokenization_for_an_unknown_model_is_a_404(server: Server, path: str) -> None:
    response = await server.http.post(path, json={"model": "nope", "prompt": "a", "tokens": [1]})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_chat_template_file_replaces_the_models_own(make_server: MakeServer, tmp_path: Path) -> None:
    (tmp_path / "shout.jinja").write_text(SHOUT)
    async with make_server(settings={"chat_template": str(tmp_path / "shout.jinja")}) as server:
        await server.chat()
        assert prompt_of(server) == "!hello"
    async with make_server() as server:
        await server.chat()
        assert prompt_of(server).startswith("<|im_start|>")


@pytest.mark.parametrize(("content", "problem"), [(None, "cannot be read"), ("{% for", "broken at line 1")])
async def test_a_chat_template_file_that_cannot_be_used_stops_the_start(
    make_server: MakeServer, tmp_path: Path, content: str | None, problem: str
) -> None:
    path = tmp_path / "t.jinja"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        async with make_server(settings={"chat_template": str(path)}):
            pass


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
async def test_an_adapters_own_template_is_used_when_the_settings_say_so(
    make_server: MakeServer, adapters_dir: Path, place: str
) -> None:
    def write(template: str) -> None:
        text = template if place.endswith("jinja") else json.dumps({"chat_template": template})
        (adapters_dir / "sql" / place).write_text(text)

    write(SHOUT)
    async with make_server(settings={"adapter_chat_templates": True}) as server:
        await server.chat(model="sql")
        assert prompt_of(server) == "!hello"
        for other in ("pirate", BASE):
            await server.chat(model=other)
            assert prompt_of(server).startswith("<|im_start|>")
        write(SHOUT.replace("!", "?!"))
        await server.chat(model="sql")
        assert prompt_of(server) == "?!hello"
    async with make_server() as server:
        await server.chat(model="sql")
        assert prompt_of(server).startswith("<|im_start|>")


async def test_an_adapters_template_that_is_broken_or_leads_elsewhere_is_refused(
    make_server: MakeServer, adapters_dir: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret text")
    (adapters_dir / "sql" / "chat_template.jinja").write_text("{% for")
    os.symlink(secret, adapters_dir / "pirate" / "chat_template.jinja")
    async with make_server(settings={"adapter_chat_templates": True}) as server:
        broken, elsewhere = await server.chat(model="sql"), await server.chat(model="pirate")
        assert (await server.complete(model="sql")).status_code == 200  # completions need no template
    problems = (
        "Adapter 'sql': The chat template is broken at line 1",
        "Adapter 'pirate': chat_template.jinja is a symbolic",
    )
    for response, problem in zip((broken, elsewhere), problems, strict=True):
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "adapter_invalid"
        assert problem in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "model"
        assert "secret text" not in response.text


async def test_tool_calls_of_the_history_reach_the_template(make_server: MakeServer, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    folder = write_folder(tmp_path / "plain", byte_level_tokenizer(), template=template)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    odd = {"type": "function", "function": {"name": "g", "arguments": "not json"}}
    async with make_server(settings={"model": str(folder), "served_model_name": BASE}, model_dir=str(folder)) as server:
        await server.chat(
            messages=[
                {"role": "assistant", "content": None, "tool_calls": [call, odd], "refusal": None, "audio": None},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
                {"role": "assistant", "content": "", "function_call": {"name": "h", "arguments": "{}"}},
                {"role": "function", "name": "h", "content": "43"},
            ]
        )
        first, second, third, fourth = map(json.loads, prompt_of(server).strip().split("\n"))
    assert first["tool_calls"][0] == call | {"function": {"name": "f", "arguments": {"x": 1}}}
    assert first["tool_calls"][1]["function"]["arguments"] == "not json"
    assert "content" not in first
    assert second == {"role": "tool", "tool_call_id": "c1", "content": "42"}
    assert third["tool_calls"] == [{"type": "function", "function": {"name": "h", "arguments": {}}}]
    assert fourth == {"role": "function", "name": "h", "content": "43"}
