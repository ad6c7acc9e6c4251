"""What is refused before anything is loaded, and how the memory of a CPU is shared out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from punica_core import protocol
from punica_core.config import DType, EngineConfig
from punica_core.engine import build
from punica_core.engine.build import build_engine, refuse_unused, resolve_device
from punica_core.engine.runner import LORA_LAYOUT_BYTES, lora_layout_bytes
from punica_core.errors import ConfigError
from punica_core.model.loader import LOADING
from punica_core.model.shapes import model_shapes
from punica_core.scheduler.long_prompts import LongPrompts
from tests.support.peft_adapters import tiny_llama


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (EngineConfig(model="m", device="cpu", sgmv="cuda"), "sgmv"),
        (EngineConfig(model="m", device="cpu", adapter_gpu_bytes=1), "adapter_gpu_bytes"),
    ],
    ids=["sgmv", "adapter_gpu_bytes"],
)
def test_what_a_cpu_does_not_do_is_refused(config: EngineConfig, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} is") as caught:
        build_engine(config, lambda what, fraction: None, lambda: None)
    assert caught.value.param == key


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no NVIDIA GPU"):
        build_engine(EngineConfig(model="m", device="cuda"), lambda what, fraction: None, lambda: None)


def test_auto_takes_a_gpu_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(EngineConfig(model="m")).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert resolve_device(EngineConfig(model="m")).type == "cuda"
    assert resolve_device(EngineConfig(model="m", device="cpu")).type == "cpu"


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_defaults_and_the_dtypes_of_a_cpu_are_served(dtype: DType) -> None:
    refuse_unused(EngineConfig(model="m", dtype=dtype))


def test_float16_on_a_cpu_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="dtype is float16, but the model runs on the CPU") as error:
        build_engine(EngineConfig(model="m", device="cpu", dtype="float16"), lambda what, fraction: None, lambda: None)
    assert error.value.param == "dtype"


@pytest.mark.parametrize(("lora", "num_blocks"), [(True, 50), (False, 100)])
def test_what_is_set_aside_for_adapters_as_they_are_computed_is_no_room_for_kv(
    lora: bool, num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    block_bytes = 2 * 3 * 16 * 2 * 16 * 4
    monkeypatch.setattr(build, "free_host_bytes", lambda: 200 * block_bytes)
    config = EngineConfig(model=str(tmp_path), device="cpu", lora=lora, adapter_host_bytes=100 * block_bytes)
    _engine, layout = build_engine(config, lambda what, fraction: None, lambda: None)
    assert layout.num_blocks == num_blocks


@pytest.mark.parametrize(("target_step_ms", "expected"), [(30.0, LongPrompts()), (0.0, None)])
def test_on_a_cpu_long_prompts_are_cut(target_step_ms: float, expected: LongPrompts | None, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_tokens=512, target_step_ms=target_step_ms)
    engine, _layout = build_engine(config, lambda what, fraction: None, lambda: None)
    assert engine._scheduler._long_prompts == expected
    assert engine._scheduler._pacer is None


def test_the_front_end_is_told_what_adapters_must_fit_before_the_weights_are_read(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    events: list[protocol.Progress] = []
    build_engine(
        EngineConfig(model=str(tmp_path), device="cpu", kv_tokens=512),
        lambda what, fraction: events.append(protocol.Progress(what, fraction)),
        lambda: None,
        on_shapes=lambda shapes: events.append(protocol.Progress(LOADING, 0.0, shapes)),
    )
    place = next(place for place, event in enumerate(events) if event.shapes is not None)
    assert [event.fraction for event in events if event.what == LOADING][-1] > 0.0
    assert all(event.fraction == 0.0 for event in events[:place]), "some of the weights were there"
    event = protocol.decode_event(protocol.encode(events[place])[4:])
    assert isinstance(event, protocol.Progress)
    told, built = event.shapes, model_shapes(model)
    assert told is not None
    assert {name: getattr(told, name) for name in told.__dataclass_fields__} == {
        name: getattr(built, name) for name in built.__dataclass_fields__
    }


def test_little_memory_for_adapters_needs_little_beside_it() -> None:
    config = EngineConfig(model="m")
    assert lora_layout_bytes(config, 1000) == 1000
    assert lora_layout_bytes(config, 1 << 40) == LORA_LAYOUT_BYTES
