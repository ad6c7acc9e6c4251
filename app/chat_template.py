"""Chat templates as Hugging Face renders them, in a sandbox.

The same globals, filters and extensions as `transformers` gives templates; nothing of the process is reachable.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes
from jinja2.parser import Parser

from punica_core.errors import ConfigError, InvalidRequest

MAX_RENDERED_LENGTH = 1 << 24
"""Characters of a prompt's text: twice what the largest body holds by default."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; when serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes <, > and & for HTML, which models have never seen
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _dict(*arguments: Any, **entries: Any) -> dict[Any, Any]:
    # the class itself would offer its attributes
    return dict(*arguments, **entries)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` without names that begin with an underscore, which may reach into Python."""

    def __init__(*arguments: Any, **entries: Any) -> None:
        self, *initial = arguments  # so that a template may call an entry `self`
        values = dict(*initial, **entries)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _dict
    environment.globals["namespace"] = _Namespace
    return environment


class ChatTemplate:
    """A compiled template. special_tokens: bos_token, eos_token, ... as the template may use them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            problem = str(error.message).rstrip(".")
            raise ConfigError(f"The chat template is broken at line {error.lineno}: {problem}.") from None
        except (SyntaxError, ValueError, RecursionError) as error:  # of the program that jinja makes of it
            raise ConfigError(f"The chat template cannot be compiled: {error}.") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises InvalidRequest when the template refuses the messages.

        continue_final_message: the prompt ends inside the last message, so that the model goes on with it.
        variables: further template variables (chat_template_kwargs); they may not replace the messages.
        """
        # templates print None as "None"; what they can handle is a key that is not there
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if continue_final_message:
            messages = _mark_end(messages)
        scope: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        scope |= {"messages": messages, "add_generation_prompt": add_generation_prompt and not continue_final_message}
        text = _rendered(self._template, scope)
        return _cut_at_mark(text) if continue_final_message else text


def _rendered(template: jinja2.Template, scope: Mapping[str, Any]) -> str:
    pieces, size = [], 0
    try:
        for piece in template.generate(scope):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_RENDERED_LENGTH:  # a template may repeat a long variable for each of many messages
                raise InvalidRequest(
                    f"The chat template makes more than {MAX_RENDERED_LENGTH} characters of these messages.",
                    param="messages",
                )
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"The chat template refuses these messages: {error}.", param="messages") from None
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        # A template is a program of the model's author; what it cannot digest is the request's fault here.
        raise InvalidRequest(f"The chat template cannot render these messages: {error}.", param="messages") from None
    return "".join(pieces)


_END_MARK = "\u241fEND_OF_FINAL_MESSAGE\u241f"
_END = _END_MARK + " "
"""Put behind the final message; where its space is gone, the template trims messages."""


def _mark_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    final = messages[-1]
    if not isinstance(final.get("content"), str):
        raise InvalidRequest("continue_final_message needs text in the last message.", param="continue_final_message")
    return [*messages[:-1], {**final, "content": final["content"] + _END}]


def _cut_at_mark(text: str) -> str:
    cut, mark, rest = text.rpartition(_END_MARK)
    if not mark:
        raise InvalidRequest(
            "The chat template changes the last message, so it cannot be continued.", param="continue_final_message"
        )
    return cut if rest.startswith(" ") else cut.rstrip()
