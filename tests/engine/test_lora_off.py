"""A worker without LoRA serves the base model and refuses adapters by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from punica_core.config import EngineConfig
from punica_core.engine.build import build_engine
from punica_core.errors import ConfigError
from punica_core.protocol import AdapterRef, FinishReason, NewSequence, SamplingParams, SequenceOutput
from tests.support.peft_adapters import adapter_ref, save_peft_adapter, tiny_llama

PROMPT = [5, 9, 200, 31]


def terminal_outputs(folder: Path, adapter: AdapterRef, *, lora: bool) -> dict[int, SequenceOutput]:
    """Of request 1, which asks for the base, and request 2, which asks for the adapter."""
    config = EngineConfig(model=str(folder), lora=lora, kv_tokens=1024, adapter_host_bytes=1 << 24, log_level="warning")
    engine, _ = build_engine(config, lambda what, fraction: None, lambda: None)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    base = NewSequence(request_id=1, prompt_ids=PROMPT, sampling=sampling)
    adapted = NewSequence(request_id=2, prompt_ids=PROMPT, sampling=sampling, adapter=adapter)
    outputs = engine.submit([base, adapted], 0.0)
    now = 0.0
    while engine.has_unfinished():
        now += 0.001
        outputs += engine.step(now)[0]
    return {output.request_id: output for output in outputs if output.finish_reason is not None}


def test_without_lora_the_base_is_served_and_adapters_are_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    adapter = adapter_ref(save_peft_adapter(tmp_path / "a"))
    off = terminal_outputs(tmp_path / "base", adapter, lora=False)
    assert off[1].finish_reason is FinishReason.LENGTH
    assert (off[2].finish_reason, off[2].error_code) == (FinishReason.ERROR, "adapter_unsupported")
    assert "'a'" in off[2].error_message
    assert "lora is false" in off[2].error_message
    on = terminal_outputs(tmp_path / "base", adapter, lora=True)
    assert [on[request_id].finish_reason for request_id in (1, 2)] == [FinishReason.LENGTH] * 2


def test_adapters_and_no_lora_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="lora is false"):
        EngineConfig(model="m", adapters="/adapters", lora=False).validate()
