"""`python -m punica_core.bench.peft_generate --model DIR --adapters DIR`: Hugging Face and PEFT `generate`, on demand.

The contender of `punica bench cpu`. It loads the base once for PEFT with every adapter, and once alone, prints
`{"ready": …}`, then answers each JSON line on stdin (a `Job`) with a JSON line on stdout (a `Timing`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

BASE = "__base__"
"""PEFT's own name for rows without an adapter."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of one length, each with the adapter it asks for ("" for the base), and new_tokens for each.

    way: "single", plain `transformers` one prompt at a time, adapters ignored; "switching", PEFT one prompt at a
    time with `set_adapter` before each; "mixed", PEFT with all prompts in one batch and `adapter_names`.
    """

    way: Literal["single", "switching", "mixed"]
    prompts: list[list[int]]
    adapters: list[str]
    new_tokens: int


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of wall clock and of CPU, and tokens generated."""

    seconds: float
    cpu_seconds: float
    generated_tokens: int


class Contender:
    """The two models: `alone` from transformers, `mixed` with every adapter of a folder."""

    def __init__(self, model_dir: Path, adapters_dir: Path) -> None:
        folders = sorted(path.parent for path in adapters_dir.glob("*/adapter_config.json"))
        if not folders:
            raise SystemExit(f"There is no adapter in {adapters_dir}.")
        self.adapters = [folder.name for folder in folders]
        self._alone = _load(model_dir)
        self._peft: Any = PeftModel.from_pretrained(_load(model_dir), str(folders[0]), adapter_name=folders[0].name)
        for folder in folders[1:]:
            self._peft.load_adapter(str(folder), adapter_name=folder.name)
        self._peft.eval()

    def run(self, job: Job) -> Timing:
        """Do the job and time it."""
        cpu, began = time.process_time(), time.perf_counter()
        generated = sum(len(tokens) for tokens in self.generate(job))
        return Timing(
            seconds=time.perf_counter() - began, cpu_seconds=time.process_time() - cpu, generated_tokens=generated
        )

    def generate(self, job: Job) -> list[list[int]]:
        """The new tokens of each prompt."""
        if job.way == "mixed":
            names = [adapter or BASE for adapter in job.adapters]
            return generate_greedy(self._peft, job.prompts, job.new_tokens, adapter_names=names)
        one_at_a_time = self._alone_generate if job.way == "single" else self._switch_and_generate
        return [
            one_at_a_time(prompt, adapter, job.new_tokens)
            for prompt, adapter in zip(job.prompts, job.adapters, strict=True)
        ]

    def _alone_generate(self, prompt: list[int], adapter: str, new_tokens: int) -> list[int]:
        return generate_greedy(self._alone, [prompt], new_tokens)[0]

    def _switch_and_generate(self, prompt: list[int], adapter: str, new_tokens: int) -> list[int]:
        if not adapter:
            with self._peft.disable_adapter():
                return generate_greedy(self._peft, [prompt], new_tokens)[0]
        self._peft.set_adapter(adapter)
        return generate_greedy(self._peft, [prompt], new_tokens)[0]


def _load(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def generate_greedy(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, **extra: Any) -> list[list[int]]:
    """Greedy tokens after each of several prompts of one length."""
    ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **extra,
        )
    tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    contender = Contender(options.model, options.adapters)
    _answer({"ready": contender.adapters})
    for line in sys.stdin.buffer:
        _answer(contender.run(msgspec.json.decode(line, type=Job)))


def _answer(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
