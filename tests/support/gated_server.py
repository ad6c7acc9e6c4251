"""The real server process on a real worker that can be held.

python -m tests.support.gated_server GATES serve [options of `punica serve`]
"""

from __future__ import annotations

import sys

from app import cli
from punica_core.client import WorkerClient

if __name__ == "__main__":
    gates, *arguments = sys.argv[1:]
    worker = (sys.executable, "-m", "tests.support.gated_worker", gates)
    sys.exit(cli.main(arguments, connect=lambda: WorkerClient(worker)))
