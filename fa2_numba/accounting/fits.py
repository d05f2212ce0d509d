"""How fast something grows: the exponent of a power law, and how far the points are from one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Student's t, 97.5 % quantile, for 1, 2, ... degrees of freedom.
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """The straight line through (log N, log y).

    Attributes
    ----------
    slope : float
        The exponent p of ``y ~ N**p`` that fits all points best.
    half_width : float
        Half the 95 % interval of `slope`. Counts have no noise, so this is not the chance of
        another outcome: it measures how far the points bend away from one power law. 0 means that
        they lie on it. Infinite for two points, through which every line passes.
    last : float
        The slope between the last two points, where the fastest growing term counts most.
    points : int
    first_N, last_N : int
        The range of the fit.
    """

    slope: float
    half_width: float
    last: float
    points: int
    first_N: int
    last_N: int

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends of the 95 % interval."""
        return self.slope - self.half_width, self.slope + self.half_width

    def __str__(self) -> str:
        if math.isinf(self.half_width):
            return f"{self.slope:.2f}"
        return f"{self.slope:.2f} ± {self.half_width:.2f}"


def fit_exponent(N: Sequence[int], y: Sequence[int]) -> Fit | None:
    """Fit ``log y = p log N + c`` by least squares.

    Parameters
    ----------
    N, y : positive numbers of equal count
        Points with ``y = 0`` are on no power law and are left out.

    Returns
    -------
    Fit or None
        None with fewer than two different N left. `Fit.half_width` is Student's t at 97.5 % times
        the standard error of the slope, both with the number of points - 2 degrees of freedom.

    Raises
    ------
    ValueError
        Counts differ, or a number is negative.
    """
    if len(N) != len(y):
        raise ValueError(f"N, y: got {len(N)} and {len(y)} numbers, accepted are equal counts")
    if any(n < 1 for n in N) or any(value < 0 for value in y):
        raise ValueError("N, y: got a negative number or N = 0, accepted are N >= 1 and y >= 0")
    pairs = sorted((n, value) for n, value in zip(N, y, strict=True) if value)
    if len({n for n, _ in pairs}) < 2:
        return None
    x, z = np.log(np.array(pairs, np.float64)).T
    dx, dz = x - x.mean(), z - z.mean()
    slope = float(dx @ dz / (dx @ dx))
    residual = dz - slope * dx
    half_width, freedom = math.inf, len(pairs) - 2
    if freedom:
        t = _T_975[min(freedom, len(_T_975)) - 1]
        half_width = t * math.sqrt(float(residual @ residual) / freedom / float(dx @ dx))
    end = int(np.searchsorted(x, x[-1]))
    last = float((z[-1] - z[end - 1]) / (x[-1] - x[end - 1]))
    return Fit(slope, half_width, last, len(pairs), int(pairs[0][0]), int(pairs[-1][0]))
