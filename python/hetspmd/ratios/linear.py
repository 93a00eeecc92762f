"""The linear program of HAP 5.1 and 5.2 in HiGHS, for the segments' ratios of a fixed program.

    min  sum_i (comm_i(B) + t_i)      B_sj >= 0, sum_j B_sj = 1 for every segment s
         t_i >= comp_ij(B_1j, ..., B_kj)   for every device j
         M_s >= B_sj                  comm of padded collectives is linear in their segment's largest share
         X_s >= B_sj (1 - B_sj)       comm of all-to-alls is linear in the part exchanged
         Y_st >= u_j + v_{j-1}, v_j + u_{j-1},   u_j - v_j = S_j - T_j,   u, v >= 0
                                      comm of rebalances is linear in the part moved (cost/rebalance.py), with
                                      prefix sums S of segment s and T of t
         whole_p + sum_s cut_ps B_sj <= memory_j      at every step p of the program

- comp_ij is a sum of rooflines, convex and piecewise linear. It enters by its supporting lines, added where a
  solution violates them until none does (Kelley's cutting planes); so do the rows of memory.
- B (1 - B) is concave; its tangent at the last solution bounds it from above, so that the step time never
  rises from one solution to the next (convex-concave procedure, Yuille and Rangarajan 2003).
- Devices that are equal, and present in the same segments, share their variables. Segments in one *group* do too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import highspy
import numpy as np
import numpy.typing as npt

from hetspmd.cost.model import Array, Index
from hetspmd.errors import HetspmdError
from hetspmd.ratios.problem import Lines, Mask, Problem
from hetspmd.ratios.ratio_thresholds import THRESHOLDS
from hetspmd.search.highs import quiet_highs


class BalanceError(HetspmdError):
    """The solver failed on the ratios' linear program."""


class NoRoomError(BalanceError):
    """No ratios of these devices keep within the memory."""


_NO_TIME: Final = 1e-200
"""Seconds; a stage that takes less takes none. In units of such a stage other times overflow."""


class LinearProgram:
    """Columns x (a share per group of segments and class of devices), t (per stage, in units of ``scale``), M, X,
    and Y, u and v per pair of groups; in units of the step time at the start, ``unit``.

    ``present[s, j]``: whether device j may have a share of segment s. ``groups[s]``: the group of segment s,
    numbered from 0; its segments have the same devices. ``cuts``: the supporting lines in the order of their rows,
    as (first row, B, stages, places in ``classes``).
    """

    def __init__(self, problem: Problem, present: Mask, groups: Sequence[int], at: Array) -> None:
        self.problem, self.present = problem, present
        self.groups = np.asarray(groups, dtype=np.int64)
        self.classes = _classes(problem, present)
        self.first: Index = np.array([c[0] for c in self.classes])
        self.kinds_present: Mask = present[:, self.first]
        first_segment = [int(np.flatnonzero(self.groups == g)[0]) for g in range(int(self.groups.max()) + 1)]
        self.leader: Index = np.array(first_segment)
        count, classes, stages = len(first_segment), len(self.classes), len(problem.weight)
        self.pairs = _merged_pairs(problem, self.groups)
        self.scale = problem.computation(at).max(axis=1)
        self.scale[self.scale < _NO_TIME] = 1.0
        self.unit = problem.step_seconds(at) or 1.0
        self.cuts: list[tuple[int, Array, Index, Index]] = []
        self.t0 = count * classes
        self.largest = self.t0 + stages
        self.exchange = self.largest + count
        self.moved = self.exchange + count
        self.highs = quiet_highs(
            threads=1,
            random_seed=0,
            primal_feasibility_tolerance=THRESHOLDS.tolerances[0],
            dual_feasibility_tolerance=THRESHOLDS.tolerances[0],
        )
        self._looser = list(THRESHOLDS.tolerances[1:])
        self.rows = 0
        self._solved = False
        self._add_columns()
        self._add_rows(at)
        self._cut(at, problem.lines(at), np.ones((stages, classes), dtype=bool))

    def _add_columns(self) -> None:
        """The variables with their bounds, and what each costs."""
        problem, unit, n = self.problem, self.unit, self.problem.model.world
        columns = self.moved + len(self.pairs) * (1 + 2 * n)
        cost = np.zeros(columns)
        cost[self.t0 : self.largest] = problem.weight * self.scale / unit
        np.add.at(cost, self.largest + self.groups, problem.per_largest / unit)
        np.add.at(cost, self.exchange + self.groups, problem.per_exchange / unit)
        for p, (_, _, moved) in enumerate(self.pairs):
            cost[self.moved + p * (1 + 2 * n)] = moved / unit
        lower = np.zeros(columns)
        lower[self.t0 : self.largest] = problem.unsharded / self.scale
        upper = np.full(columns, highspy.kHighsInf)
        bound = np.clip(problem.most[self.first], 0.0, 1.0)
        upper[: self.t0] = np.where(self.kinds_present[self.leader], bound, 0.0).reshape(-1)
        self.highs.addVars(columns, lower, upper)
        self.highs.changeColsCost(columns, np.arange(columns, dtype=np.int32), cost)

    def _add_rows(self, at: Array) -> None:
        """Shares that sum to one, the largest of them, what an exchange takes (near ``at``), and what moves between
        segments."""
        count, classes = len(self.leader), len(self.classes)
        size = [float(len(c)) for c in self.classes]
        x = range(count * classes)
        own = [list(range(g * classes, (g + 1) * classes)) for g in range(count)]
        self._rows([1.0] * count, [1.0] * count, own, [size] * count)
        inf = highspy.kHighsInf
        self._rows(
            [0.0] * len(x),
            [inf] * len(x),
            [[self.largest + i // classes, i] for i in x],
            [[1.0, -1.0]] * len(x),
        )
        self.bent = self.rows  # X's rows: X - (1 - 2 r) x >= r^2
        shares = self.shares(at).reshape(-1)
        self._rows(
            list(shares**2),
            [inf] * len(x),
            [[self.exchange + i // classes, i] for i in x],
            [[1.0, 2 * r - 1] for r in shares],
        )
        for p, (a, b, _) in enumerate(self.pairs):
            self._pair(self.moved + p * (1 + 2 * self.problem.model.world), a * classes, b * classes)

    def shares(self, at: Array) -> Array:
        """Shares per group and class of B, shape (segments, n)."""
        shares: Array = at[self.leader][:, self.first]
        return shares

    def _rows(
        self,
        lower: Sequence[float],
        upper: Sequence[float],
        index: Sequence[Sequence[int]],
        value: Sequence[Sequence[float]],
    ) -> None:
        starts = np.concatenate([[0], np.cumsum([len(i) for i in index])]).astype(np.int32)
        flat = np.array([c for row in index for c in row], dtype=np.int32)
        numbers = np.array([v for row in value for v in row], dtype=float)
        self._add(np.array(lower, dtype=float), np.array(upper, dtype=float), starts, flat, numbers)

    def _add(
        self,
        lower: Array,
        upper: Array,
        starts: npt.NDArray[np.int32],
        index: npt.NDArray[np.int32],
        value: Array,
    ) -> None:
        self.highs.addRows(len(lower), lower, upper, len(value), starts[:-1], index, value)
        self.rows += len(lower)

    def _pair(self, column: int, one: int, other: int) -> None:
        """Rows of Y, whose columns begin at ``column``, for the shares from columns ``one`` and ``other`` on."""
        n = self.problem.model.world
        u, v = column + 1, column + 1 + n
        place = {j: c for c, members in enumerate(self.classes) for j in members}
        for j in range(n):
            last = j == n - 1
            index, value = ([], []) if last else ([u + j, v + j], [1.0, -1.0])
            if j:
                index, value = [*index, u + j - 1, v + j - 1], [*value, -1.0, 1.0]
            if j in place and not last:  # the last prefix sums are 1
                index, value = [*index, one + place[j], other + place[j]], [*value, -1.0, 1.0]
            if not last:
                self._rows([0.0], [0.0], [index], [value])
            sent = [column] + ([] if last else [u + j]) + ([v + j - 1] if j else [])
            received = [column] + ([] if last else [v + j]) + ([u + j - 1] if j else [])
            weights = [1.0] + [-1.0] * (len(sent) - 1)
            self._rows([0.0, 0.0], [highspy.kHighsInf] * 2, [sent, received], [weights, weights])

    def _cut(self, at: Array, lines: Lines, where: Mask) -> None:
        stage, place = np.nonzero(where)
        if not len(stage):
            return
        slope, constant = self._on(lines)
        classes, count = len(self.classes), len(self.leader)
        self.cuts.append((self.rows, at, stage, place))
        slopes = slope[:, stage, place].T / self.scale[stage, None]
        some = slopes != 0
        index = np.concatenate(
            [(self.t0 + stage)[:, None], np.arange(count)[None] * classes + place[:, None]], axis=1
        )
        value = np.concatenate([np.ones((len(stage), 1)), -slopes], axis=1)
        nonzero = np.concatenate([np.ones((len(stage), 1), dtype=bool), some], axis=1)
        starts = np.concatenate([[0], nonzero.sum(axis=1).cumsum()]).astype(np.int32)
        self._add(
            constant[stage, place] / self.scale[stage],
            np.full(len(stage), highspy.kHighsInf),
            starts,
            index[nonzero].astype(np.int32),
            value[nonzero],
        )

    def _on(self, lines: Lines) -> tuple[Array, Array]:
        """Slopes by group, shape (groups, stages, classes), and constants, shape (stages, classes)."""
        there = self.kinds_present[:, None]
        slope = np.zeros((len(self.leader), len(self.scale), len(self.classes)))
        np.add.at(slope, self.groups, lines.slope[:, :, self.first] * there)
        constant = (lines.constant[:, :, self.first] * there).sum(axis=0) + lines.whole[:, self.first]
        return slope, constant

    def cut(self, at: Array, t: Array) -> bool:
        """Add the supporting lines at B that ``t`` violates, and the memory that B lacks; whether there were
        any."""
        lines = self.problem.lines(at)
        slope, constant = self._on(lines)
        seconds = constant + np.einsum("gsc,gc->sc", slope, self.shares(at))
        beyond = t[:, None] * (1 + THRESHOLDS.cut_part) + THRESHOLDS.cut_scaled
        where = seconds / self.scale[:, None] > beyond
        self._cut(at, lines, where)
        return self._fill(at) or bool(where.any())

    def _fill(self, at: Array) -> bool:
        """Add the rows of memory that B violates, of each class the worst."""
        room = self.problem.room
        if room is None:
            return False
        held, classes = room.held(at)[:, self.first], len(self.classes)
        worst = held.argmax(axis=0)
        violated = False
        for c, step in enumerate(worst):
            capacity = float(room.capacity[self.first[c]])
            if held[step, c] <= capacity * (1 + THRESHOLDS.bound_part):
                continue
            violated = True
            cut = np.zeros(len(self.leader))
            np.add.at(
                cut, self.groups, room.cut[step] + room.in_turn[step] * float(room.times[self.first[c]])
            )
            index = [g * classes + c for g in range(len(cut))]
            self._rows(
                [-highspy.kHighsInf],
                [1 - float(room.whole[step]) / capacity],
                [index],
                [list(cut / capacity)],
            )
        return violated

    def bend(self, at: Array) -> None:
        """Take the tangents of ``x (1 - x)`` at new shares."""
        for i, r in enumerate(map(float, self.shares(at).reshape(-1))):
            self.highs.changeCoeff(self.bent + i, i, 2 * r - 1)
            self.highs.changeRowBounds(self.bent + i, r * r, highspy.kHighsInf)

    def multipliers(self) -> tuple[list[Array], Array]:
        """The last solution's dual values, in step seconds per second of a stage: of the rows of each of ``cuts``
        (supporting lines at B of a stage on a class), and of each stage's seconds without any share."""
        solution = self.highs.getSolution()
        dual = np.array(solution.row_dual)
        bounds = np.maximum(np.array(solution.col_dual)[self.t0 : self.largest], 0.0)
        scale = self.unit / self.scale
        duals = [dual[row : row + len(stage)] * scale[stage] for row, _, stage, _ in self.cuts]
        return duals, bounds * scale

    def _limit(self) -> None:
        """As many steps as a solution takes, unless there is no looser tolerance left."""
        most = THRESHOLDS.simplex_steps * (self.rows + self.highs.getNumCol())
        self.highs.setOptionValue("simplex_iteration_limit", most if self._looser else highspy.kHighsIInf)

    def solve(self) -> tuple[Array, Array]:
        """B, shape (segments, n), and seconds per stage, in units of ``scale``. Raises NoRoomError where rows of
        memory leave no ratios, BalanceError if the solver fails."""
        # From nothing the interior point method is the quicker one for large programs, from a solution the simplex.
        first = self.rows > THRESHOLDS.interior_rows and not self._solved
        self.highs.setOptionValue("solver", "ipm" if first else "simplex")
        self._solved = True
        self._limit()
        status = self.highs.run()
        while self.highs.getModelStatus() == highspy.HighsModelStatus.kIterationLimit and self._looser:
            tolerance = self._looser.pop(0)
            self.highs.setOptionValue("primal_feasibility_tolerance", tolerance)
            self.highs.setOptionValue("dual_feasibility_tolerance", tolerance)
            self._limit()
            status = self.highs.run()
        model = self.highs.getModelStatus()
        if status == highspy.HighsStatus.kError or model != highspy.HighsModelStatus.kOptimal:
            said = self.highs.modelStatusToString(model)
            if self.problem.room is not None:
                raise NoRoomError(f"no ratios were found that keep within the memory: {said}")
            raise BalanceError(
                f"HiGHS found no optimal ratios: {said}; check the cluster "
                "for quantities that are many orders of magnitude apart"
            )
        values = np.array(self.highs.getSolution().col_value)
        x = np.maximum(values[: self.t0], 0.0).reshape(len(self.leader), len(self.classes))
        return spread(self.problem.model.world, self.classes, x)[self.groups], values[self.t0 : self.largest]


def spread(world: int, classes: Sequence[Sequence[int]], x: Array) -> Array:
    """Shares per device from shares per class, each row of shape (classes); rounding noise becomes 0, and each sum
    1."""
    ratios = np.zeros((len(x), world))
    for c, devices in enumerate(classes):
        share = np.where(x[:, c] > THRESHOLDS.smallest_share, x[:, c], 0.0)
        ratios[:, list(devices)] = share[:, None]
    shares: Array = ratios / ratios.sum(axis=1, keepdims=True)
    return shares


def _classes(problem: Problem, present: Mask) -> list[list[int]]:
    """Devices of one kind that are present in the same segments, without those that are in none."""
    classes: list[list[int]] = []
    for kind in problem.kinds:
        parts: dict[tuple[bool, ...], list[int]] = {}
        for j in kind:
            if present[:, j].any():
                parts.setdefault(tuple(map(bool, present[:, j])), []).append(j)
        classes += parts.values()
    return classes


def _merged_pairs(problem: Problem, groups: Index) -> list[tuple[int, int, float]]:
    """``(group, group, seconds per part moved)`` of the pairs of groups with rebalances."""
    seconds: dict[tuple[int, int], float] = {}
    for (s, t), (_, moved) in problem.pairs.items():
        a, b = sorted((int(groups[s]), int(groups[t])))
        if a != b:
            seconds[a, b] = seconds.get((a, b), 0.0) + moved
    return [(a, b, seconds[a, b]) for a, b in sorted(seconds)]
