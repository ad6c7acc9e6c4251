"""The real server process on a scripted worker.

python -m tests.support.scripted_server MODEL_DIR STEP_SECONDS [options of `punica serve`]
"""

from __future__ import annotations

import sys

from app import cli
from punica_core.client import WorkerClient

if __name__ == "__main__":
    model_dir, step_seconds, *options = sys.argv[1:]
    worker = (sys.executable, "-m", "tests.support.scripted_worker", "--model-dir", model_dir)
    worker += ("--step-seconds", step_seconds)
    sys.exit(cli.main(["serve", "--model", model_dir, *options], connect=lambda: WorkerClient(worker)))
