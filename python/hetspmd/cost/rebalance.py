"""Seconds of a rebalance: consecutive slices of a tensor, divided in shares s, are divided in shares t instead.

With prefix sums ``S_j = s_0 + ... + s_j`` and T_j of t, device j holds ``[S_{j-1}, S_j]`` and then
``[T_{j-1}, T_j]``. What both have in common stays, the rest is sent by one all-to-all with split sizes; of the
tensor's E bytes the busiest device sends or receives the part X. In the form of :mod:`hetspmd.cost.model`:

    L + X E / b,    X = max_j max(s_j, t_j) - common_j,    common_j = max(0, min(S_j, T_j) - max(S_{j-1}, T_{j-1}))

Nothing is sent where the shares agree: 0 seconds, and no collective. For the linear program, where the intervals of
a device overlap, ``s_j - common_j = (S_j - T_j)+ + (T_{j-1} - S_{j-1})+`` is convex and piecewise linear, and
likewise for t; where they do not, that is an upper bound.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def moved_part(source: Array, target: Array) -> float:
    """X: the part of the whole that the busiest device sends or receives."""
    before, after = source.cumsum(), target.cumsum()
    start = np.maximum(before - source, after - target)
    common = np.maximum(np.minimum(before, after) - start, 0.0)
    return float((np.maximum(source, target) - common).max())


def rebalance_seconds(constant: float, per_exchange: float, source: Array, target: Array) -> float:
    """``constant + per_exchange * X``; 0 where the shares agree."""
    if np.array_equal(source, target):
        return 0.0
    return constant + per_exchange * moved_part(source, target)
