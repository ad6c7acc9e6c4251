"""How long steps take, learned from those that were measured. No clock: seconds are an argument."""

from __future__ import annotations

import math

from punica_core.scheduler.plan import StepWork

_NUM_FEATURES = 4

_NOISE = 0.2
"""Standard deviation of one measurement, as a share of what was expected."""

_FORGETTING = 1e-3
"""Share of what is certain that each step makes uncertain again: a thousand steps without prompts, and what prompts
take is learned anew, from the old value on."""

_OUTLIER = 3.0
"""A step is believed to have taken at most twice its expected time, or so many standard deviations more: a pause of
the host is not a property of steps, and what is one shows again."""

_SCALE_RATE = 0.05

Vector = list[float]


class StepTimes:
    """A step takes a + b · decode_rows + c · prompt_rows + d · attended seconds, with a, b, c and d not negative.

    The four are estimated by recursive least squares, as a Kalman filter of constants whose certainty fades: towards
    what was assumed at the start, never beyond, so that long runs of like steps neither wind the gains up nor take
    away what is known of other steps. All is relative to the usual time of a step, so nothing depends on the device.
    """

    def __init__(self, many_rows: int = 1024) -> None:
        """many_rows: prompt rows of a large step."""
        # What is counted in what, so that a unit of each takes a time of like size.
        self._units = (1.0, 64.0, many_rows / 2, many_rows * 2048.0)
        self._mean: Vector = [0.0] * _NUM_FEATURES
        self._covariance: list[Vector] = []
        self._scale = 0.0

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step with this work took `seconds`, above 0."""
        if self._scale == 0.0:
            self._scale = seconds
            self._covariance = [[seconds**2 * (i == j) for j in range(_NUM_FEATURES)] for i in range(_NUM_FEATURES)]
        self._scale *= (seconds / self._scale) ** _SCALE_RATE
        features = self._features(work)
        expected = _dot(features, self._mean)
        spread = [_dot(row, features) for row in self._covariance]
        variance = _dot(spread, features) + (_NOISE * max(expected, self._scale)) ** 2
        surprise = min(seconds - expected, max(expected, _OUTLIER * math.sqrt(variance)))
        gains = [value / variance for value in spread]
        self._mean = [max(0.0, old + gain * surprise) for old, gain in zip(self._mean, gains, strict=True)]
        self._covariance = [
            [
                (1 - _FORGETTING) * (value - gain * other) + _FORGETTING * self._scale**2 * (i == j)
                for j, (value, other) in enumerate(zip(row, spread, strict=True))
            ]
            for i, (row, gain) in enumerate(zip(self._covariance, gains, strict=True))
        ]

    def expected(self, work: StepWork) -> float:
        """Seconds that a step with this work takes; infinite before the first measurement."""
        return _dot(self._features(work), self._mean) if self._scale else math.inf

    def at_most(self, work: StepWork) -> float:
        """The same and a standard deviation of that estimate: what is not known is not taken to be free."""
        features = self._features(work)
        variance = sum(value * _dot(row, features) for value, row in zip(features, self._covariance, strict=False))
        return self.expected(work) + math.sqrt(max(variance, 0.0))

    def _features(self, work: StepWork) -> Vector:
        counts = (1, work.decode_rows, work.prompt_rows, work.attended)
        return [count / unit for count, unit in zip(counts, self._units, strict=True)]


def _dot(left: Vector, right: Vector) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
