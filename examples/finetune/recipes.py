"""How each example adapter is trained: its task, its LoRA shape, its schedule.

The four shapes differ on purpose (rank, alpha, scaling rule, target modules, layers, saved dtype), so that serving
them together shows adapters of unlike geometry in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, cast

from examples.finetune.data import Task

ADAPTERS = Path(__file__).resolve().parent.parent / "adapters"
BASE_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Public name of the base model, written into the adapters."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One adapter.

    module: the module of `examples.finetune.data` that defines the task.
    lora_rank, lora_alpha, use_rslora, targets: the LoRA shape, as PEFT means them.
    layers: which decoder layers are adapted; None is all.
    steps, batch_size, learning_rate: the schedule; the rate falls to zero on a cosine.
    saved_dtype: dtype of the tensors on disk; training itself is in float32.
    max_new_tokens: enough for any right answer.
    """

    module: str
    summary: str
    lora_rank: int
    lora_alpha: int
    targets: tuple[str, ...]
    use_rslora: bool = False
    layers: range | None = None
    steps: int = 80
    batch_size: int = 8
    learning_rate: float = 1e-3
    saved_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    max_new_tokens: int = 48

    @property
    def task(self) -> Task:
        return cast(Task, import_module(f"examples.finetune.data.{self.module}"))


RECIPES: dict[str, Recipe] = {
    "json-extract": Recipe(
        module="json_extract",
        summary="Turns an order in plain words into a JSON object with the keys name, item, quantity, city.",
        lora_rank=4,
        lora_alpha=16,
        targets=ATTENTION + MLP,
    ),
    "sentiment": Recipe(
        module="sentiment",
        summary="Answers with one word: positive, negative or neutral.",
        lora_rank=16,
        lora_alpha=8,
        targets=("q_proj", "v_proj"),
        use_rslora=True,
        layers=range(10, 30),
        steps=60,
        saved_dtype="float16",
        max_new_tokens=16,
    ),
    "sql": Recipe(
        module="sql",
        summary="Turns a table's columns and a question into one SQL SELECT statement.",
        lora_rank=6,
        lora_alpha=12,
        targets=MLP,
        steps=100,
    ),
    "pirate": Recipe(
        module="pirate",
        summary="Answers every question in the voice of a pirate.",
        lora_rank=8,
        lora_alpha=32,
        targets=ATTENTION,
        steps=80,
        max_new_tokens=48,
    ),
}
