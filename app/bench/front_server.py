"""`python -m app.bench.front_server …`: `punica serve`, with `front_worker` in the worker's place."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from app.cli import main as punica
from punica_core.client import WorkerClient


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--port", required=True)
    parser.add_argument("--tokens-per-second", required=True)
    options = parser.parse_args()
    vocab_size = json.loads((options.model_dir / "config.json").read_text())["vocab_size"]
    worker = (
        *(sys.executable, "-m", "app.bench.front_worker"),
        *("--model-dir", str(options.model_dir), "--vocab-size", str(vocab_size)),
        *("--tokens-per-second", options.tokens_per_second),
    )
    flags = ["--model", str(options.model_dir), "--served-model-name", "base", "--port", options.port]
    limits = ["--max-num-seqs", "512", "--max-num-batched-tokens", "512", "--log-level", "warning"]
    return punica(["serve", *flags, *limits], connect=lambda: WorkerClient(worker))


if __name__ == "__main__":
    sys.exit(main())
