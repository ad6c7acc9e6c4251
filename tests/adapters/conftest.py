"""One saved adapter for the whole area; tests work on copies of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from punica_core.adapters.format import ModelShapes
from tests.support.peft_adapters import linear_shapes, save_peft_adapter, tiny_llama


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
    return linear_shapes(tiny_llama())


@pytest.fixture
def adapter(saved_adapter: Path, tmp_path: Path) -> Path:
    """A copy of adapter A (rank 8, all linears of F0) to be damaged."""
    return Path(shutil.copytree(saved_adapter, tmp_path / "A"))
