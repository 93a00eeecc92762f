"""A lower bound of a fixed program's step on sets of devices within their memory: a small linear program.

    min  sum_i t_i + sum_s M_s        B_sj >= 0, sum_j B_sj = 1 for every segment s
         t_i >= whole_i + sum_s slope_is B_sj     for every device j
         M_s >= B_sj
         whole_p + sum_s cut_ps B_sj <= memory_j  at every step p of the program

It is the one of :mod:`hetspmd.ratios.linear` without what a device saves that has no share (the constants of the
supporting lines), without exchanges and rebalances, all of which cost something. So sets of devices differ in
bounds and in one row alone, and the program is solved anew from its last solution.
"""

from __future__ import annotations

from typing import Final

import highspy
import numpy as np

from hetspmd.cost.model import Array
from hetspmd.ratios.problem import Mask, Problem, Room
from hetspmd.search.highs import quiet_highs

_SLACK: Final = 1e-6
"""The part by which the bound is lower, and memory larger, than the solver says: it is exact to less."""


class MemoryBound:
    """Of a program that has a room, by its lines at the ratios ``at``, shape (segments, n).

    Columns are a share per segment and kind of devices, seconds per stage and the largest share of each segment.
    """

    def __init__(self, problem: Problem, room: Room, at: Array) -> None:
        self.problem = problem
        self._first = [kind[0] for kind in problem.kinds]
        self._shares = problem.segments * len(problem.kinds)
        self._stages = len(problem.weight)
        self._unit = problem.step_seconds(at) or 1.0
        self._highs = quiet_highs(threads=1, random_seed=0, solver="simplex")
        self._add_columns()
        self._add_rows(at, room)

    def _add_columns(self) -> None:
        problem, inf = self.problem, highspy.kHighsInf
        columns = self._shares + self._stages + problem.segments
        cost, lower = np.zeros((2, columns))
        # Stages in units of the step, whatever they take.
        cost[self._shares : self._shares + self._stages] = problem.weight
        cost[self._shares + self._stages :] = problem.per_largest / self._unit
        lower[self._shares : self._shares + self._stages] = problem.unsharded / self._unit
        self._highs.addVars(columns, lower, np.full(columns, inf))
        self._highs.changeColsCost(columns, np.arange(columns, dtype=np.int32), cost)

    def _add_rows(self, at: Array, room: Room) -> None:
        """Sums of shares, the largest of them, supporting lines, and memory."""
        problem, kinds = self.problem, len(self.problem.kinds)
        lines = problem.lines(at)
        slope = lines.slope[:, :, self._first] / self._unit
        rows: list[Array] = []
        least: list[float] = []
        columns = self._shares + self._stages + problem.segments

        def add(lower: float, *entries: tuple[int, float]) -> None:
            row = np.zeros(columns)
            for column, entry in entries:
                row[column] = entry
            rows.append(row)
            least.append(lower)

        for s in range(problem.segments):
            add(1.0, *((s * kinds + k, float(len(kind))) for k, kind in enumerate(problem.kinds)))
        for s in range(problem.segments):
            for k in range(kinds):
                add(0.0, (self._shares + self._stages + s, 1.0), (s * kinds + k, -1.0))
        for i, k in np.argwhere((slope > 0.0).any(axis=0)).tolist():
            own = [(s * kinds + k, -float(slope[s, i, k])) for s in range(problem.segments)]
            add(float(lines.whole[i, self._first[k]]) / self._unit, (self._shares + i, 1.0), *own)
        for k, j in enumerate(self._first):
            capacity = float(room.capacity[j]) * (1 + _SLACK)
            per_share = (room.cut + room.in_turn * room.times[j]) / capacity
            for whole, cut in zip(room.whole / capacity, per_share, strict=True):
                add(float(whole) - 1.0, *((s * kinds + k, -float(cut[s])) for s in range(problem.segments)))
        table = np.array(rows)
        some = table != 0.0
        starts = np.concatenate([[0], some.sum(axis=1).cumsum()])[:-1].astype(np.int32)
        index = np.nonzero(some)[1].astype(np.int32)
        most = np.full(len(rows), highspy.kHighsInf)
        most[: problem.segments] = 1.0
        self._highs.addRows(len(rows), np.array(least), most, len(index), starts, index, table[some])

    def seconds(self, present: Mask) -> float:
        """No ratios with shares on the devices ``present[s, j]`` alone, within the memory, take less; infinite
        where there are none."""
        problem, kinds = self.problem, len(self.problem.kinds)
        counts = np.array([present[:, list(kind)].sum(axis=1) for kind in problem.kinds], dtype=float).T
        for s in range(problem.segments):
            for k in range(kinds):
                self._highs.changeCoeff(s, s * kinds + k, float(counts[s, k]))
        most = np.where(counts > 0.0, 1.0, 0.0).reshape(-1)
        columns = np.arange(self._shares, dtype=np.int32)
        self._highs.changeColsBounds(self._shares, columns, np.zeros(self._shares), most)
        self._highs.run()
        status = self._highs.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return np.inf
        if status != highspy.HighsModelStatus.kOptimal:
            return 0.0
        least = self._unit * float(self._highs.getInfo().objective_function_value) * (1 - _SLACK)
        return least + problem.constant + float(problem.per_shard.sum())
