"""What the server says on a terminal: progress of the start, and how to talk to it."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

import msgspec

from punica_core.protocol import Progress

_MAX_EXAMPLES = 8


class Spinner:
    """Progress of long steps on stderr, one line for each step; a terminal sees it move."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._what = ""
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.done()

    def on_progress(self, progress: Progress) -> None:
        """Show how far a step is."""
        if progress.what != self._what:
            self.done()
            self._what, self._began = progress.what, time.monotonic()
            if not self._stream.isatty():
                print(f"{progress.what} ...", file=self._stream, flush=True)
        if self._stream.isatty():
            seconds = time.monotonic() - self._began
            line = f"\r{progress.what} ... {progress.fraction:4.0%} ({seconds:.0f} s)"
            print(line, end="", file=self._stream, flush=True)

    def done(self) -> None:
        """The current step has ended."""
        if self._what:
            seconds = time.monotonic() - self._began
            start = "\r" if self._stream.isatty() else ""
            print(f"{start}{self._what}: done in {seconds:.1f} s      ".rstrip(), file=self._stream, flush=True)
            self._what = ""


def ready_text(names: Sequence[str], host: str, port: int) -> str:
    """Lines to paste: curl for the base and each adapter, and the OpenAI SDK. `names`: the base first."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/v1"
    lines = [f"Ready on {url} with {names[0]} and {len(names) - 1} adapters. Try:", ""]
    lines += [_curl(url, name) for name in names[:_MAX_EXAMPLES]]
    if len(names) > _MAX_EXAMPLES:
        lines.append(f"# ... and {len(names) - _MAX_EXAMPLES} more: curl -s {url}/models")
    return "\n".join([*lines, "", _sdk(url, names)])


def _curl(url: str, name: str) -> str:
    body = msgspec.json.encode(
        {
            "model": name,
            "messages": [{"role": "user", "content": "Hello! Who are you?"}],
            "max_tokens": 64,
            "temperature": 0,
        }
    ).decode()
    return f"curl -s {url}/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"


def _sdk(url: str, names: Sequence[str]) -> str:
    return "\n".join(
        [
            "# pip install openai",
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{url}", api_key="none")',
            f"for model in {list(names[:_MAX_EXAMPLES])!r}:",
            '    messages = [{"role": "user", "content": "Hello! Who are you?"}]',
            "    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=64, temperature=0)",
            '    print(f"{model}: {answer.choices[0].message.content}")',
        ]
    )
