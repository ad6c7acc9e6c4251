"""What the kernel benchmark measures and writes, with times that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

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


def run(tmp_path: Path, *arguments: str) -> dict[str, object]:
    assert kernels.main(["--section", "groups", "--output", str(tmp_path), *arguments]) == 0
    return json.loads((tmp_path / "kernels.json").read_text())


def test_only_ours_leaves_out_the_competitors_and_nothing_else(timed, tmp_path) -> None:
    ours = run(tmp_path, "--only-ours")
    assert timed == []
    every = run(tmp_path)
    assert len(timed) == 36
    assert len(ours["groups"]) == len(every["groups"]) == 648
    for row, other in zip(ours["groups"], every["groups"], strict=True):
        assert "loop" not in row
        assert row == {key: value for key, value in other.items() if key not in ("base", "loop", "gather_bmm")}
    assert sum("loop" in row for row in every["groups"]) == 36


def test_groups_are_summed_up(timed, tmp_path) -> None:
    result = run(tmp_path, "--only-ours")
    over = sum(row["us"] > row["target"] for row in result["groups"])
    assert 0 < over < 648
    assert result["groups_summary"]["points"] == 648
    assert result["groups_summary"]["over_target"] == over
