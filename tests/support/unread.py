"""`punica` with a standard output whose reader has gone."""

from __future__ import annotations

import os
import subprocess
import sys


def unread(*arguments: str, buffered: bool) -> tuple[int, str]:
    """Exit code and stderr of a command whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    with open(writer, "w") as lost:
        done = subprocess.run(
            [sys.executable, "-m", "app", *arguments],
            stdout=lost,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
            env=environment,
        )
    return done.returncode, done.stderr
