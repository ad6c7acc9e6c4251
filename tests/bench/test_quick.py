"""`punica bench quick`: every part is in the report, and one that fails takes no other with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from punica_core.bench import decode, quick

FLAGS = [
    *("--model", "tiny", "--device", "cpu", "--adapters", "4", "--lora-ranks", "4", "--requests", "6", "--peft", ""),
    *("--lengths", "uniform:5:12:3:7", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--batches", "1,2"),
    *("--prompt-tokens", "9", "--warmup", "1", "--steps", "3", "--systems", "base,distinct", "--check-every", "2"),
]


def report_of(out: Path, code: int) -> dict[str, object]:
    assert quick.main([*FLAGS, "--out", str(out)]) == code
    found: dict[str, object] = json.loads(out.read_text())
    return found


DECODE = {f"decode {system} {batch}" for batch in (1, 2) for system in ("base", "identical")} | {"decode distinct 2"}


def test_every_part_is_measured_on_one_engine(tmp_path: Path) -> None:
    report = report_of(tmp_path / "quick.json", 0)
    assert report["failed"] == {}
    assert DECODE | {"throughput base", "throughput distinct", "check", "memory"} <= report.keys()
    assert report["check"]["sampled"] == 3  # type: ignore[index]
    assert report["throughput distinct"]["adapters"] == 4  # type: ignore[index]
    assert report["decode distinct 2"]["steps"] == 3  # type: ignore[index]


def test_more_workloads_run_on_the_same_engine(tmp_path: Path) -> None:
    out = tmp_path / "quick.json"
    more = "punica:2:3,conversation:6:5:base+skewed"
    flags = ["--batches", "1", "--kv-tokens", "8192"]
    assert quick.main([*FLAGS, *flags, "--more", more, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["failed"] == {}
    for name, requests, systems in (
        ("punica, 2 at once", 3, ["base", "distinct"]),
        ("conversation, 6 at once", 5, ["base", "skewed"]),
    ):
        rows = {key.removeprefix(f"{name}, "): row for key, row in report.items() if key.startswith(name)}
        assert {system: row["requests"] for system, row in rows.items()} == dict.fromkeys(systems, requests)
    assert report["punica, 2 at once, base"]["adapters"] == 0
    assert report["punica, 2 at once, distinct"]["adapters"] == 3


@pytest.mark.parametrize("text", ["poem:2:3", "punica:2", "punica:two:3", "punica:2:3:off", "punica:2:3:base:4"])
def test_a_workload_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quick.parser().parse_args([*FLAGS, "--more", text])
    assert "--more" in capsys.readouterr().err


def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = decode.measure_point

    def broken(session: object, batch: int, system: str, **options: object) -> object:
        if (batch, system) == (2, "identical"):
            raise RuntimeError("the device is tired")
        return real(session, batch, system, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(decode, "measure_point", broken)
    report = report_of(tmp_path / "quick.json", 1)
    assert report["failed"] == {"decode identical 2": "RuntimeError: the device is tired"}
    assert DECODE - {"decode identical 2"} | {"check"} <= report.keys()
    assert "decode identical 2" not in report
