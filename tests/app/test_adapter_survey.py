"""What the server says of its adapters before anybody asks for one."""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path

import pytest

from app.adapter_survey import MAX_LOGGED, Survey, SurveyThread, survey_adapters
from punica_core.adapters.registry import AdapterRegistry
from punica_core.protocol import AdapterRef

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"


def write_refused(root: Path, name: str) -> None:
    folder = root / name
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")


def registry_of(root: Path) -> AdapterRegistry:
    shutil.copytree(EXAMPLES / "sentiment", root / "sentiment")
    write_refused(root, "broken")
    (root / "pickled").mkdir()
    (root / "pickled" / "adapter_config.json").write_text("{}")
    (root / "pickled" / "adapter_model.bin").write_bytes(b"")
    return AdapterRegistry(root, ())


def test_refused_adapters_are_found_and_their_reasons_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    survey = survey_adapters(registry_of(tmp_path), 256)
    assert (survey.refused, survey.complete) == ({"broken", "pickled"}, True)
    assert len(caplog.messages) == 2
    assert any("'pickled'" in message and "punica adapters convert" in message for message in caplog.messages)


def test_it_ends_in_time_and_says_that_it_has_not_seen_all(tmp_path: Path) -> None:
    ticks = itertools.count()
    survey = survey_adapters(registry_of(tmp_path), 256, seconds=2.5, clock=lambda: float(next(ticks)))
    assert (survey.refused, survey.complete) == ({"broken", "pickled"}, False)


def test_nobody_waits_for_files_that_never_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted, registry = threading.Event(), registry_of(tmp_path)
    resolve = AdapterRegistry.resolve

    def held(registry: AdapterRegistry, name: str) -> AdapterRef:
        if name == "pickled":
            mounted.wait(30)
        return resolve(registry, name)

    monkeypatch.setattr(AdapterRegistry, "resolve", held)
    surveying = SurveyThread(registry, 256)
    assert surveying.result(seconds=0.1) == Survey(complete=False)
    mounted.set()
    assert surveying.result(seconds=30).refused == {"broken", "pickled"}


def test_of_many_refusals_the_first_are_logged_and_the_rest_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(MAX_LOGGED + 3):
        write_refused(tmp_path, f"a{index:02}")
    survey = survey_adapters(AdapterRegistry(tmp_path, ()), 256)
    assert len(survey.refused) == MAX_LOGGED + 3
    assert len(caplog.messages) == MAX_LOGGED + 1
    assert caplog.messages[-1].startswith("3 more adapters")
