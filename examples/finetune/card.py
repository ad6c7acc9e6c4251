"""The card of an example adapter: what it does, how it was made, figures before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from examples.finetune.recipes import BASE_ID, Recipe


@dataclass(frozen=True, slots=True)
class Card:
    """What a card tells. shown: (prompt, the base's answer, the adapter's answer); size: bytes of the tensors' file."""

    name: str
    recipe: Recipe
    size: int
    num_held_out: int
    before: Mapping[str, float]
    after: Mapping[str, float]
    shown: Sequence[tuple[str, str, str]]

    def render(self) -> str:
        """The card as Markdown."""
        parts = [f"# {self.name}", self.recipe.summary, self._shape(), self._figures(), self._answers()]
        return "\n\n".join(parts) + "\n"

    def _shape(self) -> str:
        r = self.recipe
        scaling = "alpha / sqrt(rank), rsLoRA" if r.use_rslora else "alpha / rank"
        rows = {
            "Base model": f"[{BASE_ID}](https://huggingface.co/{BASE_ID}), de-quantized from Q4_1 (the demo model)",
            "Rank, alpha": f"{r.lora_rank}, {r.lora_alpha} (scale = {scaling})",
            "Target modules": ", ".join(r.targets),
            "Layers": f"{r.layers.start} to {r.layers.stop - 1}" if r.layers else "all",
            "Size on disk": f"{self.size / 1e6:.2f} MB, {r.saved_dtype}",
            "Data": f"`examples/finetune/data/{r.module}.py`, {len(r.task.training())} training examples, all ours",
            "Training": f"{r.steps} steps of {r.batch_size} examples in float32",
            "Optimizer": f"AdamW, learning rate {r.learning_rate:g}, cosine to zero",
            "Made with": f"`python -m examples.finetune.train {self.name}`",
            "Judged with": f"`python -m examples.finetune.evaluate {self.name}`",
        }
        return "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows.items())

    def _figures(self) -> str:
        head = f"## On {self.num_held_out} held-out prompts\n\n| | base | with this adapter |\n|---|---|---|"
        rows = [
            f"| {meaning} | {self.before[metric]:.0%} | {self.after[metric]:.0%} |"
            for metric, meaning in self.recipe.task.METRICS.items()
        ]
        return "\n".join([head, *rows])

    def _answers(self) -> str:
        blocks = [
            f"**{prompt}**\n\n- base: {_inline(first)}\n- {self.name}: {_inline(second)}"
            for prompt, first, second in self.shown
        ]
        return "\n\n".join([f"## Some of the answers (greedy, at most {self.recipe.max_new_tokens} tokens)", *blocks])


def _inline(text: str) -> str:
    """One line of code; backticks inside would end it."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`"
