"""One real server on the demo model for all live tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.demo import ADAPTERS, demo_model
from tests.support.server import LiveServer, serve


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = demo_model()
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(log, "--model", str(model), "--adapters", str(ADAPTERS), "--served-model-name", "base") as server:
        yield server
