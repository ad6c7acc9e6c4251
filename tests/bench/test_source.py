"""The hash of the sources finds the commit that a report without one came from."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from punica_core.bench import record, source

FILES = {
    "app/cli.py": "import punica_core\n",
    "punica_core/bench/record.py": "x = 1\n",
    "punica_core/ops.py": "y = 2\n",
    "csrc/src/shrink.cu": "__global__ void shrink();\n",
    "docs/gpu.md": "words\n",
}


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a commit")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository laid out as this one, with one commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = tmp_path / "clone"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "punica_core" / "csrc").symlink_to("../csrc")
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def test_commits_are_found_by_the_hash_of_their_files(clone: Path) -> None:
    first, before = git(clone, "rev-parse", "HEAD"), source.source_hash(clone / "punica_core")
    (clone / "docs" / "gpu.md").write_text("other words\n")
    second = commit(clone)
    assert source.source_hash(clone / "punica_core") == before
    (clone / "csrc" / "src" / "shrink.cu").write_text("__global__ void other();\n")
    changed = source.source_hash(clone / "punica_core")
    assert changed != before
    assert source.commits_with(changed, clone) == []
    third = commit(clone)
    assert set(source.commits_with(before, clone)) == {first, second}
    assert source.commits_with(changed, clone) == [third]


def test_an_installation_has_the_hash_of_its_commit(clone: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    for name in ("app", "punica_core"):
        shutil.copytree(clone / name, installed / name)  # csrc is a folder of the package then
    expected = source.source_hash(clone / "punica_core")
    assert source.source_hash(installed / "punica_core") == expected
    built = installed / "punica_core" / "ops.cpython-311.pyc"
    built.write_text("what Python compiled")
    assert source.source_hash(installed / "punica_core") == expected
    (installed / "app" / "cli.py").rename(installed / "app" / "other.py")
    assert source.source_hash(installed / "punica_core") != expected


def test_the_command_names_commits_or_says_that_there_are_none(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(source, "_PACKAGE", clone / "punica_core")
    known = source.source_hash(clone / "punica_core")
    assert source.main([known]) == 0
    assert capsys.readouterr().out.strip() == git(clone, "rev-parse", "HEAD")
    assert source.main(["0" * 16]) == 1
    assert "no commit has the sources 0000" in capsys.readouterr().err
    shutil.rmtree(clone / ".git")
    assert source.main([known]) == 2
    assert "git cannot list the commits" in capsys.readouterr().err


def test_the_commit_is_never_that_of_another_repository_around(clone: Path) -> None:
    folder = clone / "punica_core" / "bench"
    assert git(clone, "rev-parse", "HEAD").startswith(record._commit(folder))
    installed = clone / ".venv" / "bench"
    shutil.copytree(folder, installed)
    assert record._commit(installed) == "unknown"


def test_without_git_the_report_has_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    with_git = record.provenance()["source"]
    monkeypatch.setenv("PATH", "")
    found = record.provenance()
    assert (found["commit"], found["source"]) == ("unknown", with_git)
    assert found["source"] == source.source_hash()
    assert "punica" in found["versions"]
