"""The messages of a conversation, as clients send them and as chat templates expect them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.parsing import collector_paused

Name = Annotated[str, Meta(max_length=256)]


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content. Only text is supported."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None

    def __post_init__(self) -> None:
        if self.type != "text":
            raise ValueError(f"content parts of type {self.type} are not supported; use text")
        if self.text is None:
            raise ValueError("a text part needs text")


class FunctionCall(msgspec.Struct, frozen=True):
    """A call that the assistant made earlier in the conversation. arguments: JSON, as text."""

    name: Name
    arguments: str = "{}"

    def for_template(self) -> dict[str, Any]:
        """Arguments that are a JSON object become one: templates write them in their own way."""
        arguments: Any = self.arguments
        try:
            with collector_paused():
                decoded = msgspec.json.decode(self.arguments)
            arguments = decoded if isinstance(decoded, dict) else self.arguments
        except (msgspec.DecodeError, RecursionError):
            pass
        return {"name": self.name, "arguments": arguments}


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in an assistant message of the history."""

    function: FunctionCall
    id: Name | None = None
    type: Literal["function"] = "function"

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        call: dict[str, Any] = {"type": self.type, "function": self.function.for_template()}
        return call if self.id is None else {"id": self.id} | call


class Message(msgspec.Struct, frozen=True):
    """One message. `developer` is `system`; text parts are joined; `function_call` is the older form of a tool call."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(max_length=1024)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    tool_call_id: Name | None = None
    function_call: FunctionCall | None = None

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls and self.function_call is None:
            raise ValueError("a message needs content")

    @property
    def size(self) -> int:
        """Characters of what can be long: the content and the arguments of calls."""
        calls = [call.function for call in self.tool_calls or ()]
        calls += [self.function_call] if self.function_call is not None else []
        return len(self.text or "") + sum(len(call.arguments) + len(call.name) for call in calls)

    @property
    def text(self) -> str | None:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        calls = list(self.tool_calls or ())
        if self.function_call is not None and not calls:
            calls = [ToolCall(self.function_call)]
        if calls:
            message["tool_calls"] = [call.for_template() for call in calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message
