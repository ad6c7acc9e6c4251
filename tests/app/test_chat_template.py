"""Rendered like `apply_chat_template` of transformers, in a sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from app import tokenizer_files
from app.chat_template import MAX_RENDERED_LENGTH, ChatTemplate
from app.tokenizer import Tokenizer
from app.tokenizer_files import tokenizer_folder
from punica_core.errors import ConfigError, InvalidRequest
from tests.support.tokenizer_folders import CHATML, byte_level_tokenizer, sentencepiece_tokenizer, write_folder

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "  hi <there> & 'you'  "}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本 😀\n\n"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    "tool call": [
        {"role": "user", "content": "w"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "<&é>"}'}}],
        },
        {"role": "tool", "content": "cold", "tool_call_id": "1"},
    ],
}
TEMPLATES = {
    "chatml": CHATML,
    "default system": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}{{ eos_token }}\n{% endfor %}"
    ),
    "blocks and trimming": (
        "{{ bos_token }}\n{%- for message in messages %}\n  {% if message.role == 'user' %}\n"
        "    [INST] {{ message.content | trim }} [/INST]\n  {% else %}\n{{ message.content }}{{ eos_token }}\n"
        "  {%- endif %}\n{% endfor %}"
    ),
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
    "loop controls": (
        "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}{{ message.content }}"
        "{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}"
    ),
    "generation tag": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
        "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    ),
    "namespace and dates": (
        "{% set state = namespace(count=0) %}{% for message in messages %}{% set state.count = state.count + 1 %}"
        "{% endfor %}{{ state.count }} {{ strftime_now('%Y') }} {{ unknown_variable }}{{ tools is none }}"
    ),
    "arguments": (
        "{% for message in messages %}{% if message.tool_calls is defined %}{% for call in message.tool_calls %}"
        "{{ call.function.name }}({{ call.function.arguments }}){% endfor %}{% else %}{{ message.content }}{% endif %}"
        "{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    ),
}


def theirs(template: str, chat: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), **SPECIAL)
    rendered = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, **options)
    assert isinstance(rendered, str)
    return rendered


@pytest.mark.parametrize("generation_prompt", [True, False], ids=["prompt", "no prompt"])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_renders_like_transformers(template: str, chat: list[dict[str, Any]], generation_prompt: bool) -> None:
    ours = ChatTemplate(template, SPECIAL).render(
        chat, add_generation_prompt=generation_prompt, variables={"enable_thinking": False}
    )
    assert ours == theirs(template, chat, add_generation_prompt=generation_prompt, enable_thinking=False)


@pytest.mark.parametrize("template", [CHATML, TEMPLATES["blocks and trimming"], "{{ messages[-1].content | trim }}."])
@pytest.mark.parametrize("content", ["Dear", "Dear  ", "Dear\n"])
def test_continues_the_final_message_like_transformers(template: str, content: str) -> None:
    chat = [{"role": "user", "content": "write"}, {"role": "assistant", "content": content}]
    ours = ChatTemplate(template, SPECIAL).render(chat, continue_final_message=True)
    assert ours == theirs(template, chat, continue_final_message=True)


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        ChatTemplate("x", {}).render([{"role": "assistant", "content": "a"}], continue_final_message=True)


def test_tokenizes_like_transformers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level_tokenizer(), **SPECIAL)
    ours, chat = Tokenizer.load(folder, 300), CHATS["system"]
    reference = PreTrainedTokenizerFast.from_pretrained(str(folder))
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode(ours.render_chat(chat), add_special_tokens=False) == expected


def test_a_year_comes_from_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]) == str(datetime.now().year)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**12) | list }}",
    ],
)
def test_the_sandbox_keeps_templates_in(attack: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(attack, {}).render([{"role": "user", "content": "x"}])


def test_what_the_sandbox_hides_is_empty() -> None:
    assert ChatTemplate("{{ raise_exception.__globals__ }}{{ dict.__mro__ }}", {}).render([]) == ""


def test_a_namespace_holds_nothing_private() -> None:
    for source in ("{{ namespace(_x=1) }}", "{% set space = namespace() %}{% set space._x = 1 %}"):
        with pytest.raises(InvalidRequest, match="_x"):
            ChatTemplate(source, {}).render([])


def test_variables_of_a_request_do_not_replace_the_messages() -> None:
    rendered = ChatTemplate("{{ messages[0].content }}", {}).render(
        [{"role": "user", "content": "mine"}], variables={"messages": [{"content": "theirs"}]}
    )
    assert rendered == "mine"


def test_a_variable_repeated_for_each_message_has_an_end() -> None:
    template = ChatTemplate("{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}", SPECIAL)
    long, many = "x" * (MAX_RENDERED_LENGTH // 1024), [{"role": "user", "content": ""}] * 1024
    assert template.render(many, variables={"bos_token": long}) == "x" * MAX_RENDERED_LENGTH
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="more than 16777216 characters"):
            template.render([*many, {"role": "user", "content": "."}] * 100, variables={"bos_token": long})
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_RENDERED_LENGTH  # of 100
    finally:
        tracemalloc.stop()


def test_a_broken_template_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("\n{% for %}", {})
    with pytest.raises(ConfigError, match=r"No filter named 'none_such'\.$"):
        ChatTemplate("{{ messages|none_such }}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 1" + "+1" * 3000 + " }}",
        "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
        "{% break %}",
        "{{ " + "9" * 5000 + " }}",
    ],
    ids=lambda source: source[:12],
)
def test_a_template_that_cannot_be_compiled_is_a_configuration_error(source: str) -> None:
    with pytest.raises(ConfigError, match=r"^The chat template cannot be compiled: .{1,200}\.$"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "file"}, "file"),
        ({"chat_template.json": '{"chat_template": "json"}'}, "json"),
        ({}, "config"),
    ],
    ids=["jinja", "json", "config"],
)
def test_the_folders_own_template_file_comes_first(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    folder = write_folder(tmp_path, byte_level_tokenizer(), template="config")
    for name, content in files.items():
        (folder / name).write_text(content)
    assert Tokenizer.load(folder, 300).render_chat([]) == expected


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = write_folder(tmp_path, byte_level_tokenizer(), template=None, chat_template=named)
    assert Tokenizer.load(folder, 300).render_chat([]) == "plain"


PANICS = (
    '{"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}, '
    '"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {}}', PANICS])
def test_a_damaged_tokenizer_is_a_configuration_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path, 300)


async def test_a_folder_with_tokenizer_json_is_used_as_it_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", byte_level_tokenizer())
    assert await tokenizer_folder(folder, str(tmp_path / "cache")) == folder
    assert not (tmp_path / "cache").exists()


async def test_older_tokenizer_files_are_converted_once(tmp_path: Path) -> None:
    model = tmp_path / "model"
    vocabulary = byte_level_tokenizer().get_vocab(with_added_tokens=False)
    model.mkdir()
    (model / "vocab.json").write_text(json.dumps(vocabulary))
    (model / "merges.txt").write_text("#version: 0.2\n")
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "chat_template": "x"}')
    folder = await tokenizer_folder(model, str(tmp_path / "cache"))
    made = (folder / "tokenizer.json").stat().st_mtime_ns
    assert Tokenizer.load(folder, 300).encode("hi", add_special_tokens=False) == byte_level_tokenizer().encode("hi").ids
    assert await tokenizer_folder(model, str(tmp_path / "cache")) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == made


async def test_a_folder_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither tokenizer\.json"):
        await tokenizer_folder(tmp_path)


async def test_a_conversion_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "_CONVERTER", (sys.executable, "-c", "import sys; sys.exit('no fast form')"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"making one failed \(no fast form\)\. Save the tokenizer"):
        await tokenizer_folder(tmp_path, str(tmp_path / "cache"))


def test_a_rendered_text_gets_no_second_bos() -> None:
    tokenizer = Tokenizer(sentencepiece_tokenizer(), 400, {"bos_token": "<s>"}, None)
    assert tokenizer.encode("<s>lo", add_special_tokens=True).count(1) == 1
    assert tokenizer.encode("lo", add_special_tokens=True).count(1) == 1


def test_the_front_end_needs_no_torch() -> None:

    code = "import app.cli, sys; assert not {'torch', 'transformers', 'peft'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
