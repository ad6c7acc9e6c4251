"""Adapters named by path: what lies below a root, what only seems to, and what becomes of names that are taken away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from punica_core.adapters.listing import FULL_LISTING_SECONDS, LISTING_SECONDS
from punica_core.adapters.registry import AdapterRegistry
from punica_core.adapters.roots import AdapterRoots
from punica_core.errors import AdapterInvalid, AdapterUnsupported, InvalidRequest, ModelNotFound
from tests.adapters.test_registry import Clock, make_adapter, remove


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """adapters/{listed,org/nested} is the directory; more/{a,deep/er/b} another root; outside/secret neither."""
    for path in ("adapters/listed", "adapters/org/nested", "more/a", "more/deep/er/b", "outside/secret"):
        make_adapter(tmp_path / path)
    return tmp_path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(places: Path, clock: Clock) -> AdapterRegistry:
    roots = AdapterRoots([str(places / "adapters"), str(places / "more")])
    return AdapterRegistry(places / "adapters", {"base"}, clock, roots)


@pytest.mark.parametrize("path", ["deep/er/b", "./deep//er/b/", "deep/er/../er/b", "{more}/deep/er/b"])
def test_a_folder_below_a_root_is_found_by_any_spelling(registry: AdapterRegistry, places: Path, path: str) -> None:
    ref = registry.locate("new", path.replace("{more}", str(places / "more")))
    assert (ref.name, ref.path) == ("new", str(places / "more" / "deep" / "er" / "b"))


@pytest.mark.parametrize(
    "path",
    ["{outside}/secret", "../outside/secret", "a/../../outside/secret", "/", "..", "{more}", ".", "{outside}/nothing"],
)
def test_whatever_leads_out_of_the_roots_is_refused_in_the_same_words(
    registry: AdapterRegistry, places: Path, path: str
) -> None:
    given = path.replace("{outside}", str(places / "outside")).replace("{more}", str(places / "more"))
    with pytest.raises(InvalidRequest) as caught:
        registry.locate("new", given)
    assert caught.value.message == "lora_path does not lie below one of the adapter roots."


@pytest.mark.parametrize("path", ["", "a\0", "x" * 5000])
def test_what_is_no_path_is_refused(registry: AdapterRegistry, path: str) -> None:
    with pytest.raises(InvalidRequest, match="lora_path must have"):
        registry.locate("new", path)


def test_links_are_followed_below_the_roots_only(registry: AdapterRegistry, places: Path) -> None:
    (places / "more" / "inner").symlink_to(places / "adapters" / "listed")
    (places / "more" / "outer").symlink_to(places / "outside" / "secret")
    assert registry.locate("new", "inner").path == str(places / "adapters" / "listed")
    with pytest.raises(InvalidRequest, match="adapter roots"):
        registry.locate("new", str(places / "more" / "outer"))


def test_a_file_that_is_a_link_to_elsewhere_is_not_there(registry: AdapterRegistry, places: Path) -> None:
    weights = places / "more" / "a" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(places / "outside" / "secret" / "adapter_model.safetensors")
    with pytest.raises(AdapterInvalid, match="has no weights"):
        registry.locate("new", "a")
    weights.unlink()
    weights.symlink_to(places / "adapters" / "listed" / "adapter_model.safetensors")  # as download caches do
    assert registry.locate("new", "a").weights_signature.inode == os.stat(weights).st_ino


@pytest.mark.parametrize("swapped", ["a", "deep", "deep/er"])
def test_a_folder_swapped_for_a_link_after_it_was_resolved_is_not_followed(
    places: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    roots = AdapterRoots([str(places / "more")])
    path = places / "more" / ("a" if swapped == "a" else "deep/er/b") / "adapter_config.json"
    assert roots.stat(str(path)) is not None
    (places / "outside" / "er" / "b").mkdir(parents=True)
    for folder in (places / "outside", places / "outside" / "b", places / "outside" / "er" / "b"):
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
    real = os.path.realpath

    def resolve_then_swap(given: str) -> str:
        place = real(given)
        (places / "more" / swapped).rename(places / "gone")
        (places / "more" / swapped).symlink_to(places / "outside")
        return place

    monkeypatch.setattr(os.path, "realpath", resolve_then_swap)
    assert roots.stat(str(path)) is None
    monkeypatch.undo()
    assert os.stat(path)  # there is something to find where the link leads
    assert roots.stat(str(path)) is None


def test_without_roots_nothing_can_be_named_by_path(places: Path) -> None:
    with pytest.raises(InvalidRequest, match="--adapter-roots"):
        AdapterRegistry(None, {"base"}).locate("new", str(places / "more" / "a"))


def test_folders_that_are_no_adapters_are_told_apart(registry: AdapterRegistry, places: Path) -> None:
    (places / "more" / "empty").mkdir()
    (places / "more" / "pickled").mkdir()
    (places / "more" / "pickled" / "adapter_config.json").write_text("{}")
    (places / "more" / "pickled" / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelNotFound, match="no folder"):
        registry.locate("new", "nothing")
    with pytest.raises(ModelNotFound, match="no folder"):
        registry.locate("new", "a/adapter_config.json")
    with pytest.raises(ModelNotFound, match=r"no adapter_config\.json"):
        registry.locate("new", "empty")
    with pytest.raises(AdapterUnsupported, match="pickled"):
        registry.locate("new", "pickled")


@pytest.mark.parametrize("name", ["base", "", "a//b", "/a", "a/", ".hidden", "a/..", "x" * 201, "a\nb", "a\\b"])
def test_names_that_cannot_be_asked_for_are_refused(registry: AdapterRegistry, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        registry.locate(name, "a")
    assert caught.value.param == "lora_name"


def test_an_added_adapter_is_listed_and_resolved_until_it_is_removed(registry: AdapterRegistry, places: Path) -> None:
    ref = registry.locate("team/x/new", "a")
    assert not registry.exists("team/x/new")
    registry.add(ref)
    assert registry.exists("team/x/new")
    assert registry.names() == ["listed", "org/nested", "team/x/new"]
    assert registry.resolve("team/x/new") == ref
    (places / "more" / "a" / "adapter_model.safetensors").write_bytes(b"other weights")
    assert registry.resolve("team/x/new") != ref  # a new version, as in the directory
    assert registry.serves(ref.path)
    assert remove(registry, "team/x/new") == ref.path
    assert registry.names() == ["listed", "org/nested"]
    assert not registry.serves(ref.path)
    for gone in (registry.resolve, registry.removable):
        with pytest.raises(ModelNotFound):
            gone("team/x/new")


def test_a_removed_folder_of_the_directory_is_hidden_until_it_is_added(
    registry: AdapterRegistry, places: Path, clock: Clock
) -> None:
    folder = remove(registry, "listed")
    assert folder == str(places / "adapters" / "listed")
    assert not registry.serves(folder)
    for _ in range(2):
        assert registry.names() == ["org/nested"]
        assert not registry.exists("listed")
        with pytest.raises(ModelNotFound):
            registry.resolve("listed")
        clock.now += FULL_LISTING_SECONDS
    registry.add(registry.locate("listed", "listed"))
    assert registry.resolve("listed").path == folder
    assert registry.names() == ["listed", "org/nested"]


def test_a_removed_folder_that_went_and_came_back_is_another(
    registry: AdapterRegistry, places: Path, clock: Clock
) -> None:
    remove(registry, "listed")
    (places / "adapters" / "listed").rename(places / "elsewhere")
    clock.now += LISTING_SECONDS
    assert registry.names() == ["org/nested"]
    (places / "elsewhere").rename(places / "adapters" / "listed")
    clock.now += LISTING_SECONDS
    assert registry.names() == ["listed", "org/nested"]


def test_what_is_not_visible_does_not_exist_and_is_in_no_hint(registry: AdapterRegistry) -> None:
    def told(name: str, visible: bool) -> str:
        with pytest.raises(ModelNotFound) as caught:
            registry.resolve(name, lambda other: visible and other == "listed")
        return caught.value.message

    assert registry.resolve("listed", lambda other: other == "listed").name == "listed"
    for name in ("org/nested", "org/nothing"):  # one exists
        assert told(name, visible=True) == f"The model {name!r} does not exist."
    assert told("liste", visible=True).endswith("Did you mean 'listed'?")
    assert told("liste", visible=False).endswith("exist.")


def test_a_name_that_is_not_visible_is_not_looked_for(
    registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.names()  # what is listed is known
    looked: list[str] = []
    real = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path, **options: (looked.append(str(path)), real(path, **options))[1])
    with pytest.raises(ModelNotFound):
        registry.resolve("listed", lambda name: False)
    assert looked == []
    registry.resolve("listed")
    assert looked


def test_a_packed_file_below_a_root_can_be_added(registry: AdapterRegistry, places: Path) -> None:
    file = places / "more" / "deep" / "p.punica"
    file.write_bytes(b"packed")
    ref = registry.locate("new", "deep/p.punica")
    assert (ref.path, ref.packed) == (str(file), True)
    registry.add(ref)
    assert registry.resolve("new") == ref
    assert remove(registry, "new") == str(file)
    (places / "outside" / "p.punica").write_bytes(b"packed")
    with pytest.raises(InvalidRequest, match="adapter roots"):
        registry.locate("new", "../outside/p.punica")
    with pytest.raises(ModelNotFound, match=r"no folder and no \.punica file"):
        registry.locate("new", "deep/q.punica")
