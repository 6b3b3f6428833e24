"""Estimates the throughput of a run and its confidence interval. Does no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

MOST_GROUPS = 20
"""Maximum number of groups into which consecutive steps are divided."""


@dataclass(frozen=True)
class Rate:
    """Samples per second, with the bounds of a 95 % confidence interval (NaN if unknown)."""

    value: float
    low: float
    high: float


def rate(samples: Sequence[float], seconds: Sequence[float]) -> Rate:
    """Return a run's throughput with its 95 % confidence interval.

    `samples` contains the number of samples of each step over all ranks, and `seconds` contains the
    steps' durations. The rate is the ratio of the sums, so a short last batch has the correct
    weight. Consecutive steps are correlated, so treating them as independent would make the
    interval too narrow. The interval is therefore computed from groups of consecutive steps (batch
    means; Law and Carson, 1979), with the ratio estimator.
    """
    whole, time = math.fsum(samples), math.fsum(seconds)
    value = whole / time
    groups = min(MOST_GROUPS, len(seconds))
    # A single group has no spread to estimate the error from.
    if groups < 2:
        return Rate(value, math.nan, math.nan)
    # Contiguous groups of almost equal length, so that only adjacent groups are correlated.
    cuts = [len(seconds) * group // groups for group in range(groups + 1)]
    # The error of the ratio estimator is the spread of samples - rate * seconds over the groups.
    residuals = [
        math.fsum(samples[first:end]) - value * math.fsum(seconds[first:end])
        for first, end in pairwise(cuts)
    ]
    squares = math.fsum(residual**2 for residual in residuals)
    error = math.sqrt(squares * groups / (groups - 1)) / time
    reach = student(0.975, groups - 1) * error
    return Rate(value, max(0.0, value - reach), value + reach)


def student(p: float, degrees: int) -> float:
    """Return the quantile `p` of Student's t distribution (Abramowitz and Stegun, 1964, 26.7.5).

    The result is exact for 1 and 2 degrees of freedom. For more, the error is below 5e-3.
    """
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(1 / (2 * p * (1 - p)))
    # An expansion in 1 / degrees around the normal quantile.
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / float(degrees) ** power for power, term in enumerate(terms, 1))
