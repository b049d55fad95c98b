"""A straight line through times of several sizes that resists a few late ones."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS = 50
TUKEY = 4.685
"""A time this many deviations away from the line has no weight, as in Tukey's biweight."""
LEAST_DEVIATION = 0.03
"""The least deviation of times from the line, as a part of the median one: a collective's rate
rises with its size, so that its times bend by as much, and none of them is to be taken for late."""


@dataclass(frozen=True)
class Line:
    """The seconds of a size: ``alpha_s + size * beta_s``.

    Attributes:
        alpha_s: Seconds of any size.
        beta_s: Seconds for each unit.
        r_squared: Share of the times' variance that the line explains.
    """

    alpha_s: float
    beta_s: float
    r_squared: float

    def time_s(self, size: float) -> float:
        """Returns the seconds of a size."""
        return self.alpha_s + size * self.beta_s


def fit_line(sizes: Sequence[float], times_s: Sequence[float]) -> Line:
    """Fits a line by least squares of errors over times, weighted less the larger an error is.

    A time is taken to vary as a sum of independent ones does: its variance grows with it. Relative
    errors would give as much to a time of 40 us as to one of 700, which a schedule is made of.

    Args:
        sizes: At least two different ones, none negative.
        times_s: Each one's, above 0.

    Returns:
        The line. Neither of its terms is negative.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(times_s) or min(times_s) <= 0:
        raise ValueError(f"sizes {sizes} and times {times_s}: wanted two sizes, times above 0")
    weights = [1.0] * len(sizes)
    least = LEAST_DEVIATION * statistics.median(times_s) ** 0.5
    alpha = beta = 0.0
    for _ in range(ROUNDS):
        before = alpha, beta
        alpha, beta = _weighted(sizes, times_s, weights)
        errors = [(alpha + beta * n - t) / t**0.5 for n, t in zip(sizes, times_s, strict=True)]
        deviation = statistics.median(map(abs, errors)) / 0.6745  # if they are normal ones
        spread = max(deviation, least)
        far = [error / (TUKEY * spread) for error in errors]
        weights = [(1 - one * one) ** 2 if abs(one) < 1 else 0.0 for one in far]
        if math.isclose(before[0], alpha, rel_tol=1e-9) and math.isclose(before[1], beta):
            break
    mean = statistics.fmean(times_s)
    left = sum((alpha + beta * n - t) ** 2 for n, t in zip(sizes, times_s, strict=True))
    whole = sum((t - mean) ** 2 for t in times_s)
    return Line(alpha, beta, 1 - left / whole if whole else float(left == 0))


def _weighted(
    sizes: Sequence[float], times_s: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """Solves ``alpha + beta * n = t`` by least squares over t; both terms are at least 0."""
    rows = [(w / t, n, t) for n, t, w in zip(sizes, times_s, weights, strict=True)]
    s, st = sum(w for w, _, _ in rows), sum(w * t for w, _, t in rows)
    sn = sum(w * n for w, n, _ in rows)
    snn, snt = sum(w * n * n for w, n, _ in rows), sum(w * n * t for w, n, t in rows)
    determinant = s * snn - sn * sn
    alpha = (st * snn - sn * snt) / determinant if determinant else -1.0
    beta = (s * snt - sn * st) / determinant if determinant else -1.0
    if beta < 0:
        return st / s, 0.0
    if alpha < 0:
        return 0.0, snt / snn
    return alpha, beta
