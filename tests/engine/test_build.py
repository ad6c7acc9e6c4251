"""A key that would change nothing, and a GPU that is not there, are refused before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from punica_core.config import EngineConfig
from punica_core.engine.build import build_engine, refuse_unused, resolve_device
from punica_core.errors import ConfigError


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


def test_the_defaults_are_served() -> None:
    refuse_unused(EngineConfig(model="m"))
