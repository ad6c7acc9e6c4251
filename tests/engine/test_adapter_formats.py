"""The engine as the worker builds it serves adapters that need the base's numbers, from folders."""

from __future__ import annotations

from pathlib import Path

import torch

from punica_core.config import EngineConfig
from punica_core.engine.build import build_engine
from punica_core.protocol import NewSequence, SamplingParams
from tests.support.peft_adapters import adapter_ref, save_peft_adapter, tiny_llama
from tests.support.peft_batch import adapted_model

PROMPT = [5, 9, 200, 31]
NEW_TOKENS = 6


def greedy(folder: Path | None) -> list[int]:
    """PEFT's own tokens."""
    model = adapted_model(folder)
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def test_dora_heads_and_token_rows_are_served_from_their_folders(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    folders = [
        None,
        save_peft_adapter(tmp_path / "a", target_modules=["lm_head", "q_proj"], use_dora=True),
        save_peft_adapter(tmp_path / "b", seed=2, target_modules=["embed_tokens"], modules_to_save=["lm_head"]),
        save_peft_adapter(tmp_path / "c", seed=3, target_modules=["q_proj"], trainable_token_indices=[5, 9]),
    ]
    config = EngineConfig(model=str(tmp_path / "base"), kv_tokens=1024, adapter_host_bytes=1 << 24, log_level="warning")
    engine, _ = build_engine(config, lambda what, fraction: None, lambda: None)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = engine.submit(
        [
            NewSequence(
                request_id=index,
                prompt_ids=PROMPT,
                sampling=sampling,
                adapter=None if folder is None else adapter_ref(folder),
            )
            for index, folder in enumerate(folders)
        ],
        0.0,
    )
    now = 0.0
    while engine.has_unfinished():
        now += 0.001
        outputs += engine.step(now)[0]
    for index, folder in enumerate(folders):
        found = [token for output in outputs if output.request_id == index for token in output.token_ids]
        assert found == greedy(folder)
    assert len({tuple(greedy(folder)) for folder in folders}) == len(folders), "the adapters change nothing"
