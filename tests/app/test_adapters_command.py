"""`punica adapters`: the list is made here, the rest by a program of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app import adapters_command, cli
from punica_core.adapters.report import NO_BASE
from tests.support.unread import unread

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"


def test_the_list_has_names_ranks_targets_bytes_and_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sentiment", "json-extract"):
        (tmp_path / name).symlink_to(EXAMPLES / name)  # leads out of the folder: not an adapter of it
    assert cli.main(["adapters", "list", str(tmp_path)]) == 0
    assert "has no adapters" in capsys.readouterr().out
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{}")
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "adapter_config.json").write_text("{}")
    (tmp_path / "pickled" / "adapter_model.bin").write_bytes(b"")
    (tmp_path / "cut.punica").write_bytes(b"PUNICA\0\1")
    (tmp_path / "org" / "no-config").mkdir(parents=True)
    assert cli.main(["adapters", "list", str(tmp_path), "--json"]) == 0
    reports = {report["name"]: report for report in json.loads(capsys.readouterr().out)}
    assert {name: report["code"] for name, report in reports.items()} == {
        "broken": "adapter_invalid",
        "cut": "adapter_invalid",
        "org/no-config": "model_not_found",
        "pickled": "adapter_unsupported",
    }
    assert "punica adapters convert" in reports["pickled"]["reason"]
    assert cli.main(["adapters", "list", str(tmp_path)]) == 0
    assert "validate" not in capsys.readouterr().out, "what is refused on its headers needs no further look"
    assert cli.main(["adapters", "list", str(EXAMPLES)]) == 0
    table, _, note = capsys.readouterr().out.partition("\n\n")
    assert "with --model" in note
    assert "punica adapters validate --model" in note
    lines = table.splitlines()
    assert len(lines) == 5
    sentiment = next(line for line in lines if line.startswith("sentiment"))
    assert sentiment.split() == ["sentiment", "16", "q_proj,", "v_proj", "1.239", "MB", *NO_BASE.split()]


def test_a_folder_that_is_none_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["adapters", "list", str(tmp_path / "none")]) == 1
    assert "is not a folder" in capsys.readouterr().err


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys\nfrom app import cli\n"
        f"assert cli.main(['adapters', 'list', {str(EXAMPLES)!r}]) == 0\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


def test_a_list_with_a_base_is_made_where_torch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda command: calls.append(command) or 0)
    assert cli.main(["adapters", "list", "--model", "base", "folder"]) == 0
    assert cli.main(["adapters", "list", "folder", "--json", "--max-lora-rank", "8", "--model", "base"]) == 0
    assert [call[3:] for call in calls] == [
        ["list", "--model=base", "--", "folder"],
        ["list", "--model=base", "--max-lora-rank=8", "--json", "--", "folder"],
    ]


@pytest.mark.parametrize("action", adapters_command.TORCH_ACTIONS)
def test_flags_reach_the_program_and_its_exit_code_comes_back(
    action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def call(command: list[str]) -> int:
        calls.append(command)
        return 1 if len(calls) == 1 else -9

    monkeypatch.setattr(subprocess, "call", call)
    given = [action, "some/folder", "--model", "base", "--json", "--help"]
    assert cli.main(["adapters", *given]) == 1
    assert calls[0][1:] == ["-m", "punica_core.adapter_tools", *given]
    assert cli.main(["adapters", action]) == 1
    assert "ended by signal 9" in capsys.readouterr().err


def test_validate_runs_from_the_command_line() -> None:
    command = [sys.executable, "-m", "app", "adapters", "validate", str(EXAMPLES / "sentiment"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert report["verdict"] == NO_BASE
    assert len(report["adapter_key"]) == 64


@pytest.mark.parametrize(
    ("arguments", "buffered"),
    [
        (("adapters", "list", str(EXAMPLES), "--json"), True),
        (("adapters", "list", str(EXAMPLES), "--json"), False),
        (("adapters", "validate", str(EXAMPLES / "sentiment"), "--json"), True),
        (("bench", "pacing", "--help"), True),
    ],
    ids=["here", "here, unbuffered", "by a program of its own", "by a benchmark of the worker"],
)
def test_output_that_nobody_reads_ends_a_command_without_a_word(arguments: tuple[str, ...], buffered: bool) -> None:
    assert unread(*arguments, buffered=buffered) == (141, "")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"], ids=["stdout", "all"])
def test_closed_streams_do_not_fail_a_command(closed: str, tmp_path: Path) -> None:
    code = f'"$0" -m app adapters list "$1" {closed}; exit $?'
    done = subprocess.run(
        ["bash", "-c", code, sys.executable, str(EXAMPLES)], stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_another_broken_pipe_is_an_error() -> None:
    code = (
        "from punica_core.stdout import until_unread\n"
        "def main():\n    print('read')\n    raise BrokenPipeError('of a socket')\n"
        "until_unread(main)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "read\n")
    assert "of a socket" in done.stderr
