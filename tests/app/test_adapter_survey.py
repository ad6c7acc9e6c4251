"""What the server says of its adapters before anybody asks for one."""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path

import pytest

from app.adapter_survey import MAX_LOGGED, Survey, SurveyThread, survey_adapters
from punica_core.adapters.registry import AdapterRegistry
from punica_core.adapters.shapes import ModelShapes
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


def test_folders_without_a_config_are_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("weights", "empty", "org/empty"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "weights" / "adapter_model.safetensors").write_bytes(b"")
    shutil.copytree(EXAMPLES / "sentiment", tmp_path / "other" / "sentiment")
    survey = survey_adapters(AdapterRegistry(tmp_path, ()), 256)
    assert survey == Survey(), "they are not among the adapters, good or refused"
    (told,) = caplog.messages
    assert told == "Without adapter_config.json, and so no adapters: 'empty', 'org/empty', 'weights'."


def base_of(width: int, layers: int = 30) -> ModelShapes:
    """What the demo's adapters were trained on has a width of 576, 30 layers, and a third of it as keys and values."""
    shapes = {"q_proj": (width, width), "v_proj": (width, width // 3)}
    paths = [f"model.layers.{layer}.self_attn" for layer in range(layers)]
    return ModelShapes({f"{path}.{leaf}": shape for path in paths for leaf, shape in shapes.items()})


@pytest.mark.parametrize(
    ("base", "max_lora_rank", "reason"),
    [
        (base_of(576), 16, ""),
        (base_of(768), 16, "Was it trained on another base model?"),
        (base_of(576, layers=12), 16, "are not in the base model"),
        (base_of(576), 8, "rank 16 > max 8"),
        (None, 16, ""),
    ],
    ids=["fits", "another width", "fewer layers", "a lower limit", "an engine that does not tell"],
)
def test_what_does_not_fit_the_base_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, base: ModelShapes | None, max_lora_rank: int, reason: str
) -> None:
    shutil.copytree(EXAMPLES / "sentiment", tmp_path / "sentiment")
    survey = SurveyThread(AdapterRegistry(tmp_path, ()), max_lora_rank).result(base, seconds=30)
    assert survey == Survey(frozenset({"sentiment"} if reason else ()))
    assert [reason in message and "'sentiment'" in message for message in caplog.messages] == [True] * bool(reason)


@pytest.mark.parametrize(("late", "found"), [(False, True), (True, False)])
def test_the_look_at_the_base_ends_in_time_too(tmp_path: Path, late: bool, found: bool) -> None:
    times = [0.0, *([0.0] * 3), 10.0, 13.0 if late else 11.0]  # of a start, three adapters, and the same with the base
    survey = survey_adapters(registry_of(tmp_path), 256, lambda: base_of(768), seconds=2, clock=iter(times).__next__)
    assert ("sentiment" in survey.refused, survey.complete) == (found, found)


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
    assert surveying.result(None, seconds=0.1) == Survey(complete=False)
    mounted.set()
    assert surveying.result(None, seconds=30).refused == {"broken", "pickled"}


def test_of_many_refusals_the_first_are_logged_and_the_rest_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(MAX_LOGGED + 3):
        write_refused(tmp_path, f"a{index:02}")
    survey = survey_adapters(AdapterRegistry(tmp_path, ()), 256)
    assert len(survey.refused) == MAX_LOGGED + 3
    assert len(caplog.messages) == MAX_LOGGED + 1
    assert caplog.messages[-1].startswith("3 more adapters")
