"""Judges an example adapter on held-out prompts and writes its card: `python -m examples.finetune.evaluate NAME`.

The base model answers the same prompts first; every figure is the mean over all held-out prompts, answers are greedy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from examples.finetune.card import Card
from examples.finetune.chat import prompt_ids
from examples.finetune.data import Example, Task
from examples.finetune.recipes import ADAPTERS, RECIPES
from punica_core.model.demo import prepare

BATCH = 12
SHOWN = 4
"""Answers printed in the card."""


def answers(model: Any, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], limit: int) -> Iterator[str]:
    """Greedy answers of at most `limit` tokens, in order; prompts of a batch are padded on the left."""
    for start in range(0, len(examples), BATCH):
        prompts = [prompt_ids(tokenizer, example.prompt) for example in examples[start : start + BATCH]]
        length = max(map(len, prompts))
        ids = torch.tensor([[tokenizer.pad_token_id] * (length - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=limit,
                do_sample=False,
            )
        yield from tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)


def figures(task: Task, examples: Sequence[Example], said: Sequence[str]) -> Mapping[str, float]:
    """Mean of each of the task's metrics."""
    judged = [task.judge(example, answer) for example, answer in zip(examples, said, strict=True)]
    return {metric: fmean(row[metric] for row in judged) for metric in task.METRICS}


def evaluate(name: str, base: Path, folder: Path, device: str) -> Card:
    """Answer the held-out prompts without and with the adapter in `folder`, as it is stored on disk."""
    recipe = RECIPES[name]
    examples = recipe.task.held_out()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device).eval()
    before = list(answers(model, tokenizer, examples, recipe.max_new_tokens))
    adapted = PeftModel.from_pretrained(model, folder).eval()
    after = list(answers(adapted, tokenizer, examples, recipe.max_new_tokens))
    step = max(1, len(examples) // SHOWN)
    shown = list(zip(examples, before, after, strict=True))[::step][:SHOWN]
    return Card(
        name=name,
        recipe=recipe,
        size=(folder / "adapter_model.safetensors").stat().st_size,
        num_held_out=len(examples),
        before=figures(recipe.task, examples, before),
        after=figures(recipe.task, examples, after),
        shown=[(example.prompt, first, second) for example, first, second in shown],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--base", type=Path, help="folder of the base model (default: the demo model)")
    parser.add_argument("--adapter", type=Path, help="folder of the adapter (default: examples/adapters/NAME)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(2)
    folder = args.adapter or ADAPTERS / args.name
    text = evaluate(args.name, args.base or prepare(), folder, args.device).render()
    (folder / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
