from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from punica_core import worker
from punica_core.config import EngineConfig
from punica_core.errors import ConfigError


@pytest.mark.parametrize("level", ["debug", "error"])
def test_a_worker_logs_at_the_level_of_its_configuration(level: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # is put back after the test
    refused_later = EngineConfig(model="m", max_num_seqs=0, log_level=level)
    channel: Any = SimpleNamespace(receive_configuration=lambda: refused_later)
    with pytest.raises(ConfigError):
        worker._serve(channel)
    assert logging.getLevelName(logging.root.level) == level.upper()
