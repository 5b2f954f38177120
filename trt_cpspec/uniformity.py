"""Test numbers that should be uniform in (0, 1): chi-square over equal cells, with its power."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

FALSE_ALARM = 1e-6
"""Chance that a correct engine fails the law check, over all its tests and for a seed drawn at random."""

POWER = 0.999
"""Chance that an error of the stated total variation is found."""

CELLS = 17
"""Cells of a chi-square test: 16 degrees of freedom, whose tail is a finite sum."""

MIN_SAMPLE = 20 * CELLS
"""Values below which a chi-square test is not judged: its tail would not be that of chi-square."""


def uniformity(values: NDArray[np.float64], *, shift: float = 0.0, threshold: float = FALSE_ALARM) -> dict[str, Any]:
    """Test numbers that should be uniform in (0, 1).

    Parameters
    ----------
    values : ndarray, shape [n]
    shift : float
        Relative change of a probability that is allowed for, as a noncentrality of ``n * shift**2``.
    threshold : float
        Of the p-value.

    Returns
    -------
    dict
        ``sample``, ``chi_square`` (16 degrees of freedom), ``p_value``, ``threshold``, ``judged``; ``total_variation``
        of the cells' shares from equal ones, ``noise``, what that is on average when the law is kept, and
        ``detectable``, the total variation that is found with a chance of ``POWER``.
    """
    count = len(values)
    observed = np.bincount(np.minimum((values * CELLS).astype(int), CELLS - 1), minlength=CELLS)
    expected = count / CELLS
    statistic = float(((observed - expected) ** 2).sum() / expected)
    noise = math.sqrt(CELLS * (1 - 1 / CELLS) / (2 * math.pi * count))
    return {
        "sample": count,
        "total_variation": float(np.abs(observed / count - 1 / CELLS).sum() / 2),
        "noise": noise,
        "chi_square": statistic,
        "p_value": chi_square_tail(statistic, count * shift**2),
        "threshold": threshold,
        "judged": count >= MIN_SAMPLE,
        "detectable": detectable_variation(count, threshold, shift=shift),
    }


def chi_square_tail(statistic: float, noncentrality: float = 0.0) -> float:
    """Return the chance that chi-square with 16 degrees of freedom exceeds a value."""
    if statistic <= 0:
        return 1.0
    half, shift, first = statistic / 2, noncentrality / 2, (CELLS - 1) // 2
    # A Poisson mixture of central ones, each with two degrees of freedom more; the tail of each is a Poisson sum too.
    # In logarithms, for both run far over the range of a float64.
    steps = int(shift + 12 * math.sqrt(shift) + 40)
    counts = np.arange(first + steps)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(counts[1:]))])
    tails = np.cumsum(np.exp(counts * math.log(half) - half - factorials))[first - 1 :]
    if shift == 0:
        return min(float(tails[0]), 1.0)
    weights = np.exp(counts[:steps] * math.log(shift) - shift - factorials[:steps])
    return min(float(weights @ tails[:steps]), 1.0)


def detectable_variation(count: int, threshold: float, *, shift: float = 0.0) -> float:
    """Return the total variation over the cells that ``count`` values find with a chance of ``POWER``.

    A total variation d is a noncentrality of at least ``4 * count * d**2``, whatever its shape.
    """
    return min(math.sqrt(needed_noncentrality(threshold, count * shift**2) / (4 * count)), 1.0)


@functools.lru_cache(maxsize=256)
def needed_noncentrality(threshold: float, allowed: float = 0.0) -> float:
    """Return the noncentrality that exceeds the critical value of a threshold with a chance of ``POWER``."""
    critical = _bisected(lambda value: chi_square_tail(value, allowed) < threshold, 0.0, 1000.0 + 4 * allowed)
    return _bisected(lambda value: chi_square_tail(critical, value) > POWER, 0.0, 700.0 + 4 * allowed)


def _bisected(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return where a monotone condition begins to hold."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
