"""Loads the CUDA kernels for tests that are marked ``gpu``."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Registers the CUDA implementation once per process, building it if nothing prebuilt fits."""
    if request.node.get_closest_marker("gpu"):
        from punica_core.ops import cuda

        cuda.load()
