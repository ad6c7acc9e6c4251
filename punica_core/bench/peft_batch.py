"""`python -m punica_core.bench.peft_batch --model … --batches 8,32`: transformers and PEFT, distinct adapters.

The contender of `punica bench throughput --peft`, in a process of its own: the same random weights (or the folder's),
adapters of the same lora_rank on the same linears in the model's dtype, `generate` with `adapter_names` ("batch") and
one prompt after the other with `set_adapter` ("one at a time").
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from punica_core.bench.peft_generate import generate_greedy
from punica_core.bench.session import EngineChoice, Session, int_list
from punica_core.bench.shapes import linear_shapes, model_folder
from punica_core.config import EngineConfig, LoadFormat
from punica_core.model.loader import resolve_dtype
from punica_core.model.weights import load_weights
from punica_core.stdout import until_unread

PROMPT_TOKENS: Final = 128
ONE_AT_A_TIME: Final = 4
"""Prompts that are timed one after the other; their number does not matter."""


class PeftBatch:
    """A base with `count` adapters of random weights."""

    def __init__(self, folder: Path, count: int, lora_ranks: Sequence[int], choice: EngineChoice) -> None:
        hf_config = AutoConfig.from_pretrained(folder)
        self.device = torch.device("cuda" if choice.is_on_gpu else "cpu")
        dtype = resolve_dtype(EngineConfig(model=str(folder), dtype=choice.dtype), hf_config, self.device)
        load_format: LoadFormat = "auto" if any(folder.glob("*.safetensors")) else "dummy"
        base = load_weights(folder, hf_config, dtype, self.device, load_format=load_format)
        self.names = tuple(f"adapter-{index:03}" for index in range(count))
        configs = [_lora_config(folder, lora_ranks[index % len(lora_ranks)]) for index in range(count)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model: Any = get_peft_model(base, configs[0], self.names[0], autocast_adapter_dtype=False)
            for name, config in zip(self.names[1:], configs[1:], strict=True):
                self.model.add_adapter(name, config, autocast_adapter_dtype=False)
        self.model.to(dtype).eval()

    def measure(self, batch: int, new_tokens: int, vocab_size: int) -> dict[str, Any]:
        """Generated tokens a second of `batch` prompts, each with an adapter of its own."""
        generator = np.random.Generator(np.random.PCG64(batch))
        prompts = generator.integers(3, vocab_size, (batch, PROMPT_TOKENS)).tolist()
        names = list(self.names[:batch])
        self._seconds_of_a_batch(prompts, names, 2)  # warm up
        seconds = self._seconds_of_a_batch(prompts, names, new_tokens)
        alone = self._seconds_one_at_a_time(prompts[:ONE_AT_A_TIME], names, new_tokens)
        return {
            "batch": batch,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": new_tokens,
            "peft_batch_tokens_per_second": batch * new_tokens / seconds,
            "peft_one_at_a_time_tokens_per_second": min(batch, ONE_AT_A_TIME) * new_tokens / alone,
        }

    def _seconds_of_a_batch(self, prompts: list[list[int]], names: list[str], new_tokens: int) -> float:
        began = self._now()
        generate_greedy(self.model, prompts, new_tokens, adapter_names=names)
        return self._now() - began

    def _seconds_one_at_a_time(self, prompts: list[list[int]], names: list[str], new_tokens: int) -> float:
        began = self._now()
        for prompt, name in zip(prompts, names, strict=False):
            self.model.set_adapter(name)
            generate_greedy(self.model, [prompt], new_tokens)
        return self._now() - began

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _lora_config(folder: Path, lora_rank: int) -> LoraConfig:
    targets = sorted({path.rpartition(".")[2] for path in linear_shapes(folder)})
    return LoraConfig(
        r=lora_rank, lora_alpha=2 * lora_rank, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )


def measure_peft(choice: EngineChoice, batches: Sequence[int], new_tokens: int) -> list[dict[str, Any]]:
    """What `PeftBatch.measure` says of each batch, measured in a process of its own, which gives its memory back.

    Raises RuntimeError if that fails.
    """
    if not batches:
        return []
    ranks = ",".join(map(str, choice.lora_ranks))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peft.json"
        command = [sys.executable, "-m", "punica_core.bench.peft_batch", "--model", choice.model, "--lora-ranks", ranks]
        command += ["--device", choice.device, "--dtype", choice.dtype, "--new-tokens", str(new_tokens)]
        command += ["--batches", ",".join(map(str, batches)), "--out", str(out)]
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"measuring PEFT failed with code {done.returncode}.")
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def compare_with_peft(session: Session, theirs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """PEFT's figures with ours for as many prompts of the same lengths, each with an adapter of its own."""
    rows = []
    for found in theirs:
        generator = np.random.Generator(np.random.PCG64(found["batch"]))
        shape = (found["batch"], found["prompt_tokens"])
        prompts = generator.integers(3, session.layout.vocab_size, shape).tolist()
        refs = session.adapters.refs[: found["batch"]]
        session.preload(refs)
        requests = [
            session.request(prompt, found["new_tokens"], ref, tenant="peft")
            for prompt, ref in zip(prompts, refs, strict=True)
        ]
        began = time.perf_counter()
        answers = session.run(requests)
        speed = sum(len(answer.token_ids) for answer in answers) / (max(a.times[-1] for a in answers) - began)
        ratio = speed / found["peft_batch_tokens_per_second"]
        rows.append({**found, "generated_tokens_per_second": speed, "times_peft_batch": ratio})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each batch."""
    lines = ["| prompts, adapters | ours, tokens/s | PEFT, one batch | PEFT, one at a time | ours / batch |"]
    lines.append("|---:|---:|---:|---:|---:|")
    keys = ("generated_tokens_per_second", "peft_batch_tokens_per_second", "peft_one_at_a_time_tokens_per_second")
    for row in rows:
        speeds = " | ".join(f"{row[key]:.1f}" for key in keys)
        lines.append(f"| {row['batch']} | {speeds} | {row['times_peft_batch']:.1f}× |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--lora-ranks", type=int_list, default=(16,))
    parser.add_argument("--batches", type=int_list, required=True)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    choice = EngineChoice(model=options.model, device=options.device, dtype=options.dtype)
    with tempfile.TemporaryDirectory() as room:
        folder = model_folder(options.model, Path(room))
        contender = PeftBatch(folder, max(options.batches), options.lora_ranks, choice)
        vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
        found = [contender.measure(batch, options.new_tokens, vocab_size) for batch in options.batches]
    options.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(until_unread(main))
