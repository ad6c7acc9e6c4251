"""The adapters and prompts that are shipped: small, sound, unlike each other, and what their recipes say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from examples.finetune.recipes import ADAPTERS, RECIPES, Recipe

PROMPTS = ADAPTERS.parent / "prompts.jsonl"
NUM_LAYERS = 30
MAX_BYTES = 3_000_000
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    return config


def shapes_and_dtypes(folder: Path) -> Mapping[str, tuple[list[int], str]]:
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}


def expected_names(recipe: Recipe) -> set[str]:
    mlp = {"gate_proj", "up_proj", "down_proj"}
    return {
        f"base_model.model.model.layers.{layer}.{'mlp' if target in mlp else 'self_attn'}.{target}.lora_{side}.weight"
        for layer in recipe.layers or range(NUM_LAYERS)
        for target in recipe.targets
        for side in "AB"
    }


def test_every_recipe_has_its_adapter_and_every_adapter_its_recipe() -> None:
    assert {path.parent.name for path in ADAPTERS.glob("*/adapter_config.json")} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_an_adapter_is_at_most_3_mb(name: str) -> None:
    assert (ADAPTERS / name / "adapter_model.safetensors").stat().st_size <= MAX_BYTES


@pytest.mark.parametrize("name", RECIPES)
def test_an_adapter_has_the_shape_of_its_recipe(name: str) -> None:
    recipe, config, tensors = RECIPES[name], config_of(name), shapes_and_dtypes(ADAPTERS / name)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (
        recipe.lora_rank,
        recipe.lora_alpha,
        recipe.use_rslora,
    )
    assert set(config["target_modules"]) == set(recipe.targets)
    assert set(tensors) == expected_names(recipe)
    assert {dtype for _, dtype in tensors.values()} == {DTYPES[recipe.saved_dtype]}
    assert {shape[0 if ".lora_A." in key else 1] for key, (shape, _) in tensors.items()} == {recipe.lora_rank}


@pytest.mark.parametrize("name", RECIPES)
def test_every_b_matrix_was_trained(name: str) -> None:
    with safe_open(ADAPTERS / name / "adapter_model.safetensors", framework="pt") as file:
        untouched = [key for key in file.keys() if ".lora_B." in key and not file.get_tensor(key).any()]  # noqa: SIM118
    assert not untouched


def test_the_adapters_are_unlike_in_every_respect() -> None:
    recipes = RECIPES.values()
    assert len({recipe.lora_rank for recipe in recipes}) == len(RECIPES)
    assert len({frozenset(recipe.targets) for recipe in recipes}) == len(RECIPES)
    assert {recipe.use_rslora for recipe in recipes} == {True, False}
    assert len({recipe.saved_dtype for recipe in recipes}) > 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_card_tells_data_command_and_every_figure(name: str) -> None:
    card = (ADAPTERS / name / "README.md").read_text()
    assert f"examples/finetune/data/{RECIPES[name].module}.py" in card
    assert f"python -m examples.finetune.train {name}" in card
    for meaning in RECIPES[name].task.METRICS.values():
        row = next(line for line in card.splitlines() if line.startswith(f"| {meaning} |"))
        before, after = (int(cell.strip().removesuffix("%")) for cell in row.split("|")[2:4])
        assert before < after


def test_no_file_of_an_adapter_names_a_path_of_a_machine() -> None:
    texts = [path.read_text() for suffix in ("*.json", "*.md") for path in ADAPTERS.glob(f"*/{suffix}")]
    assert len(texts) == 2 * len(RECIPES)
    assert not [text for text in texts if "/tmp/" in text or "/home/" in text or "/root/" in text]


def test_there_are_thirty_prompts_for_the_base_and_every_adapter() -> None:
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len({prompt["id"] for prompt in prompts}) == len(prompts) == 30
    assert {prompt["adapter"] for prompt in prompts} == {None, *RECIPES}
    assert all(prompt["messages"][-1]["role"] == "user" for prompt in prompts)
