"""Where a model's tokenizer.json is: in its folder, or made once from older files by a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from pathlib import Path

from app.file_threads import on_daemon_thread
from punica_core.errors import ConfigError

_SOURCES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tokenizer_config.json", "spiece.model")
_CONVERTER = (sys.executable, "-m", "punica_core.model.tokenizer_convert")


async def tokenizer_folder(model_dir: Path, cache: str = "") -> Path:
    """A folder with tokenizer.json. Raises ConfigError if there is none and none can be made.

    The conversion needs transformers, which this process does not import; its result is kept in the cache, by the state
    of the files it was made from. Files are looked at on a thread of its own, which may hang.
    """
    folder, is_there = await on_daemon_thread(lambda: _find(model_dir, cache))
    if not is_there:
        await _convert(model_dir, folder)
    return folder


def _find(model_dir: Path, cache: str) -> tuple[Path, bool]:
    """The folder, and whether tokenizer.json is there already."""
    if (model_dir / "tokenizer.json").is_file():
        return model_dir, True
    sources = [model_dir / name for name in _SOURCES if (model_dir / name).is_file()]
    if not sources:
        raise ConfigError(f"{model_dir} has neither tokenizer.json nor files that one could be made from.")
    root = Path(cache) if cache else Path.home() / ".cache" / "punica"
    target = root / "tokenizers" / _digest(model_dir, sources)
    return target, (target / "tokenizer.json").is_file()


def _digest(model_dir: Path, sources: list[Path]) -> str:
    state = [str(model_dir.resolve())]
    state += [f"{path.name}:{(stat := path.stat()).st_size}:{stat.st_mtime_ns}" for path in sources]
    return hashlib.blake2s("\n".join(state).encode(), digest_size=16).hexdigest()


async def _convert(model_dir: Path, target: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *_CONVERTER, str(model_dir), str(target), stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, stderr = await process.communicate()
    except asyncio.CancelledError:  # it took too long; nobody waits for its end
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode != 0:
        reason = stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise ConfigError(
            f"{model_dir} has no tokenizer.json, and making one failed ({reason[:300]}). Save the tokenizer with "
            "transformers (AutoTokenizer.from_pretrained(dir).save_pretrained(dir)) and start again."
        )
