"""The host tier: reads on threads, single flight, pins, failures that pass, content that never mixes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from punica_core.adapters.files import SourceFile
from punica_core.adapters.format import ModelShapes
from punica_core.errors import AdapterChanged, AdapterError, AdapterInvalid, AdapterTooLarge
from punica_core.lora import cache as cache_module
from punica_core.lora.cache import AdapterCache
from punica_core.lora.weights import load_adapter
from punica_core.protocol import AdapterRef
from punica_core.scheduler.plan import AdapterGrant, SkipReason
from tests.support.adapter_loading import PATIENCE, granted, refused
from tests.support.peft_adapters import adapter_ref, edit_config, edit_tensors, read_tensors

Make = Callable[..., AdapterCache]


def test_a_cold_adapter_loads_in_the_background_and_is_granted(make_cache: Make, adapter: Path) -> None:
    cache, ref = make_cache(), adapter_ref(adapter)
    assert cache.acquire(ref) is SkipReason.ADAPTER_LOADING
    grant = granted(cache, ref)
    tensors = read_tensors(adapter)
    weights = cache.weights(grant.slot)
    assert weights.key == grant.adapter_key
    for path, module in weights.modules.items():
        assert torch.equal(module.a, tensors[f"base_model.model.{path}.lora_A.weight"])
        assert torch.equal(module.b, tensors[f"base_model.model.{path}.lora_B.weight"])
        assert module.scale == 2.0


def test_fifty_first_requests_are_one_load(make_cache: Make, adapter: Path) -> None:
    cache, ref = make_cache(), adapter_ref(adapter)
    assert {cache.acquire(ref) for _ in range(50)} <= {SkipReason.ADAPTER_LOADING, granted(cache, ref)}
    grants = {granted(cache, ref) for _ in range(50)}
    assert len(grants) == 1
    assert [(load.name, load.tier, load.outcome) for load in cache.stats().loads] == [("A", "host", "ok")]


def test_acquiring_from_many_threads_is_one_load(make_cache: Make, adapter: Path) -> None:
    cache, ref = make_cache(), adapter_ref(adapter)
    barrier = threading.Barrier(20)

    def ask() -> None:
        barrier.wait()
        if isinstance(cache.acquire(ref), AdapterGrant):
            cache.release(ref)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    granted(cache, ref)
    assert len(cache.stats().loads) == 1


def test_more_adapters_than_fit_are_all_served_twice_round(make_cache: Make, folders: list[Path]) -> None:
    size = load_size(make_cache, folders[0])
    cache = make_cache(2 * size, retry_seconds=0.0)
    for folder in (*folders, *folders):
        ref = adapter_ref(folder)
        weights = cache.weights(granted(cache, ref).slot)
        expected = read_tensors(folder)["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
        assert torch.equal(weights.modules["model.layers.1.self_attn.q_proj"].a, expected)
        cache.release(ref)
    stats = cache.stats()
    assert stats.resident == 2
    assert stats.bytes_used == 2 * size
    assert stats.evictions == 8


def load_size(make_cache: Make, folder: Path) -> int:
    cache = make_cache()
    granted(cache, adapter_ref(folder))
    return cache.stats().bytes_used


def test_a_pinned_adapter_is_not_evicted_and_the_next_one_is_told_so(make_cache: Make, folders: list[Path]) -> None:
    cache = make_cache(load_size(make_cache, folders[0]))
    first, second = adapter_ref(folders[0]), adapter_ref(folders[1])
    kept = cache.weights(granted(cache, first).slot)
    cache.acquire(second)
    assert cache.wait_for_load(PATIENCE)
    assert cache.acquire(second) is SkipReason.ADAPTER_NO_ROOM
    assert [cache.fits_without(second, unused) for unused in ([], [first])] == [False, True]
    assert cache.weights(granted(cache, first).slot) is kept
    cache.release(first)
    assert cache.acquire(second) is SkipReason.ADAPTER_NO_ROOM, "one of two pins is left"
    cache.release(first)
    granted(cache, second)


def test_a_hundred_dropped_requests_leave_nothing_pinned(make_cache: Make, folders: list[Path]) -> None:
    cache = make_cache(load_size(make_cache, folders[0]))
    first = adapter_ref(folders[0])
    for _ in range(100):
        if isinstance(cache.acquire(first), AdapterGrant):
            cache.release(first)
    granted(cache, first)
    cache.release(first)
    granted(cache, adapter_ref(folders[1]))
    with pytest.raises(ValueError, match="no pin"):
        cache.release(first)


def test_two_names_of_equal_content_share_one_copy(make_cache: Make, adapter: Path, tmp_path: Path) -> None:
    twin = Path(shutil.copytree(adapter, tmp_path / "twin"))
    cache = make_cache()
    assert granted(cache, adapter_ref(adapter)) == granted(cache, adapter_ref(twin))
    assert cache.stats().resident == 1


def test_a_forgotten_adapter_gives_its_memory_back_when_its_last_user_ends(
    make_cache: Make, folders: list[Path]
) -> None:
    cache = make_cache()
    kept, left = adapter_ref(folders[0]), adapter_ref(folders[1])
    grant = granted(cache, left)
    granted(cache, kept)
    tensors = cache.weights(grant.slot)
    cache.forget(left.path)
    assert cache.weights(grant.slot) is tensors
    assert cache.stats().resident == 2
    cache.release(left)
    stats = cache.stats()
    assert (stats.resident, stats.bytes_used) == (1, tensors.nbytes)
    with pytest.raises(KeyError):
        cache.weights(grant.slot)
    again = granted(cache, left)  # it can be asked for again: another read
    assert cache.weights(again.slot) is not tensors
    assert [load.outcome for load in cache.stats().loads] == ["ok"]


def test_the_key_is_of_the_content(adapter: Path, shapes: ModelShapes) -> None:
    def key() -> str:
        return load_adapter(adapter_ref(adapter), shapes, torch.float32, 256).key

    original = key()
    edit_config(adapter, base_model_name_or_path="elsewhere")
    assert key() == original
    edit_config(adapter, lora_alpha=17)
    rescaled = key()
    edit_config(adapter, lora_alpha=16)
    name = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    edit_tensors(adapter, lambda found: found | {name: torch.nextafter(found[name], torch.tensor(9.0))})
    assert len({original, rescaled, key()}) == 3


def test_replaced_files_are_a_new_version_and_the_old_one_is_served_on(make_cache: Make, folders: list[Path]) -> None:
    cache = make_cache()
    old = adapter_ref(folders[0])
    before = granted(cache, old)
    replace_weights(folders[1], folders[0])
    after = granted(cache, adapter_ref(folders[0]))
    assert before.adapter_key != after.adapter_key
    assert granted(cache, old) == before


def replace_weights(source: Path, target: Path) -> None:
    shutil.copy(source / "adapter_model.safetensors", target / "new")
    os.replace(target / "new", target / "adapter_model.safetensors")


def test_a_refusal_is_in_the_log_and_a_load_that_ends_well_is_not(
    make_cache: Make, folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache()
    granted(cache, adapter_ref(folders[0]))
    assert caplog.text == ""
    edit_config(folders[1], peft_type="LOHA")
    error = refused(cache, adapter_ref(folders[1]))
    name = folders[1].name
    assert error.message.startswith(f"Adapter {name!r}: ")
    assert f"Adapter {name!r} is refused: {error.code}: " + error.message.partition(": ")[2] in caplog.text


def test_a_version_that_is_gone_is_not_answered_with_another(make_cache: Make, folders: list[Path]) -> None:
    stale = adapter_ref(folders[0])
    replace_weights(folders[1], folders[0])
    error = refused(make_cache(), stale)
    assert isinstance(error, AdapterChanged)
    assert "try again" in error.message


def test_a_file_written_to_while_it_is_read_is_refused(
    make_cache: Make, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into = SourceFile.read_into

    def write_meanwhile(file: SourceFile, buffer: memoryview, start: int) -> None:
        read_into(file, buffer, start)
        os.utime(adapter / file.name)

    monkeypatch.setattr(SourceFile, "read_into", write_meanwhile)
    assert isinstance(refused(make_cache(), adapter_ref(adapter)), AdapterChanged)


def test_a_half_written_adapter_works_once_it_is_finished(make_cache: Make, adapter: Path) -> None:
    cache = make_cache(retry_seconds=3600.0)
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    error = refused(cache, adapter_ref(adapter))
    assert isinstance(error, AdapterInvalid)
    assert "still being written" in error.message
    weights.write_bytes(whole)
    granted(cache, adapter_ref(adapter))


def test_a_refusal_names_the_adapter_and_is_remembered_for_a_while(make_cache: Make, adapter: Path) -> None:
    cache = make_cache(retry_seconds=3600.0)
    edit_config(adapter, use_qalora=True)
    ref = adapter_ref(adapter)
    first, second = refused(cache, ref), refused(cache, ref)
    assert first.message.startswith("Adapter 'A': use_qalora")
    assert second is first
    assert [load.outcome for load in cache.stats().loads] == ["adapter_unsupported"]
    assert cache.poll(0.0) == []


def test_a_failure_is_tried_again_after_retry_seconds(
    make_cache: Make, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, ref = make_cache(retry_seconds=0.0), adapter_ref(adapter)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module.AdapterReader, "read", break_down)
        refused(cache, ref)
    granted(cache, ref)


def break_down(*arguments: object) -> None:
    raise RuntimeError("out of memory")


def test_an_adapter_larger_than_the_budget_is_refused_with_both_sizes(make_cache: Make, adapter: Path) -> None:
    error = refused(make_cache(1000), adapter_ref(adapter))
    assert isinstance(error, AdapterTooLarge)
    assert "needs 112128 bytes" in error.message
    assert "1000" in error.message


def test_a_fifo_in_place_of_the_weights_is_refused_at_once(make_cache: Make, adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    assert "not a regular file" in refused(make_cache(), adapter_ref(adapter)).message


def test_an_unexpected_failure_is_an_internal_error_of_that_adapter(
    make_cache: Make, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module.AdapterReader, "read", break_down)
    error = refused(make_cache(), adapter_ref(adapter))
    assert error.code == "internal_error"
    assert "out of memory" not in error.message


def test_the_owner_is_called_when_a_load_ends(make_cache: Make, adapter: Path) -> None:
    ended = threading.Event()
    cache = make_cache(on_loaded=ended.set)
    cache.acquire(adapter_ref(adapter))
    assert ended.wait(PATIENCE)
    assert isinstance(cache.acquire(adapter_ref(adapter)), AdapterGrant)


def test_the_owner_is_called_when_an_old_failure_is_told_again(make_cache: Make, adapter: Path) -> None:
    calls: list[None] = []
    cache = make_cache(on_loaded=lambda: calls.append(None), retry_seconds=3600.0)
    edit_config(adapter, r=4)
    ref = adapter_ref(adapter)
    refused(cache, ref)
    calls.clear()
    cache.acquire(ref)
    assert calls
    assert [failed for failed, _ in cache.poll(0.0)] == [ref]


def test_a_burst_of_cold_adapters_cannot_push_each_other_out_unused(make_cache: Make, folders: list[Path]) -> None:
    cache = make_cache(2 * load_size(make_cache, folders[0]))
    refs = [adapter_ref(folder) for folder in folders]
    served: list[AdapterRef] = []
    while len(served) < len(refs):
        for ref in [ref for ref in refs if ref not in served]:
            if isinstance(cache.acquire(ref), AdapterGrant):
                cache.release(ref)
                served.append(ref)
        cache.wait_for_load(0.01)
    loads = [load.name for load in cache.stats().loads]
    assert sorted(loads) == sorted(folder.name for folder in folders), "each was read once"


def test_a_closed_cache_reads_no_more_and_keeps_what_was_granted(make_cache: Make, folders: list[Path]) -> None:
    cache = make_cache()
    grant = granted(cache, adapter_ref(folders[0]))
    cache.close()
    assert cache.acquire(adapter_ref(folders[1])) is SkipReason.ADAPTER_LOADING
    assert not cache.wait_for_load(0.05)
    assert cache.weights(grant.slot).key == grant.adapter_key


def test_errors_are_adapter_errors_with_the_models_param(make_cache: Make, adapter: Path) -> None:
    edit_config(adapter, r=4)
    error = refused(make_cache(), adapter_ref(adapter))
    assert isinstance(error, AdapterError)
    assert error.param == "model"
