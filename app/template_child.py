"""`python -m app.template_child`: renders chat templates whose authors need not be trusted with the server's time.

Reads jobs (pickles of the server, which is trusted) from stdin, writes answers (a length of 8 bytes, then MessagePack)
to stdout; first of all a byte once it is ready. A job that takes too long is the end of this process, by a signal that
no loop in a template can hold back. So is the end of the server.
"""

from __future__ import annotations

import contextlib
import pickle
import resource
import signal
import sys
from collections import OrderedDict
from typing import Any, BinaryIO, NamedTuple

import msgspec

from app.chat_template import ChatTemplate
from punica_core.errors import InvalidRequest, PunicaError, to_wire

MAX_MEMORY = 4 << 30
"""Bytes of address space: a template may also make a text that is too long."""
READY = b"!"
"""What it says first, when it has been started."""
_MAX_COMPILED = 64


class Job(NamedTuple):
    """seconds: for all of it. messages: None to compile the template only, with no text for an answer."""

    source: str
    special_tokens: dict[str, str]
    seconds: float
    messages: list[dict[str, Any]] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012  # nobody writes to it


class Answer(msgspec.Struct, array_like=True):
    """The text, or an error's code, message and field."""

    text: str = ""
    code: str = ""
    message: str = ""
    param: str | None = None


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Work until there are no more jobs."""
    compiled: OrderedDict[str, ChatTemplate] = OrderedDict()
    with contextlib.suppress(EOFError):
        while True:
            job = Job(*pickle.load(jobs))
            signal.setitimer(signal.ITIMER_REAL, job.seconds)
            answer = _answer(job, compiled)
            data = msgspec.msgpack.encode(answer)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.write(len(data).to_bytes(8, "big") + data)
            answers.flush()


def _answer(job: Job, compiled: OrderedDict[str, ChatTemplate]) -> Answer:
    try:
        template = compiled.pop(job.source, None) or ChatTemplate(job.source, job.special_tokens)
        compiled[job.source] = template
        if len(compiled) > _MAX_COMPILED:
            compiled.popitem(last=False)
        text = "" if job.messages is None else template.render(job.messages, **job.options)
        text.encode()
        return Answer(text)
    except PunicaError as error:
        return Answer("", *to_wire(error), error.param)
    except Exception as error:  # what a program of anybody may raise, memory that is not there
        problem = InvalidRequest(f"The chat template cannot render these messages: {type(error).__name__}.")
        return Answer("", *to_wire(problem), "messages")


def main() -> None:
    """Serve the server's pipes."""
    with contextlib.suppress(ValueError, OSError):  # there is a lower limit already
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
