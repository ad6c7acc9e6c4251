"""One saved adapter for the whole area; tests work on copies of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from punica_core.adapters.format import ModelShapes
from punica_core.lora.cache import AdapterCache
from punica_core.model.shapes import model_shapes
from tests.support.peft_adapters import save_peft_adapter, tiny_llama


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small cost more to share out than to multiply, the more so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def saved_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_peft_adapter(tmp_path_factory.mktemp("saved") / "A")


@pytest.fixture(scope="session")
def shapes() -> ModelShapes:
    return model_shapes(tiny_llama())


@pytest.fixture
def adapter(saved_adapter: Path, tmp_path: Path) -> Path:
    """A copy of adapter A (rank 8, all linears of F0) to be damaged."""
    return Path(shutil.copytree(saved_adapter, tmp_path / "A"))


@pytest.fixture
def make_cache(shapes: ModelShapes) -> Iterator[Callable[..., AdapterCache]]:
    made: list[AdapterCache] = []

    def make(budget_bytes: int = 10_000_000, **options: object) -> AdapterCache:
        made.append(AdapterCache(shapes, torch.float32, budget_bytes, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cache in made:
        cache.close()


@pytest.fixture(scope="session")
def saved_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("five")
    for seed in range(5):
        save_peft_adapter(root / f"adapter{seed}", seed=seed, r=4, target_modules=["q_proj"])
    return root


@pytest.fixture
def folders(saved_folders: Path, tmp_path: Path) -> list[Path]:
    """Five adapters of equal size and different content: q_proj only, rank 4."""
    return sorted(Path(shutil.copytree(saved_folders, tmp_path / "five")).iterdir())
