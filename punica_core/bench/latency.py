"""Percentiles, as every benchmark reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

PERCENTILES: Final = (50, 90, 99)


def percentiles(values: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds of values in seconds; None of no values."""
    if len(values) == 0:
        return None
    milliseconds = np.asarray(values) * 1e3
    found = {f"p{p}": float(np.percentile(milliseconds, p)) for p in PERCENTILES}
    return {"mean": float(milliseconds.mean()), **found, "max": float(milliseconds.max())}
