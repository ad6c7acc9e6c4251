"""One engine of the tiny shapes for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from punica_core.bench.session import EngineChoice, Session, open_session

NUM_ADAPTERS = 5


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    choice = EngineChoice(
        model="tiny",
        device="cpu",
        num_adapters=NUM_ADAPTERS,
        lora_ranks=(4, 9),
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_model_len=96,
    )
    with open_session(choice) as opened:
        yield opened
