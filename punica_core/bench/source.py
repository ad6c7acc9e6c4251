"""Which sources a figure was measured with: ``python -m punica_core.bench.source [HASH]``.

Without an argument prints the hash of the files that run here, be they a clone, a copy without git or an installed
package. With a report's hash prints the commits of this clone that have these files.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from punica_core.stdout import until_unread

_SUFFIXES: Final[Mapping[str, frozenset[str]]] = {
    "app": frozenset({".py"}),
    "punica_core": frozenset({".py"}),
    "csrc": frozenset({".h", ".cuh", ".cu", ".cpp"}),
}
"""Folder of the repository → names' endings of the sources in it."""
_PACKAGE: Final = Path(__file__).resolve().parents[1]


def source_hash(package: Path = _PACKAGE) -> str:
    """Hash of the Python and CUDA sources of a Punica whose ``punica_core`` is the folder `package`, 16 hex digits.

    A function of their contents and of their paths in the repository, so a copy or an installation has the hash of the
    commit it was made from, and a changed file another.
    """
    kernels = package / "csrc" if (package / "csrc").is_dir() else package.parent / "csrc"
    roots = {"app": package.parent / "app", "punica_core": package, "csrc": kernels.resolve()}
    blobs = {}
    for name, root in roots.items():
        for path in root.rglob("*"):
            if path.suffix in _SUFFIXES[name] and path.is_file():
                blobs[f"{name}/{path.relative_to(root).as_posix()}"] = _blob_id(path.read_bytes())
    return _digest(blobs)


def commits_with(source: str, repository: Path) -> list[str]:
    """The commits of a git repository whose :func:`source_hash` is `source`, newest first.

    Raises:
        subprocess.CalledProcessError: git cannot read the repository.
    """
    commits = _git(repository, "rev-list", "--all", "HEAD").split()
    return [commit for commit in commits if _hash_of_commit(commit, repository) == source]


def _hash_of_commit(commit: str, repository: Path) -> str:
    blobs = {}
    for entry in _git(repository, "ls-tree", "-rz", "--full-tree", commit, "--", *_SUFFIXES).split("\0")[:-1]:
        about, _, path = entry.partition("\t")
        if PurePosixPath(path).suffix in _SUFFIXES[path.partition("/")[0]]:
            blobs[path] = about.split()[2]
    return _digest(blobs)


def _git(repository: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *words], check=True, capture_output=True, text=True).stdout


def _blob_id(content: bytes) -> str:
    """What git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest(blobs: Mapping[str, str]) -> str:
    """blobs: path in the repository → git's id of the content."""
    lines = "".join(f"{blobs[path]} {path}\n" for path in sorted(blobs))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m punica_core.bench.source", description=__doc__)
    parser.add_argument("source", nargs="?", metavar="HASH", help="of a report; default: print that of these files")
    args = parser.parse_args(argv)
    if args.source is None:
        print(source_hash())
        return 0
    try:
        commits = commits_with(args.source, _PACKAGE.parent)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"git cannot list the commits of {_PACKAGE.parent}: {error}", file=sys.stderr)
        return 2
    print("\n".join(commits) or f"no commit has the sources {args.source}", file=None if commits else sys.stderr)
    return 0 if commits else 1


if __name__ == "__main__":
    sys.exit(until_unread(main))
