"""Repeating a measurement until the confidence interval of its median is tight.

Of n independent samples, sorted x_1 <= ... <= x_n, the number below the true median has the binomial
distribution B(n, 1/2) whatever the distribution of the times. So [x_k, x_(n+1-k)] holds the median with
probability 1 - 2 P(B(n, 1/2) < k); k is the largest with at least 95 % (order-statistics interval; David and
Nagaraja, Order Statistics, 7.1). It takes 6 samples for the first such interval. A measurement is tight where
half the interval's width is at most a given part of the median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from time import perf_counter

from hetspmd.profile.profile_thresholds import THRESHOLDS


@cache
def _rank(n: int) -> int:
    """The k of the interval [x_k, x_(n+1-k)]; 0 where n samples are too few."""
    tail, k = 0.0, 0
    while k < n // 2:
        tail += math.comb(n, k) * 0.5**n  # P(B = k)
        if 2 * tail > 1 - THRESHOLDS.confidence:
            break
        k += 1
    return k


def interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, low and high end of its interval; of fewer than 6 samples, the least and greatest."""
    ordered = sorted(samples)
    k = max(_rank(len(ordered)), 1)
    return median(ordered), ordered[k - 1], ordered[-k]


def tight(samples: Sequence[float], tolerance: float) -> bool:
    """Whether half the interval's width is at most ``tolerance`` of the median."""
    if len(samples) < THRESHOLDS.first_samples:
        return False
    middle, low, high = interval(samples)
    return (high - low) / 2 <= tolerance * middle


def repeat(run: Callable[[], float], deadline: float, tolerance: float, least: int = 3) -> list[float]:
    """Samples of ``run`` until they are tight, ``perf_counter()`` passes ``deadline`` or there are
    ``most_samples``; at least as many as ``least``."""
    samples, most = [run() for _ in range(least)], THRESHOLDS.most_samples
    while len(samples) < most and perf_counter() < deadline and not tight(samples, tolerance):
        samples.append(run())
    return samples
