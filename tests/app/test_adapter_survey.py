"""What the server says of its adapters before anybody asks for one."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from app.adapter_survey import MAX_LOGGED, Survey, SurveyThread, survey_adapters
from punica_core.adapters import kinds
from punica_core.adapters.registry import AdapterRegistry
from punica_core.adapters.report import AdapterReport, inspect_ref
from punica_core.adapters.shapes import ModelShapes
from punica_core.errors import AdapterError, AdapterInvalid, AdapterMismatch
from punica_core.protocol import AdapterRef, Progress

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


def refused_of(registry: AdapterRegistry, base: ModelShapes | None = None, max_lora_rank: int = 256) -> set[str]:
    refused: set[str] = set()
    survey_adapters(registry, base, max_lora_rank, refused)
    return refused


def test_refused_adapters_are_found_and_their_reasons_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert refused_of(registry_of(tmp_path)) == {"broken", "pickled"}
    assert len(caplog.messages) == 2
    assert any("'pickled'" in message and "punica adapters convert" in message for message in caplog.messages)


def test_folders_without_a_config_are_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("weights", "empty", "org/empty"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "weights" / "adapter_model.safetensors").write_bytes(b"")
    shutil.copytree(EXAMPLES / "sentiment", tmp_path / "other" / "sentiment")
    assert not refused_of(AdapterRegistry(tmp_path, ())), "they are not among the adapters, good or refused"
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
    surveying = SurveyThread(max_lora_rank)
    surveying.begin(AdapterRegistry(tmp_path, ()))
    surveying.on_progress(Progress("importing torch"))
    surveying.on_progress(Progress("loading", shapes=base))
    assert surveying.result(seconds=30) == Survey(frozenset({"sentiment"} if reason else ()))
    assert [reason in message and "'sentiment'" in message for message in caplog.messages] == [True] * bool(reason)


def test_adapters_are_looked_at_before_the_worker_is_ready(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    surveying = SurveyThread(256)
    surveying.begin(registry_of(tmp_path))
    time.sleep(0.05)
    assert not caplog.messages, "without the base's shapes it is too early"
    surveying.on_progress(Progress("loading", shapes=base_of(768)))
    assert surveying._ended.wait(30)
    assert sorted(message.split("'")[1] for message in caplog.messages) == ["broken", "pickled", "sentiment"]


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the adapters whose headers were parsed."""
    names: list[str] = []

    def noted(ref: AdapterRef, *arguments: object) -> object:
        names.append(ref.name)
        return inspect_ref(ref, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kinds, "inspect_ref", noted)
    return names


def test_of_adapters_whose_headers_say_the_same_one_is_parsed(tmp_path: Path, inspected: list[str]) -> None:
    for name in "abcd":
        shutil.copytree(EXAMPLES / "sentiment", tmp_path / name)
    with (tmp_path / "b" / "adapter_model.safetensors").open("r+b") as weights:
        weights.seek(-8, os.SEEK_END)
        weights.write(b"numbers!")
    config = tmp_path / "c" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 16', '"r": 8'))
    with (tmp_path / "d" / "adapter_model.safetensors").open("ab") as weights:
        weights.write(b"more")
    assert refused_of(AdapterRegistry(tmp_path, ())) == {"c", "d"}
    assert inspected == ["a", "c", "d"]


@pytest.mark.parametrize(("error", "looks"), [(AdapterMismatch, ["a"]), (AdapterInvalid, ["a", "b"])])
def test_what_may_be_wrong_with_one_alone_is_not_said_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[AdapterError], looks: list[str]
) -> None:
    inspected: list[str] = []

    def refuse(ref: AdapterRef, *arguments: object) -> object:
        inspected.append(ref.name)
        return AdapterReport(ref.name, ref.path).refused(error("no")), None

    monkeypatch.setattr(kinds, "inspect_ref", refuse)
    for name in "ab":
        shutil.copytree(EXAMPLES / "sentiment", tmp_path / name)
    assert refused_of(AdapterRegistry(tmp_path, ()), base_of(768)) == {"a", "b"}
    assert inspected == looks


def test_beside_requests_it_rests_after_each_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr("app.adapter_survey.time.sleep", rests.append)
    for beside, expected in ((False, 0), (True, 3)):
        surveying = SurveyThread(256)
        if beside:
            surveying.result(seconds=0)
        else:
            surveying.on_progress(Progress("loading", shapes=base_of(576)))
        surveying.begin(AdapterRegistry(tmp_path, ()) if beside else registry_of(tmp_path))
        assert surveying._ended.wait(30)
        assert len(rests) == expected


def test_nobody_waits_for_files_that_never_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted, registry = threading.Event(), registry_of(tmp_path)
    resolve = AdapterRegistry.resolve

    def held(registry: AdapterRegistry, name: str) -> AdapterRef:
        if name == "pickled":
            mounted.wait(30)
        return resolve(registry, name)

    monkeypatch.setattr(AdapterRegistry, "resolve", held)
    surveying = SurveyThread(256)
    surveying.begin(registry)
    assert surveying.result(seconds=0.1) == Survey(frozenset({"broken"}), complete=False)
    mounted.set()
    assert surveying.result(seconds=30) == Survey(frozenset({"broken", "pickled"}))


@pytest.mark.parametrize(
    ("error", "told", "has_traceback"),
    [(TimeoutError(), "does not answer", False), (ValueError("odd"), "not all looked at", True), (None, "", False)],
)
def test_a_survey_that_fails_says_so_and_keeps_nobody_waiting(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
    told: str,
    has_traceback: bool,
) -> None:
    def fail(registry: AdapterRegistry) -> list[str]:
        if error is not None:
            raise error
        return []

    monkeypatch.setattr(AdapterRegistry, "names", fail)
    surveying = SurveyThread(256)
    surveying.on_progress(Progress("loading", shapes=base_of(576)))
    surveying.begin(AdapterRegistry(tmp_path, ()))
    assert surveying._ended.wait(30)
    assert surveying.result(seconds=0) == Survey(complete=error is None)
    assert [told in record.message for record in caplog.records] == [True] * bool(told)
    assert [bool(record.exc_info) for record in caplog.records] == [has_traceback] * bool(told)


def test_of_many_refusals_the_first_are_logged_and_the_rest_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(MAX_LOGGED + 3):
        write_refused(tmp_path, f"a{index:02}")
    assert len(refused_of(AdapterRegistry(tmp_path, ()))) == MAX_LOGGED + 3
    assert len(caplog.messages) == MAX_LOGGED + 1
    assert caplog.messages[-1].startswith("3 more adapters")
