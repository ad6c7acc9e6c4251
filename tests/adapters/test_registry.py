"""Names and folders: what is listed, what is found, and what never reaches the file system."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from punica_core.adapters import listing as listing_module
from punica_core.adapters.listing import FULL_LISTING_SECONDS, LISTING_SECONDS
from punica_core.adapters.registry import AdapterRegistry
from punica_core.errors import AdapterInvalid, AdapterUnsupported, ModelNotFound


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def remove(registry: AdapterRegistry, name: str) -> str:
    """What unloading does; the folder."""
    folder, is_listed = registry.removable(name)
    registry.remove(name, is_listed)
    return folder


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "adapters"
    for name in ("A", "B", "org/nested", "base"):
        make_adapter(path / name)
    (path / "empty").mkdir()
    (path / "a-file").write_text("")
    make_adapter(path / ".hidden")
    make_adapter(tmp_path / "outside")
    return path


@pytest.fixture
def registry(root: Path, clock: Clock) -> AdapterRegistry:
    return AdapterRegistry(root, {"base"}, clock)


def make_adapter(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")


def settle(root: Path) -> None:
    """Date the directories back, so that a listing of them is not of a racy moment."""
    for path in (root, *(folder for folder in root.iterdir() if folder.is_dir())):
        os.utime(path, (time.time() - 60, time.time() - 60))


def test_folders_with_a_config_are_listed(registry: AdapterRegistry) -> None:
    assert registry.names() == ["A", "B", "org/nested"]


def test_no_directory_means_no_adapters(tmp_path: Path) -> None:
    assert AdapterRegistry(None, {"base"}).names() == []
    assert AdapterRegistry(tmp_path / "absent", {"base"}).names() == []
    with pytest.raises(ModelNotFound):
        AdapterRegistry(None, ()).resolve("A")


@pytest.mark.parametrize("name", ["A", "org/nested"])
def test_a_name_resolves_to_its_folder_and_signatures(registry: AdapterRegistry, root: Path, name: str) -> None:
    ref = registry.resolve(name)
    status = os.stat(root / name / "adapter_model.safetensors")
    assert (ref.name, ref.path) == (name, str(root / name))
    assert (ref.weights_signature.inode, ref.weights_signature.size) == (status.st_ino, len(b"weights"))


def test_new_weights_make_a_new_ref(registry: AdapterRegistry, root: Path) -> None:
    before = registry.resolve("A")
    (root / "new").write_bytes(b"WEIGHTS")
    os.replace(root / "new", root / "A" / "adapter_model.safetensors")
    after = registry.resolve("A")
    assert before.weights_signature != after.weights_signature
    assert before.config_signature == after.config_signature


def test_a_new_folder_resolves_at_once(registry: AdapterRegistry, root: Path) -> None:
    registry.names()
    make_adapter(root / "new")
    assert registry.resolve("new").name == "new"


def test_a_new_folder_is_listed_a_second_later(registry: AdapterRegistry, root: Path, clock: Clock) -> None:
    settle(root)
    registry.names()
    make_adapter(root / "new")
    clock.now += LISTING_SECONDS
    assert "new" in registry.names()


def test_a_new_folder_within_the_timestamps_grain_is_listed(
    registry: AdapterRegistry, root: Path, clock: Clock
) -> None:
    now = time.time_ns()
    os.utime(root, ns=(now, now))
    registry.names()
    make_adapter(root / "new")
    os.utime(root, ns=(now, now))
    clock.now += LISTING_SECONDS
    assert "new" in registry.names()


@pytest.mark.parametrize("folder", ["empty", "org/later"])
def test_a_folder_that_gets_its_config_later_is_listed(
    registry: AdapterRegistry, root: Path, clock: Clock, folder: str
) -> None:
    (root / folder).mkdir(exist_ok=True)
    settle(root)
    registry.names()
    (root / folder / "adapter_config.json").write_text("{}")
    clock.now += LISTING_SECONDS
    assert folder in registry.names()


def test_a_removed_folder_is_no_longer_listed(registry: AdapterRegistry, root: Path, clock: Clock) -> None:
    settle(root)
    registry.names()
    shutil.rmtree(root / "A")
    clock.now += LISTING_SECONDS
    assert registry.names() == ["B", "org/nested"]


def test_a_removed_config_is_noticed_by_the_next_full_listing(
    registry: AdapterRegistry, root: Path, clock: Clock
) -> None:
    settle(root)
    registry.names()
    (root / "A" / "adapter_config.json").unlink()
    with pytest.raises(ModelNotFound):
        registry.resolve("A")
    clock.now += FULL_LISTING_SECONDS
    assert registry.names() == ["B", "org/nested"]


def test_an_unchanged_directory_is_not_listed_again(
    registry: AdapterRegistry, root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(root)
    before = registry.names()
    monkeypatch.setattr(listing_module.os, "scandir", _forbidden)
    clock.now += LISTING_SECONDS
    assert registry.names() == before


def _forbidden(*arguments: Any) -> Any:
    raise AssertionError(f"the file system was asked for {arguments}")


OUTSIDE = [
    "../outside",
    "A/../../outside",
    "..",
    ".",
    "",
    "/",
    "/etc",
    "A/",
    "./A",
    "A//nested",
    "org/nested/deeper",
    "A\0",
    "A\\",
    "..\\outside",
    ".hidden",
    "A\n",
    "\ud800",
    "x" * 300,
    "x" * 1_000_000,
]


@pytest.mark.parametrize("name", OUTSIDE, ids=lambda name: repr(name)[:20])
def test_what_cannot_be_a_name_never_reaches_the_file_system(
    registry: AdapterRegistry, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.names()
    for call in ("lstat", "stat", "open", "scandir"):
        monkeypatch.setattr(listing_module.os, call, _forbidden)
    with pytest.raises(ModelNotFound) as caught:
        registry.resolve(name)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("name", ["outside", "..%2foutside", '"A', " A ", "a", "é" * 100, "empty", "a-file", "org"])
def test_other_names_are_not_found(registry: AdapterRegistry, root: Path, name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        registry.resolve(name)
    assert str(root) not in caught.value.message
    assert caught.value.param == "model"


@pytest.mark.parametrize("name", ["a", '"A', " A ", "A/"])
def test_a_misspelt_name_is_answered_with_the_right_one(registry: AdapterRegistry, name: str) -> None:
    with pytest.raises(ModelNotFound, match="Did you mean 'A'"):
        registry.resolve(name)


@pytest.mark.parametrize(("deleted", "hint"), [("A", None), ("org/nested", " Did you mean 'org/nesting'?")])
def test_a_deleted_adapter_is_not_its_own_correction(
    registry: AdapterRegistry, root: Path, deleted: str, hint: str | None
) -> None:
    make_adapter(root / "org" / "nesting")
    registry.names()
    shutil.rmtree(root / deleted)
    with pytest.raises(ModelNotFound) as caught:
        registry.resolve(deleted)
    assert caught.value.message == f"The model {deleted!r} does not exist.{hint or ''}"


def test_a_folder_named_as_the_base_model_loses(registry: AdapterRegistry, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert "base" not in registry.names()
    assert "name of the base model" in caplog.text
    with pytest.raises(ModelNotFound):
        registry.resolve("base")


def test_a_link_out_of_the_directory_is_neither_listed_nor_found(
    registry: AdapterRegistry, root: Path, tmp_path: Path
) -> None:
    (root / "link").symlink_to(tmp_path / "outside")
    assert "link" not in registry.names()
    with pytest.raises(ModelNotFound):
        registry.resolve("link")


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_links_out_of_the_directory_is_not_used(
    registry: AdapterRegistry, root: Path, tmp_path: Path, file: str
) -> None:
    (root / "A" / file).unlink()
    (root / "A" / file).symlink_to(tmp_path / "outside" / file)
    with pytest.raises((ModelNotFound, AdapterInvalid)):
        registry.resolve("A")


def test_a_link_that_leads_nowhere_hides_no_other(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = AdapterRegistry(root, ()).names()
    assert len(names) > 1
    for place in ("0", "M", "zz"):
        (root / place).symlink_to(place)
    assert AdapterRegistry(root, ()).names() == names
    assert [word for word in ("'0'", "'M'", "'zz'") if word in caplog.text] == ["'0'", "'M'", "'zz'"]
    assert "Too many levels of symbolic links" in caplog.text


def test_links_inside_the_directory_are_followed(registry: AdapterRegistry, root: Path) -> None:
    (root / "alias").symlink_to(root / "A")
    assert "alias" in registry.names()
    assert registry.resolve("alias").weights_signature == registry.resolve("A").weights_signature


def test_a_folder_without_a_config_is_told_as_such(registry: AdapterRegistry, root: Path) -> None:
    def told(name: str) -> str:
        with pytest.raises(ModelNotFound) as caught:
            registry.resolve(name)
        return caught.value.message

    assert told("empty") == "The model 'empty' does not exist: its folder has no adapter_config.json."
    assert told("a-file") == "The model 'a-file' does not exist."
    assert told("nothing") == "The model 'nothing' does not exist."
    with pytest.raises(ModelNotFound, match=r"'empty' does not exist\.$"):
        registry.resolve("empty", lambda name: name != "empty")
    assert registry.names() == ["A", "B", "org/nested"]
    assert registry.names_without_config() == ["empty"], "but not what holds adapters"


def test_missing_weights_are_told_as_such(registry: AdapterRegistry, root: Path) -> None:
    (root / "A" / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterInvalid, match=r"^it has no weights.*try again"):
        registry.resolve("A")


def test_pickled_weights_are_refused_with_the_conversion(registry: AdapterRegistry, root: Path, tmp_path: Path) -> None:
    (root / "A" / "adapter_model.safetensors").rename(root / "A" / "adapter_model.bin")
    (root / "A" / "adapter_model.bin").write_bytes(pickle.dumps(tmp_path))
    with pytest.raises(AdapterUnsupported, match="punica adapters convert"):
        registry.resolve("A")


def test_a_fifo_as_weights_is_refused_at_once(registry: AdapterRegistry, root: Path) -> None:
    (root / "A" / "adapter_model.safetensors").unlink()
    os.mkfifo(root / "A" / "adapter_model.safetensors")
    with pytest.raises(AdapterInvalid, match="not a regular file"):
        registry.resolve("A")


def test_a_fifo_as_config_is_no_adapter(registry: AdapterRegistry, root: Path, clock: Clock) -> None:
    (root / "A" / "adapter_config.json").unlink()
    os.mkfifo(root / "A" / "adapter_config.json")
    assert "A" not in registry.names()
    with pytest.raises(ModelNotFound):
        registry.resolve("A")


def test_a_packed_file_hides_no_adapters_in_a_folder_of_its_stem(
    root: Path, registry: AdapterRegistry, clock: Clock
) -> None:
    (root / "org.punica").write_bytes(b"packed")
    before = registry.names()
    assert {"org", "org/nested"} <= set(before)
    make_adapter(root / "C")  # so that the directory is listed again, without a second look at what is known
    clock.now += LISTING_SECONDS
    assert registry.names() == sorted([*before, "C"])


def test_packed_files_are_adapters_under_their_stem(root: Path, clock: Clock) -> None:
    (root / "P.punica").write_bytes(b"packed")
    (root / "org" / "Q.punica").write_bytes(b"packed")
    (root / ".punica").write_bytes(b"no stem")
    (root / "D.punica").mkdir()  # a folder without a config
    make_adapter(root / "E.punica")  # a folder of that name
    registry = AdapterRegistry(root, {"base"}, clock)
    assert registry.names() == ["A", "B", "E.punica", "P", "org/Q", "org/nested"]
    ref = registry.resolve("P")
    assert (ref.path, ref.packed) == (str(root / "P.punica"), True)
    assert ref.weights_signature == ref.config_signature
    assert ref.weights_signature.inode == (root / "P.punica").stat().st_ino
    assert registry.resolve("org/Q").packed
    assert not registry.resolve("E.punica").packed
    assert registry.serves(ref.path)
    for name in ("P.punica", "D", "D.punica", "E", ""):
        with pytest.raises(ModelNotFound):
            registry.resolve(name)


def test_packed_files_come_change_and_go(root: Path, registry: AdapterRegistry, clock: Clock) -> None:
    settle(root)
    assert "P" not in registry.names()
    file = root / "P.punica"
    file.write_bytes(b"packed")
    before = registry.resolve("P")
    clock.now += LISTING_SECONDS
    assert "P" in registry.names()
    file.write_bytes(b"packed anew")
    assert registry.resolve("P") != before
    assert remove(registry, "P") == str(file)
    assert "P" not in registry.names()
    assert not registry.serves(str(file))
    with pytest.raises(ModelNotFound):
        registry.resolve("P")
    clock.now += LISTING_SECONDS
    assert "P" not in registry.names(), "hidden while it is there"
    file.unlink()
    clock.now += FULL_LISTING_SECONDS
    registry.names()
    file.write_bytes(b"again")
    assert registry.resolve("P").packed


def test_a_folder_wins_over_a_packed_file_of_its_name(
    root: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "A.punica").write_bytes(b"packed")
    registry = AdapterRegistry(root, {"base"}, clock)
    with caplog.at_level(logging.WARNING):
        assert registry.names().count("A") == 1
    assert "packed adapter 'A.punica' is not served" in caplog.text
    assert not registry.resolve("A").packed
    assert not registry.serves(str(root / "A.punica"))
    shutil.rmtree(root / "A")
    assert registry.resolve("A").packed


def test_a_packed_file_that_is_a_link_out_does_not_exist(root: Path, tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "outside" / "x.punica").write_bytes(b"packed")
    (root / "L.punica").symlink_to(tmp_path / "outside" / "x.punica")
    os.mkfifo(root / "F.punica")
    registry = AdapterRegistry(root, {"base"}, clock)
    assert not {"L", "F"} & set(registry.names())
    for name in ("L", "F"):
        with pytest.raises(ModelNotFound):
            registry.resolve(name)
