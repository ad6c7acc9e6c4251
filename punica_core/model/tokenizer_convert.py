"""`python -m punica_core.model.tokenizer_convert MODEL_DIR TARGET`: makes TARGET/tokenizer.json from older files.

Run by the front end, which does not import transformers. TARGET appears whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path


def convert(model_dir: Path, target: Path) -> None:
    """Write the fast form of the folder's tokenizer. Raises OSError or ValueError if it has none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} has no fast form")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        tokenizer.save_pretrained(str(staging))
        if not (staging / "tokenizer.json").is_file():
            raise ValueError(f"{type(tokenizer).__name__} wrote no tokenizer.json")
        _install(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _install(staging: Path, target: Path) -> None:
    try:
        os.rename(staging, target)
    except OSError:
        if not (target / "tokenizer.json").is_file():
            raise  # else another process was faster


def main() -> int:
    """Exit code 0, or 1 with the reason on the last line of stderr."""
    parser = argparse.ArgumentParser(prog="python -m punica_core.model.tokenizer_convert", description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    try:
        convert(arguments.model_dir, arguments.target)
    except (OSError, ValueError, ImportError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
