"""A base model's folder, and adapters for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from punica_core.adapter_tools.base import BaseFolder, read_base
from tests.support.peft_adapters import save_peft_adapter, tiny_llama


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base(model_folder: Path) -> BaseFolder:
    return read_base(str(model_folder))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_peft_adapter(tmp_path / "adapter", r=3, rank_pattern={"down_proj": 5})
