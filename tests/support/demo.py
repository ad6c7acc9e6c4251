"""The demo model, its adapters and prompts, and PEFT's own answers to them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "examples" / "adapters"
PROMPTS = ROOT / "examples" / "prompts.jsonl"


def demo_model() -> Path:
    """Directory of the demo base model; prepared on first use."""
    done = subprocess.run(
        [sys.executable, "-m", "punica_core.model.demo"], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    return Path(done.stdout.strip().splitlines()[-1])


def adapter_names() -> list[str]:
    return sorted(path.parent.name for path in ADAPTERS.glob("*/adapter_config.json"))


def prompts() -> list[list[dict[str, str]]]:
    """The demo prompts as chat messages."""
    return [json.loads(line)["messages"] for line in PROMPTS.read_text().splitlines() if line.strip()]


@dataclass(frozen=True)
class Reference:
    """What PEFT generates: token ids without the stop token, and the text they stand for."""

    token_ids: tuple[int, ...]
    text: str


def peft_answers(
    model_dir: Path, adapter: Path | None, conversations: list[list[dict[str, str]]], max_tokens: int
) -> list[Reference]:
    """Greedy answers of transformers + PEFT in fp32, one prompt at a time, on a freshly built base."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    answers = []
    for messages in conversations:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        stop = {tokenizer.eos_token_id}
        ids = [token for token in ids if token not in stop]
        answers.append(Reference(tuple(ids), tokenizer.decode(ids, skip_special_tokens=True)))
    return answers
