"""What the kernel benchmark measures and writes, with times that are made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from punica_core.bench import kernels


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every call takes 6 µs; the cases whose competitors were timed."""
    cases: list[object] = []

    class Competitors:
        base = loop = gather_bmm = staticmethod(lambda index: None)

        def __init__(self, case: object) -> None:
            cases.append(case)

    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(kernels.cuda, "load", lambda library: None)
    monkeypatch.setattr(
        kernels, "GroupCase", lambda group, step, dtype: SimpleNamespace(group=group, step=step, num_sets=1)
    )
    monkeypatch.setattr(kernels, "time_graph_us", lambda call, calls: 6.0)
    monkeypatch.setattr(kernels, "Competitors", Competitors)
    return cases


def run(tmp_path: Path, *arguments: str, section: str = "groups") -> dict[str, object]:
    assert kernels.main(["--section", section, "--output", str(tmp_path), *arguments]) == 0
    return json.loads((tmp_path / "kernels.json").read_text())


def test_only_ours_leaves_out_the_competitors_and_nothing_else(timed, tmp_path) -> None:
    ours = run(tmp_path, "--only-ours")
    assert timed == []
    every = run(tmp_path)
    assert len(timed) == 216
    assert len(ours["groups"]) == len(every["groups"]) == 648
    for row, other in zip(ours["groups"], every["groups"], strict=True):
        assert "loop" not in row
        assert row == {key: value for key, value in other.items() if key not in ("base", "loop", "gather_bmm")}
    others = [row for row in every["groups"] if "loop" in row]
    assert len(others) == 216
    assert {row["batch"] for row in others} == {1, 8, 64}
    assert {tuple(row["ranks"]) for row in others} == {(8,), (16,), (32,), (64,), (128,), (8, 16, 32, 64, 128)}
    assert all({"base", "gather_bmm"} <= row.keys() for row in others)


def test_a_competitor_that_does_not_fit_is_left_out(timed, tmp_path, monkeypatch) -> None:
    def out_of_memory(index: int) -> None:
        raise torch.OutOfMemoryError("no room")

    def time(call: Callable[[int], None], calls: int) -> float:
        if call is out_of_memory:
            call(0)
        return 6.0

    monkeypatch.setattr(kernels, "time_graph_us", time)
    monkeypatch.setattr(kernels.Competitors, "gather_bmm", staticmethod(out_of_memory))
    rows = run(tmp_path)["groups"]
    assert sum("loop" in row and "base" in row for row in rows) == 216
    assert not any("gather_bmm" in row for row in rows)


@pytest.mark.parametrize("section", ["points", "groups"])
def test_rows_have_bytes_and_share_of_bandwidth(timed, tmp_path, section) -> None:
    rows = run(tmp_path, "--only-ours", section=section)[section]
    assert len(rows) == {"points": 162, "groups": 648}[section]
    for row in rows:
        assert row["bytes"] / 4.18e6 == pytest.approx(row["floor"], abs=0.01)
        assert row["bandwidth_share"] == pytest.approx(row["bytes"] / 6.0 / 4.18e6, abs=0.001)
    one = next(row for row in rows if row["batch"] == 1 and row.get("group", "qkv") == "qkv")
    outs, lora_rank = ((4096,), 16) if section == "points" else ((4096, 1024, 1024), 8)
    matrices = lora_rank * (4096 * len(outs) + sum(outs))
    assert one["bytes"] == 2 * (matrices + 4096 + 2 * sum(outs))


def test_the_report_says_how_it_was_made(timed, tmp_path) -> None:
    provenance = run(tmp_path, "--only-ours")["provenance"]
    assert provenance["command"] == f"punica bench kernels --section groups --output {tmp_path.name} --only-ours"
    assert provenance.keys() >= {"date", "commit", "source", "versions"}


def test_groups_are_summed_up(timed, tmp_path) -> None:
    result = run(tmp_path, "--only-ours")
    over = sum(row["us"] > row["target"] for row in result["groups"])
    assert 0 < over < 648
    assert result["groups_summary"]["points"] == 648
    assert result["groups_summary"]["over_target"] == over


@pytest.mark.parametrize("installed", [True, False])
def test_points_are_drawn_if_there_is_matplotlib(
    installed: bool, timed, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(tmp_path, "--only-ours", section="points")
    assert (tmp_path / "kernels.png").exists() == installed
    assert ("no picture" in capsys.readouterr().err) != installed
