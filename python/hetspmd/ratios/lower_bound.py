"""A lower bound of a fixed program's step on sets of devices, without a linear program.

With the shares B_j of one segment on the devices j of a set, a stage takes at least a time T in which they can take
all of the axis. By the supporting lines ``c_j + k_j B_j`` of its seconds, device j takes at most the share
``max(0, (T - c_j) / k_j)`` in T. The least T for which these come to 1 is the least over all subsets of

    T = (1 + sum c_j / k_j) / (sum 1 / k_j)

and the subsets that begin with the least c_j suffice. Each stage has its own shares here, and bounds of the ratios
and memory are not looked at, so that no ratios on these devices, or on some of them, take less.
"""

from __future__ import annotations

import numpy as np

from hetspmd.cost.model import Array
from hetspmd.ratios.problem import Mask, Problem

_NO_SLOPE = 1e-30
"""Seconds per share that stand for none."""


class LowerBound:
    """Of a program, by its lines at the ratios ``at``, shape (segments, n)."""

    def __init__(self, problem: Problem, at: Array) -> None:
        self.problem = problem
        self._first = [kind[0] for kind in problem.kinds]
        lines = problem.lines(at)
        least = lines.whole[:, self._first] + lines.constant[:, :, self._first]
        slope = np.maximum(lines.slope[:, :, self._first], _NO_SLOPE)
        self._order = np.argsort(least, axis=2, kind="stable")
        self._least = np.take_along_axis(least, self._order, axis=2)
        self._shares = 1.0 / np.take_along_axis(slope, self._order, axis=2)
        self._sharded = (lines.slope > 0.0).any(axis=2)

    def seconds(self, present: Mask) -> float:
        """No ratios with shares on the devices ``present[s, j]`` alone take less."""
        problem = self.problem
        counts = np.array([present[:, list(kind)].sum(axis=1) for kind in problem.kinds], dtype=float).T
        if not counts.any(axis=1).all():
            return np.inf
        ordered = np.take_along_axis(np.broadcast_to(counts[:, None], self._least.shape), self._order, axis=2)
        shares = ordered * self._shares
        in_a_second = shares.cumsum(axis=2)
        # Devices that are not in the set may come first: they are no subset of it.
        some = in_a_second > 0.0
        filled = 1.0 + (shares * self._least).cumsum(axis=2)
        times = np.where(some, filled / np.where(some, in_a_second, 1.0), np.inf).min(axis=2)
        stages = np.maximum(problem.unsharded, np.where(self._sharded, times, 0.0).max(axis=0))
        largest = 1.0 / present.sum(axis=1)
        communication = problem.constant + problem.per_shard.sum() + problem.per_largest @ largest
        return float(problem.weight @ stages + communication)
