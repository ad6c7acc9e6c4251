"""Trains one example adapter with PEFT, in float32: `python -m examples.finetune.train NAME`.

Two things make it cheap. The loss is taken on the answer alone, so the vocabulary projection runs only where an answer
token is predicted. And all prompts begin with the same default system message, so its keys and values are computed
once a step and shared by the rows; gradients flow through them as if each row had its own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from examples.finetune.chat import IGNORED, Batch, Encoded, collate, encode, shared_prefix
from examples.finetune.recipes import ADAPTERS, BASE_ID, RECIPES, Recipe
from punica_core.model.demo import prepare

WARMUP_STEPS = 6
MAX_GRAD_NORM = 1.0


def build(base: Path, recipe: Recipe) -> PeftModel:
    """A fresh base model with an untrained adapter of the recipe's shape."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        target_modules=list(recipe.targets),
        use_rslora=recipe.use_rslora,
        layers_to_transform=list(recipe.layers) if recipe.layers else None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def answer_loss(model: PeftModel, prefix: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the answer tokens. `prefix` [1, T] stands before every row of `batch`."""
    causal_lm = model.get_base_model()
    cache = DynamicCache(config=causal_lm.config)
    # The cache goes by position: the argument's name differs between releases of transformers.
    causal_lm.model(prefix, None, None, cache, use_cache=True)
    cache.batch_repeat_interleave(batch.ids.shape[0])
    hidden = causal_lm.model(batch.ids, batch.mask, None, cache, use_cache=True).last_hidden_state
    targets = batch.labels[:, 1:]
    predicts = targets != IGNORED
    return torch.nn.functional.cross_entropy(causal_lm.lm_head(hidden[:, :-1][predicts]), targets[predicts])


def batches(encoded: Sequence[Encoded], size: int, rng: random.Random) -> Iterator[list[Encoded]]:
    """Endless batches; every example is seen once before any is seen again."""
    while True:
        order = rng.sample(encoded, len(encoded))
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]


def rate(step: int, steps: int) -> float:
    """Factor on the learning rate: a short linear warm-up, then a cosine to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)))


def train(base: Path, recipe: Recipe, steps: int, device: str) -> PeftModel:
    """The trained model. Prints loss and elapsed time to stderr."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    encoded = [encode(tokenizer, example) for example in recipe.task.training()]
    prefix = shared_prefix(encoded)
    model = build(base, recipe).to(device)
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    started = time.monotonic()
    drawn = batches(encoded, recipe.batch_size, random.Random(0))
    for step in range(1, steps + 1):
        batch = collate(next(drawn), len(prefix), tokenizer.pad_token_id).to(device)
        loss = answer_loss(model, torch.tensor([prefix], device=device), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == 1 or step % 5 == 0 or step == steps:
            print(f"step {step}/{steps} loss {loss.item():.4f} [{time.monotonic() - started:.0f} s]", file=sys.stderr)
    return model


def save(model: PeftModel, recipe: Recipe, folder: Path) -> None:
    """Write the adapter in PEFT's format, tensors in the recipe's dtype, with the base model's public name."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, recipe.saved_dtype)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in get_peft_model_state_dict(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_ID
    config.inference_mode = True
    config.save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the recipe's)")
    parser.add_argument("--base", type=Path, help="folder of the base model (default: the demo model)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="folder to write (default: examples/adapters/NAME)")
    args = parser.parse_args()
    torch.set_num_threads(2)
    recipe = RECIPES[args.name]
    model = train(args.base or prepare(), recipe, args.steps or recipe.steps, args.device)
    save(model, recipe, args.output or ADAPTERS / args.name)


if __name__ == "__main__":
    main()
