"""The sharding ratios B of a fixed program Q: the linear program of HAP 5.1, one segment.

    min  sum over stages i (comm_i(B) + t_i)          B_j >= 0, sum_j B_j = 1
         t_i >= comp_ij(B_j)   for every device j
         M   >= B_j            comm of padded collectives is linear in the largest share M
         X   >= B_j (1 - B_j)  comm of all-to-alls is linear in the part X exchanged
    B_j <= most_j         what device j holds at each step is linear in B_j, so that its memory is one bound

What makes it exact and quick:

- comp_ij is a sum of rooflines, convex and piecewise linear. It enters by its supporting lines, added where a
  solution violates them until none does (Kelley's cutting planes).
- B_j (1 - B_j) is concave; its tangent at the last solution bounds it from above, so that the step time never
  rises from one solution to the next (convex-concave procedure, Yuille and Rangarajan 2003).
- Equal devices share one variable: the problem is symmetric in them. Stages with equal terms are merged.
- A device without a share skips sharded ops with all their fixed cost, which no linear program sees. So the
  program is solved for sets of devices as well: every set (up to equal devices) if there are at most
  ``SETS``; else the fastest n - 1, n - 2, ... while that helps, and the fastest n / 2, n / 4, ...; and the
  first device of each kind alone.

The result is never dearer than the start in the stage model at fractional shares, if the start keeps the bounds.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from hetspmd.balance.starts import proportional
from hetspmd.cost.model import Array, CostModel, Index, MoveForm
from hetspmd.cost.step import Stages
from hetspmd.errors import HetspmdError
from hetspmd.rules.theory import Theory
from hetspmd.synth.program import Program

__all__ = ["BalanceError", "LinearProgram", "Problem", "minimise", "optimise_ratios", "solved"]

SETS = 32
PATIENCE = 2  # sets in a row, each without one more device, that need not help
ROUNDS = 100
BETTER = 1e-9  # a candidate replaces another only if it is better by this part


class BalanceError(HetspmdError):
    """The solver failed on the ratios' linear program."""


def optimise_ratios(
    theory: Theory, model: CostModel, program: Program, start: Sequence[float] | None = None, *,
    most: Sequence[float] | Array | None = None, stages: Stages | None = None,
) -> tuple[float, ...]:  # fmt: skip
    """argmin over B of t(Q, B) for a fixed program, summing to 1 in rank order.

    ``start`` (default: proportional to speed) is returned where nothing beats it. ``most`` are upper bounds of
    the ratios; where they leave no ratios that sum to 1, the start is returned. ``stages``: of the program, if
    they are known. The same arguments give the same ratios. Raises BalanceError if the solver fails, ValueError
    if the program is not of the theory.
    """
    if model.theory is not theory:
        raise ValueError("the cost model belongs to another theory")
    if model.world == 1:
        return (1.0,)
    first = np.asarray(proportional(model) if start is None else start, dtype=float)
    if first.shape != (model.world,) or first.min() < 0 or not np.isclose(first.sum(), 1.0):
        raise ValueError(
            f"start must be {model.world} non-negative ratios that sum to 1, got {first.tolist()}"
        )
    bounds = np.full(model.world, np.inf) if most is None else np.asarray(most, dtype=float)
    if np.minimum(np.maximum(bounds, 0.0), 1.0).sum() < 1.0:
        return tuple(map(float, first))
    problem = Problem(Stages(model, program) if stages is None else stages, bounds)
    best, value = first, problem.seconds_within(first)

    def consider(candidate: Array) -> bool:
        nonlocal best, value
        seconds = problem.seconds_within(candidate)
        if not seconds < value * (1 - BETTER):
            return False
        best, value = candidate, seconds
        return True

    sets = problem.sets()
    if len(sets) <= SETS:
        for counts in sets:
            consider(minimise(problem, counts, first))
    else:
        waited = 0
        for counts in sets:
            waited = 0 if consider(minimise(problem, counts, first)) else waited + 1
            if waited > PATIENCE:
                break
        for halving in range(1, model.world.bit_length()):
            consider(minimise(problem, sets[-(model.world >> halving)], first))
    for kind in problem.kinds:
        alone = np.zeros(model.world)
        alone[kind[0]] = 1.0
        consider(alone)
    return tuple(map(float, best))


@dataclass(frozen=True)
class _Lines:
    """Lines ``constant + slope * B`` below the seconds of stages, shape (stages, kinds)."""

    slope: Array
    constant: Array


class Problem:
    """A program's stages as functions of B: merged stages over merged signatures, and sums of the moves."""

    def __init__(self, stages: Stages, most: Array) -> None:
        model = self.model = stages.model
        self.most = most
        t, axes = model.triples, len(model.theory.axes.axes)
        columns = t.columns(axes)
        used = np.unique(stages.signatures)
        _, position, kind_of = np.unique(columns[used], axis=0, return_index=True, return_inverse=True)
        self.signatures: Index = used[position]
        self.sharded = t.axis[self.signatures] < axes
        merged = kind_of.reshape(-1)[np.searchsorted(used, stages.signatures)]
        counts = np.zeros((stages.count, len(self.signatures)))
        np.add.at(counts, (stages.stage, merged), 1.0)
        counts[:, t.free[self.signatures]] = 0.0
        unique, weight = np.unique(counts, axis=0, return_counts=True)
        self.counts: Array = unique
        self.weight: Array = weight.astype(float)
        self._add_up(stages.moves)
        kinds: dict[tuple[int, float], list[int]] = {}
        for j in range(model.world):
            kinds.setdefault((int(model.kinds[j]), float(most[j])), []).append(j)
        self.kinds: tuple[tuple[int, ...], ...] = tuple(map(tuple, kinds.values()))
        self.first = np.array([k[0] for k in self.kinds])
        self.unsharded: Array = self.computation(np.zeros(model.world)).max(axis=1)

    def _add_up(self, moves: Sequence[MoveForm]) -> None:
        self.constant = sum(m.constant for m in moves)
        self.per_shard = sum(m.per_shard for m in moves)
        self.per_largest = sum(m.per_largest for m in moves)
        self.per_exchange = sum(m.per_exchange for m in moves)

    def priced(self, model: CostModel, moves: Sequence[MoveForm]) -> Problem:
        """The same program on a cluster of other speeds, in which the devices of each kind are still equal."""
        other = copy.copy(self)
        other.model = model
        other._add_up(moves)
        other.unsharded = other.computation(np.zeros(model.world)).max(axis=1)
        return other

    def communication(self, ratios: Array) -> float:
        """Seconds of all collectives."""
        return (
            self.constant
            + self.per_shard * int(np.count_nonzero(ratios))
            + self.per_largest * float(ratios.max())
            + self.per_exchange * float((ratios * (1 - ratios)).max())
        )

    def computation(self, ratios: Array) -> Array:
        """Seconds of each merged stage on each device."""
        found: Array = self.counts @ self.model.seconds(self.signatures, self.model.even_shares(ratios))
        return found

    def step_seconds(self, ratios: Array) -> float:
        """t(Q, B)."""
        return float(self.weight @ self.computation(ratios).max(axis=1)) + self.communication(ratios)

    def seconds_within(self, ratios: Array) -> float:
        """t(Q, B), infinite where a ratio is above its bound."""
        return math.inf if (ratios > self.most * (1 + 1e-9)).any() else self.step_seconds(ratios)

    def lines(self, ratios: Array) -> _Lines:
        """Supporting lines at B, per kind, of the seconds with a share above 0."""
        slope, constant = self.model.supports(self.signatures, ratios)
        return _Lines(self.counts @ slope[:, self.first], self.counts @ constant[:, self.first])

    def sets(self) -> list[tuple[int, ...]]:
        """Sets of devices that may have shares, as counts per kind (of its first ranks), all devices first:
        every set if there are at most ``SETS``, else the fastest n, n - 1, ..., 1."""
        sizes = [len(kind) for kind in self.kinds]
        if math.prod(n + 1 for n in sizes) - 1 <= SETS:
            every = itertools.product(*(range(n, -1, -1) for n in sizes))
            return sorted((c for c in every if any(c)), key=lambda c: -sum(c))
        alone = self.model.alone()
        kind_of = {j: c for c, kind in enumerate(self.kinds) for j in kind}
        counts = [0] * len(sizes)
        found = []
        for j in sorted(kind_of, key=lambda j: (alone[j], j)):
            counts[kind_of[j]] += 1
            found.append(tuple(counts))
        return found[::-1]


def minimise(problem: Problem, counts: tuple[int, ...], start: Array) -> Array:
    """The best B with shares on the first ``counts[c]`` devices of each kind c only."""
    chosen = np.flatnonzero(counts)
    members = [list(problem.kinds[c][: counts[c]]) for c in chosen]
    size = np.array([float(len(m)) for m in members])
    bounds = np.minimum(problem.most[problem.first[chosen]], 1.0)
    if len(members) == 1 or (bounds < 0).any() or bounds @ size < 1.0:
        return _start(problem, members, start)
    return solved(problem, counts, start)[0]


def solved(problem: Problem, counts: tuple[int, ...], start: Array) -> tuple[Array, Array, LinearProgram]:
    """The best B found, the last B of the linear program, and that program, solved, with shares on the first
    ``counts[c]`` devices of each kind c only."""
    chosen = np.flatnonzero(counts)
    members = [list(problem.kinds[c][: counts[c]]) for c in chosen]
    best = at = _start(problem, members, start)
    value = problem.seconds_within(best)
    lp = LinearProgram(problem, chosen, np.array([float(len(m)) for m in members]), at)
    for _ in range(ROUNDS):
        x, t = lp.solve()
        before, at = at, spread(problem, members, x)
        seconds = problem.seconds_within(at)
        if seconds < value:
            best, value = at, seconds
        violated = lp.cut(at, t)
        moved = problem.per_exchange > 0 and float(np.abs(at - before).max()) > 1e-9
        if moved:
            lp.bend(x)
        if not violated and not moved:
            break
    return best, at, lp


def _start(problem: Problem, members: list[list[int]], start: Array) -> Array:
    """The start's shares, equal within each kind."""
    x = np.array([float(start[m].mean()) for m in members])
    total = sum(share * len(m) for share, m in zip(x, members, strict=True))
    return spread(problem, members, x if total > 0 else np.ones(len(members)))


def spread(problem: Problem, members: list[list[int]], x: Array) -> Array:
    """Shares per device from shares per kind; rounding noise becomes 0, and the sum 1."""
    ratios = np.zeros(problem.model.world)
    for devices, share in zip(members, x, strict=True):
        ratios[devices] = share if share > 1e-12 else 0.0
    found: Array = ratios / ratios.sum()
    return found


class LinearProgram:
    """The linear program in HiGHS: columns x (a share per chosen kind), t (per stage, in units of ``scale``),
    M and X; in units of the step time at the start, ``unit``. ``cuts``: the supporting lines in the order of their
    rows, as (B, stages, places in ``chosen``)."""

    def __init__(self, problem: Problem, chosen: Index, size: Array, at: Array) -> None:
        self.problem, self.chosen = problem, chosen
        k, stages = len(chosen), len(problem.weight)
        floor = problem.unsharded
        self.scale = problem.computation(at).max(axis=1)
        self.scale[self.scale == 0] = 1.0
        unit = self.unit = problem.step_seconds(at) or 1.0
        self.cuts: list[tuple[Array, Index, Index]] = []
        self.t0, self.largest, self.exchange = k, k + stages, k + stages + 1
        columns = k + stages + 2
        cost = np.zeros(columns)
        cost[k : k + stages] = problem.weight * self.scale / unit
        cost[self.largest], cost[self.exchange] = problem.per_largest / unit, problem.per_exchange / unit
        lower = np.zeros(columns)
        lower[k : k + stages] = floor / self.scale
        upper = np.full(columns, highspy.kHighsInf)
        upper[:k] = np.clip(problem.most[problem.first[chosen]], 0.0, 1.0)
        self.highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy is untyped
        for option, setting in (
            ("output_flag", False), ("threads", 1), ("random_seed", 0),
            ("primal_feasibility_tolerance", 1e-10), ("dual_feasibility_tolerance", 1e-10),
        ):  # fmt: skip
            self.highs.setOptionValue(option, setting)
        self.highs.addVars(columns, lower, upper)
        self.highs.changeColsCost(columns, np.arange(columns, dtype=np.int32), cost)
        self._rows([1.0], [1.0], [0], list(range(k)), list(size))
        rows = range(k)
        self._rows(
            [0.0] * k, [highspy.kHighsInf] * k, [2 * i for i in rows],
            [c for i in rows for c in (self.largest, i)], [1.0, -1.0] * k,
        )  # fmt: skip
        self.bent = 1 + k  # X's rows: X - (1 - 2 r) x >= r^2
        x = at[problem.first[chosen]]
        self._rows(
            list(x**2), [highspy.kHighsInf] * k, [2 * i for i in rows],
            [c for i in rows for c in (self.exchange, i)], [v for i in rows for v in (1.0, 2 * x[i] - 1)],
        )  # fmt: skip
        self._cut(at, problem.lines(at), np.ones((stages, k), dtype=bool))

    def _rows(
        self, lower: list[float], upper: list[float], starts: list[int], index: list[int], value: list[float]
    ) -> None:
        self.highs.addRows(
            len(lower), np.array(lower, dtype=float), np.array(upper, dtype=float), len(index),
            np.array(starts, dtype=np.int32), np.array(index, dtype=np.int32), np.array(value, dtype=float),
        )  # fmt: skip

    def _cut(self, at: Array, lines: _Lines, where: Array) -> None:
        stage, kind = np.nonzero(where)
        if not len(stage):
            return
        self.cuts.append((at, stage, kind))
        slope = lines.slope[stage, self.chosen[kind]] / self.scale[stage]
        constant = lines.constant[stage, self.chosen[kind]] / self.scale[stage]
        index = np.stack([self.t0 + stage, kind], axis=1).astype(np.int32)
        value = np.stack([np.ones(len(stage)), -slope], axis=1)
        self.highs.addRows(
            len(stage), constant, np.full(len(stage), highspy.kHighsInf), 2 * len(stage),
            np.arange(0, 2 * len(stage), 2, dtype=np.int32), index.reshape(-1), value.reshape(-1),
        )  # fmt: skip

    def cut(self, at: Array, t: Array) -> bool:
        """Add the supporting lines at B that ``t`` violates; whether there were any."""
        lines = self.problem.lines(at)
        seconds = lines.constant + lines.slope * at[self.problem.first]
        where = seconds[:, self.chosen] / self.scale[:, None] > t[:, None] * (1 + 1e-8) + 1e-10
        self._cut(at, lines, where)
        return bool(where.any())

    def bend(self, x: Array) -> None:
        """Take the tangents of ``x (1 - x)`` at new shares."""
        for i, r in enumerate(map(float, x)):
            self.highs.changeCoeff(self.bent + i, i, 2 * r - 1)
            self.highs.changeRowBounds(self.bent + i, r * r, highspy.kHighsInf)

    def multipliers(self) -> tuple[list[Array], Array]:
        """The last solution's dual values, in step seconds per second of a stage: of the rows of each of ``cuts``
        (supporting lines at B of a stage on a chosen kind), and of each stage's seconds without any share."""
        solution = self.highs.getSolution()
        scale = self.unit / self.scale
        rows, found = np.array(solution.row_dual)[self.bent + len(self.chosen) :], []
        for _, stage, _ in self.cuts:
            found.append(rows[: len(stage)] * scale[stage])
            rows = rows[len(stage) :]
        return found, np.maximum(np.array(solution.col_dual)[self.t0 : self.largest], 0.0) * scale

    def solve(self) -> tuple[Array, Array]:
        """Shares per chosen kind and seconds per stage, in units of ``scale``. Raises BalanceError."""
        status = self.highs.run()
        model = self.highs.getModelStatus()
        if status == highspy.HighsStatus.kError or model != highspy.HighsModelStatus.kOptimal:
            raise BalanceError(
                f"HiGHS found no optimal ratios: {self.highs.modelStatusToString(model)}; check the cluster "
                "for quantities that are many orders of magnitude apart"
            )
        values = np.array(self.highs.getSolution().col_value)
        return np.maximum(values[: self.t0], 0.0), values[self.t0 : self.largest]
