"""Chat templates of adapters: what the folder of one brings itself, when the server was told to use it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from app.adapter_files import AdapterFiles
from app.template_processes import AdapterTemplate, TemplateProcesses
from app.tokenizer import template_in
from punica_core.adapters.files import SourceFile, signature_of
from punica_core.errors import AdapterError, AdapterInvalid, AdapterLoadTimeout, QueueFull
from punica_core.protocol import AdapterRef, FileSignature

_TEMPLATE_NAME = "chat_template.jinja"
_CONFIG_NAME = "tokenizer_config.json"
_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_CONFIG_BYTES = 16 << 20
_MAX_KEPT = 512

_State = tuple[FileSignature | None, FileSignature | None]


@dataclass(frozen=True, slots=True)
class _Kept:
    state: _State
    template: AdapterTemplate | None


class AdapterTemplates:
    """The chat template of each adapter that brings one, kept until its files change.

    special_tokens: as templates may use them. files: looks at folders. processes: render.
    """

    def __init__(
        self, special_tokens: Mapping[str, str], files: AdapterFiles, processes: TemplateProcesses | None = None
    ) -> None:
        self._special_tokens = special_tokens
        self._files = files
        self._processes = processes if processes is not None else TemplateProcesses()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def of(self, adapter: AdapterRef) -> AdapterTemplate | None:
        """The adapter's own template, None if it has none. Raises AdapterError if it is broken or leads elsewhere,
        QueueFull if nobody has time to compile it.

        While files cannot be looked at, the template as it was.
        """
        try:
            return await self._of(adapter.path, adapter.name)
        except (AdapterError, QueueFull) as error:
            raise type(error)(f"Adapter {adapter.name!r}: {error.message}", param="model") from None

    async def _of(self, folder: str, name: str) -> AdapterTemplate | None:
        try:
            state = await self._files.look(
                lambda: (_state(folder, _TEMPLATE_NAME), _state(folder, _CONFIG_NAME)), name, "template"
            )
            if not self._has(folder, state):
                source = await self._files.run(lambda: _source(folder, state), name)
                if not self._has(folder, state):  # of several requests one makes it, so that they take turns with it
                    self._kept[folder] = _Kept(state, self._template(source))
        except AdapterLoadTimeout:
            if folder not in self._kept:
                raise
        kept = self._kept[folder]
        self._kept.move_to_end(folder)
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        if kept.template is not None:
            await kept.template.check()
        return kept.template

    def _has(self, folder: str, state: _State) -> bool:
        kept = self._kept.get(folder)
        return kept is not None and kept.state == state

    def _template(self, source: str | None) -> AdapterTemplate | None:
        return None if source is None else AdapterTemplate(self._processes, source, self._special_tokens)

    async def stop(self) -> None:
        """Render nothing any more."""
        await self._processes.stop()


def _state(folder: str, name: str) -> FileSignature | None:
    """None for a file that is not there. A link out of the folder is refused: what it shows is not the adapter's."""
    path = os.path.join(folder, name)
    try:
        status = os.stat(path)
    except OSError:
        return None
    if os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder):
        raise AdapterInvalid(f"{name} is a symbolic link that leaves the adapter's folder; copy the file.")
    return signature_of(status)


def _source(folder: str, state: _State) -> str | None:
    if state[0] is not None:
        return _text(folder, _TEMPLATE_NAME, state[0], _MAX_TEMPLATE_BYTES)
    if state[1] is None:
        return None
    text = _text(folder, _CONFIG_NAME, state[1], _MAX_CONFIG_BYTES)
    try:
        config: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise AdapterInvalid(f"{_CONFIG_NAME} is not valid JSON: {error}.") from None
    return template_in(config) if isinstance(config, dict) else None


def _text(folder: str, name: str, state: FileSignature, max_bytes: int) -> str:
    with SourceFile(os.path.join(folder, name), state) as file:
        if file.size > max_bytes:
            raise AdapterInvalid(f"{name} has {file.size} bytes; at most {max_bytes} are read.")
        try:
            return file.read(0, file.size).decode()
        except UnicodeDecodeError:
            raise AdapterInvalid(f"{name} is not UTF-8 text.") from None
