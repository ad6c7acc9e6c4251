"""Five answers from one `generate` call, each with another adapter of one base model: `python -m examples.batch_lora`.

A plain Hugging Face model, without a server: `BatchLoRA` makes each row of the batch use the adapter it names. The
base is the demo model (prepared on first use), on a GPU in bfloat16 if there is one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from punica_core import BatchLoRA
from punica_core.model.demo import prepare

ADAPTERS = Path(__file__).parent / "adapters"
PROMPTS = {
    "json-extract": "Hello, Greta here. Can I get nine sleeping bags delivered to Tunis?",
    "pirate": "What is the capital of Japan?",
    "sentiment": "A lovely evening: warm bread, kind staff, fair prices.",
    "sql": "Table singers(id, name, language, albums). How many singers have the language Arabic?",
    "base": "What is the capital of France?",
}
"""What each model is asked: the names of folders, and the base model itself."""


def answer_all(model_dir: Path, max_tokens: int) -> dict[str, str]:
    """The answer to each of PROMPTS, by the model that it is for."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device).eval()
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt in PROMPTS.values()],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    ).to(device)
    names = [name for name in PROMPTS if name != "base"]
    lora_indices = [names.index(name) if name in names else -1 for name in PROMPTS]
    with BatchLoRA(model, [ADAPTERS / name for name in names]) as batch:
        output = batch.generate(**inputs, lora_indices=lora_indices, max_new_tokens=max_tokens, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
    return dict(zip(PROMPTS, texts, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the example."""
    parser = argparse.ArgumentParser(prog="python -m examples.batch_lora", description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="folder of the base model (default: the demo model)")
    parser.add_argument("--max-tokens", type=int, default=40)
    args = parser.parse_args(argv)
    for name, text in answer_all(args.base or prepare(), args.max_tokens).items():
        print(f"\n{name}\n  > {PROMPTS[name]}\n  {text.strip()}")


if __name__ == "__main__":
    main()
