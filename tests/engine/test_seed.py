"""Requests without a seed: new tokens at each start, unless the configuration has a seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from punica_core.config import EngineConfig
from punica_core.engine.build import build_engine
from punica_core.errors import ConfigError
from punica_core.protocol import NewSequence, SamplingParams
from tests.support.peft_adapters import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(path)
    return path


def tokens_after_a_start(folder: Path, **keys: int) -> list[int]:
    """40 tokens that one unseeded request draws from a nearly flat distribution."""
    config = EngineConfig(model=str(folder), kv_tokens=1024, adapter_host_bytes=1 << 24, **keys)
    engine, _ = build_engine(config, lambda what, fraction: None, lambda: None)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, temperature=50.0)
    outputs = engine.submit([NewSequence(request_id=1, prompt_ids=[5, 9], sampling=sampling)], 0.0)
    now = 0.0
    while engine.has_unfinished():
        now += 0.001
        outputs += engine.step(now)[0]
    return [token_id for output in outputs for token_id in output.token_ids]


def test_by_default_a_start_repeats_nothing(folder: Path) -> None:
    first = tokens_after_a_start(folder)
    assert len(first) == 40
    assert tokens_after_a_start(folder) != first


def test_a_configured_seed_repeats_and_decides(folder: Path) -> None:
    first = tokens_after_a_start(folder, seed=3)
    assert tokens_after_a_start(folder, seed=3) == first
    assert tokens_after_a_start(folder, seed=4) != first


def test_a_seed_below_minus_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed is -2"):
        EngineConfig(model="m", seed=-2).validate()
