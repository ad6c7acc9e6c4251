"""What the server says on a terminal: progress of the start, and how to talk to it.

A disk that is full or a reader that has gone ends no server: what cannot be written is lost. (So it is with the log, by
Python's own rule.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

import msgspec

from app.adapter_survey import Survey
from punica_core.protocol import Progress

log = logging.getLogger(__name__)

CLEAR_LINE = "\r\x1b[K"
NOTHING_REFUSED = Survey()
_MAX_EXAMPLES = 8
_KEY_HEADER = ' -H "authorization: Bearer $PUNICA_API_KEY"'


class Spinner:
    """Progress of long steps on stderr: a line when a step begins and one when it ends. In between a terminal shows
    every second how long it has taken, on a line that the next one overwrites.

    period: seconds between two updates on a terminal.
    """

    def __init__(self, stream: TextIO | None = None, period: float = 1.0) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._period = period
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._what = ""
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._terminal:  # a thread, since the loop may be busy when the user looks
            threading.Thread(target=self._keep_moving, name="spinner", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end("done in" if kind is None else "stopped after")
        self._ended.set()

    def on_progress(self, progress: Progress) -> None:
        """A step has begun, or goes on. Ignored once finished: the start is over, and the log tells of restarts."""
        if progress.what != self._what and not self._ended.is_set():
            self._end("done in")
            with self._lock:
                self._what, self._began = progress.what, time.monotonic()
                self._print(f"{self._what} ...", passing=self._terminal)

    def finish(self) -> None:
        """The last step has ended well."""
        self._end("done in")
        self._ended.set()

    def _end(self, how: str) -> None:
        with self._lock:
            if self._what:
                self._print(f"{self._what}: {how} {time.monotonic() - self._began:.1f} s")
                self._what = ""

    def _keep_moving(self) -> None:
        while not self._ended.wait(self._period):
            with self._lock:
                if self._what:
                    self._print(f"{self._what} ... {time.monotonic() - self._began:.0f} s", passing=True)

    def _print(self, text: str, passing: bool = False) -> None:
        """passing: leave the cursor at the start, so that a log line, also of the worker, is written over the text."""
        with contextlib.suppress(OSError):
            self._stream.write((CLEAR_LINE if self._terminal else "") + text + ("\r" if passing else "\n"))
            self._stream.flush()


def say(text: str) -> None:
    """Print it to stdout, if that can be written to."""
    try:
        print(text, flush=True)
    except OSError as error:
        log.warning("What was to be printed is lost: %s.", error.strerror)
        with open(os.devnull, "w") as nowhere:  # or the rest of it fails again at the process's end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def ready_text(
    all_names: Sequence[str], host: str, port: int, *, needs_key: bool = False, survey: Survey = NOTHING_REFUSED
) -> str:
    """Lines to paste: curl for the base and each adapter, and the OpenAI SDK. `all_names`: the base first.

    needs_key: a key is read from the variable PUNICA_API_KEY of whoever pastes them. survey: which are refused.
    """
    names = [all_names[0], *(name for name in all_names[1:] if name not in survey.refused)]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/v1"
    adapters = "1 adapter" if len(names) == 2 else f"{len(names) - 1} adapters"
    refused = _refused_text(len(all_names) - len(names), survey.complete)
    lines = [f"Ready on {url} with {names[0]} and {adapters}{refused}. Try:", ""]
    lines += [_curl(url, name, needs_key) for name in names[:_MAX_EXAMPLES]]
    if len(names) > _MAX_EXAMPLES:
        key = _KEY_HEADER if needs_key else ""
        lines.append(f"# ... and {len(names) - _MAX_EXAMPLES} more: curl -s {url}/models{key}")
    return "\n".join([*lines, "", _sdk(url, names, needs_key)])


def _refused_text(count: int, complete: bool) -> str:
    if not count:
        return ""
    others = "1 other is" if count == 1 else f"{count} others are"
    return f"; {'' if complete else 'at least '}{others} refused, and the log says why"


def _curl(url: str, name: str, needs_key: bool) -> str:
    body = msgspec.json.encode(
        {
            "model": name,
            "messages": [{"role": "user", "content": "Hello! Who are you?"}],
            "max_tokens": 64,
            "temperature": 0,
        }
    ).decode()
    key = _KEY_HEADER if needs_key else ""
    return f"curl -s {url}/chat/completions{key} -H 'content-type: application/json' -d {shlex.quote(body)}"


def _sdk(url: str, names: Sequence[str], needs_key: bool) -> str:
    key = 'os.environ["PUNICA_API_KEY"]' if needs_key else '"none"'
    return "\n".join(
        [
            f"# Python, for any interpreter with the package openai ({sys.executable} -m pip install openai):",
            *(["import os"] if needs_key else []),
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{url}", api_key={key})',
            f"for model in {list(names[:_MAX_EXAMPLES])!r}:",
            '    messages = [{"role": "user", "content": "Hello! Who are you?"}]',
            "    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=64, temperature=0)",
            '    print(f"{model}: {answer.choices[0].message.content}")',
        ]
    )
