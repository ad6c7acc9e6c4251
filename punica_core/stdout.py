"""Printing as other programs do where nobody reads any more (`punica adapters list FOLDER | head`), or ever (`>&-`)."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

UNREAD = 141
"""The exit code: what a shell gives for a program that SIGPIPE has ended."""


def until_unread(main: Callable[[], int]) -> int:
    """What `main` returns, or UNREAD, without a word, if standard output has lost its reader. Raises what it raises.

    Standard streams that are closed at the start (`punica … >&-`) lead nowhere from then on: else the next file or
    socket that is opened would get their number, and what is printed.
    """
    _open_closed_streams()
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()  # or what is left fails at the process's end, where nobody can catch it
    except BrokenPipeError:
        if not _is_unread():
            raise  # it was another pipe, or a socket
        with open(os.devnull, "w") as nowhere:  # or it fails again at the end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return UNREAD


def _open_closed_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
        os.set_inheritable(number, True)
        setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _is_unread() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # asks for nothing but errors
    return bool(poll.poll(0))
