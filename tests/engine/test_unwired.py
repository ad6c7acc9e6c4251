"""A key that would change nothing is refused, not ignored."""

from __future__ import annotations

import pytest

from punica_core.config import EngineConfig
from punica_core.engine.build import build_engine, refuse_unwired
from punica_core.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (EngineConfig(model="m", device="cuda"), "device"),
        (EngineConfig(model="m", sgmv="cuda"), "sgmv"),
        (EngineConfig(model="m", adapter_gpu_bytes=1), "adapter_gpu_bytes"),
    ],
    ids=["device", "sgmv", "adapter_gpu_bytes"],
)
def test_what_the_worker_does_not_do_yet_is_refused_before_anything_is_loaded(config: EngineConfig, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} is") as caught:
        build_engine(config, lambda what, fraction: None, lambda: None)
    assert caught.value.param == key


def test_the_defaults_are_served() -> None:
    refuse_unwired(EngineConfig(model="m"))
