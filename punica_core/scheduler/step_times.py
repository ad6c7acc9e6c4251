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
            self._forget()
        self._scale *= (seconds / self._scale) ** _SCALE_RATE
        features = self._features(work)
        expected = _dot(features, self._mean)
        spread = [_dot(row, features) for row in self._covariance]
        if _dot(spread, features) < 0:  # rounding, of measurements many powers of ten apart
            self._forget()
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

    def _forget(self) -> None:
        """The estimates are no more than a guess."""
        unknown = self._scale**2
        self._covariance = [[unknown * (i == j) for j in range(_NUM_FEATURES)] for i in range(_NUM_FEATURES)]

    def expected(self, work: StepWork) -> float:
        """Seconds that a step with this work takes; infinite before the first measurement."""
        return _dot(self._features(work), self._mean) if self._scale else math.inf

    def at_most(self, work: StepWork) -> float:
        """The same and a standard deviation of that estimate: what is not known is not taken to be free."""
        if not self._scale:
            return math.inf
        # Written out, for it is asked several times for each prompt that joins a step; the first feature is 1.
        _one, x, y, z = self._features(work)
        constant, by_x, by_y, by_z = self._mean
        (c, cx, cy, cz), (_cx, xx, xy, xz), (_cy, _xy, yy, yz), (_cz, _xz, _yz, zz) = self._covariance
        variance = (
            c + x * (2 * cx + x * xx) + y * (2 * (cy + x * xy) + y * yy) + z * (2 * (cz + x * xz + y * yz) + z * zz)
        )
        return constant + x * by_x + y * by_y + z * by_z + math.sqrt(max(variance, 0.0))

    def _features(self, work: StepWork) -> Vector:
        _one, decode, prompt, attended = self._units
        return [1.0, work.decode_rows / decode, work.prompt_rows / prompt, work.attended / attended]


def _dot(left: Vector, right: Vector) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
