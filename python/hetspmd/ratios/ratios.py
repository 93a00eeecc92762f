"""The sharding ratios B of a fixed program Q: the linear program of HAP 5.1 and 5.2, and what no such program sees.

    min over B of t(Q, B) = sum over stages i (comm_i(B) + max_j comp_ij(B))

:mod:`hetspmd.ratios.problem` is t as a function, :mod:`hetspmd.ratios.linear` the linear program. Beyond it:

- A device without a share skips sharded ops with all their fixed cost. So the program is solved for sets of
  devices as well: every set (up to equal devices) if there are at most ``device_sets``; else the fastest n, n / 2,
  n / 4, ..., and one more or fewer than the best of these while that helps; and the first device of each kind
  alone. Of several segments each may leave out devices of its own, where there are few sets. A set whose lower
  bound is no better than the best so far is left out (:mod:`hetspmd.ratios.lower_bound`,
  :mod:`hetspmd.ratios.bound_within_memory`).
- Two segments whose lengths agree exchange nothing at their cuts, and no message: the latency of a rebalance is
  not convex. So neighbours are tied to each other, those whose ratios are nearest first: in small problems one pair
  after another while that helps, in large ones all, half of them, a quarter, ...

The result is never dearer than the start in the stage model at fractional shares, if the start keeps the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hetspmd.cost.model import Array, CostModel
from hetspmd.cost.step import Stages
from hetspmd.program.lengths import Matrix, by_segment
from hetspmd.program.program import Program
from hetspmd.ratios.bound_within_memory import MemoryBound
from hetspmd.ratios.linear import BalanceError, LinearProgram, NoRoomError, spread
from hetspmd.ratios.lower_bound import LowerBound
from hetspmd.ratios.problem import Mask, Problem, Room
from hetspmd.ratios.ratio_thresholds import THRESHOLDS
from hetspmd.ratios.starts import proportional
from hetspmd.rules.theory import Theory

__all__ = ["BalanceError", "gain", "minimise", "optimise", "optimise_ratios", "solved"]


def optimise_ratios(
    theory: Theory,
    model: CostModel,
    program: Program,
    start: Sequence[float] | None = None,
    *,
    most: Sequence[float] | Array | None = None,
    stages: Stages | None = None,
) -> tuple[float, ...]:
    """:func:`optimise` of a program of one segment: its ratios, summing to 1 in rank order."""
    first = None if start is None else by_segment(start, 1)
    (ratios,) = optimise(theory, model, program, first, most=most, stages=stages)
    return ratios


def optimise(
    theory: Theory,
    model: CostModel,
    program: Program,
    start: Sequence[Sequence[float]] | None = None,
    *,
    most: Sequence[float] | Array | None = None,
    room: Room | None = None,
    stages: Stages | None = None,
    near: Sequence[Sequence[float]] | None = None,
) -> Matrix:
    """argmin over B of t(Q, B) for a fixed program: the ratios of each segment, which sum to 1.

    ``start`` (default: proportional to speed) is returned where nothing beats it. ``most`` are upper bounds of the
    ratios, of every segment; where they leave no ratios that sum to 1, the start is returned. ``room`` bounds what
    all segments hold together. ``stages``: of the program, if they are known. ``near``: ratios that were found for
    other bounds; no other devices are tried than have shares there, of a segment or of one that it is tied to. The
    same arguments give the same ratios. Raises BalanceError if the solver fails, ValueError if the program is not
    of the theory.
    """
    if model.theory is not theory:
        raise ValueError("the cost model belongs to another theory")
    segments = theory.axes.segments
    if model.world == 1:
        return ((1.0,),) * segments
    first = np.asarray(by_segment(proportional(model) if start is None else start, segments), dtype=float)
    shaped = first.shape == (segments, model.world)
    if not shaped or first.min() < 0 or not np.allclose(first.sum(axis=1), 1.0):
        raise ValueError(
            f"start must be {model.world} non-negative ratios that sum to 1, got {first.tolist()}"
        )
    bounds = np.full(model.world, np.inf) if most is None else np.asarray(most, dtype=float)
    if np.minimum(np.maximum(bounds, 0.0), 1.0).sum() < 1.0:
        return _matrix(first)
    problem = Problem(Stages(model, program) if stages is None else stages, bounds, room)
    search = _Search(problem, first)
    return _matrix(search.run() if near is None else search.near(np.asarray(near, dtype=float) > 0))


def _matrix(ratios: Array) -> Matrix:
    return tuple(tuple(map(float, row)) for row in ratios)


class _Search:
    """Candidates for B, of which the best is kept."""

    def __init__(self, problem: Problem, start: Array) -> None:
        self.problem, self.start = problem, start
        self.best, self.value = start, problem.seconds_within(start)
        self.bound = LowerBound(problem, start)
        self.within: MemoryBound | None = None
        self.groups = list(range(problem.segments))

    def consider(self, candidate: Array) -> bool:
        """Whether a candidate is the best so far."""
        seconds = self.problem.seconds_within(candidate)
        if not seconds < self.value * (1 - THRESHOLDS.better_part):
            return False
        self.best, self.value = candidate, seconds
        return True

    def on(self, present: Mask) -> bool:
        """Consider the best B with shares on the devices ``present``, of all segments or by segment."""
        every = np.broadcast_to(present, (self.problem.segments, len(present.T)))
        if self.bound.seconds(every) >= self.value:
            return False
        if self.within is not None and self.within.seconds(every) >= self.value:
            return False
        return self.consider(minimise(self.problem, every, self.start))

    def run(self) -> Array:
        """The best B found."""
        problem, world = self.problem, self.problem.model.world
        sets = problem.sets()
        several = problem.segments > 1
        if problem.room is not None:
            self.within = MemoryBound(problem, problem.room, self.start)
        if len(sets) <= THRESHOLDS.device_sets // problem.segments:
            for present in sets:
                self.on(present)
        elif several:
            self.on(sets[0])
            with_share = np.asarray((self.start > 0).any(axis=0))
            if not with_share.all():
                self.on(with_share)
        else:
            self._by_size(sets)
        for kind in problem.kinds:
            alone = np.zeros((problem.segments, world))
            alone[:, kind[0]] = 1.0
            self.consider(alone)
        if several:
            if len(sets) <= THRESHOLDS.device_sets // problem.segments:
                self._by_segment(sets)
            self._tied()
        return self.best

    def _by_size(self, sets: Sequence[Mask]) -> None:
        """Of sets with n, n - 1, ... devices, consider those with n, n / 2, n / 4, ..., and from the best of these
        on one more or fewer while that helps."""
        world = len(sets)
        sizes = [world >> halving for halving in range(world.bit_length())]
        best = world
        for size in sizes:
            best = size if self.on(sets[-size]) else best
        for step in (-1, 1):
            waited, size = 0, best + step
            while 1 <= size <= world and waited <= THRESHOLDS.sets_without_gain:
                waited = 0 if size not in sizes and self.on(sets[-size]) else waited + 1
                size += step

    def near(self, present: Mask) -> Array:
        """The best B found with shares on the devices ``present[s, j]``."""
        if self.on(present) and self.problem.segments > 1:
            self._tied()
        return self.best

    def _by_segment(self, sets: Sequence[Mask]) -> None:
        """Let each segment leave out devices of its own."""
        for s in range(self.problem.segments):
            for present in sets:
                mask = self.best > 0
                if (mask[s] != present).any():
                    mask[s] = present
                    self.on(mask)

    def _tied(self) -> None:
        """Give neighbouring segments the same ratios, while that helps."""
        problem, groups = self.problem, self.groups
        ratios = self.best

        def apart(pair: tuple[int, int]) -> tuple[float, tuple[int, int]]:
            return float(np.abs(ratios[pair[0]] - ratios[pair[1]]).sum()), pair

        def tie(pairs: Sequence[tuple[int, int]]) -> None:
            nonlocal groups
            tied = _tied(groups, pairs)
            if tied == groups:
                return
            mask = self.best > 0
            for g in set(tied):
                own = [i for i, other in enumerate(tied) if other == g]
                mask[own] = mask[own].any(axis=0)
            if self.consider(minimise(problem, mask, self.best, tied)):
                groups = tied

        near = sorted(problem.pairs, key=apart)
        if len(problem.kinds) * problem.segments <= THRESHOLDS.kinds_times_segments:
            for pair in near:
                tie([pair])
        else:
            for halving in range(len(near).bit_length()):
                tie(near[: len(near) >> halving])


def _tied(groups: Sequence[int], pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The groups in which the segments of each pair are in one, numbered in order."""
    merged = list(groups)
    for s, t in pairs:
        merged = [merged[s] if g == merged[t] else g for g in merged]
    names = {g: n for n, g in enumerate(dict.fromkeys(merged))}
    return [names[g] for g in merged]


def minimise(problem: Problem, present: Mask, start: Array, groups: Sequence[int] | None = None) -> Array:
    """The best B with shares on ``present[s, j]`` only, segments in one group tied to each other; the start's
    shares there where no ratios are found that keep within the bounds."""
    tied = range(problem.segments) if groups is None else groups
    bounds = np.clip(problem.most, 0.0, 1.0)
    fallback = _start(problem, present, start, tied)
    alone = (present.sum(axis=1) == 1).all() and problem.segments == 1
    if alone or (problem.most[present.any(axis=0)] < 0).any() or (present @ bounds).min() < 1.0:
        return fallback
    try:
        return solved(problem, present, start, tied)[0]
    except NoRoomError:
        return fallback


def solved(
    problem: Problem, present: Mask, start: Array, groups: Sequence[int] | None = None
) -> tuple[Array, Array, LinearProgram]:
    """The best B found, the last B of the linear program, and that program, solved, as in :func:`minimise`."""
    tied = list(range(problem.segments) if groups is None else groups)
    best = at = _start(problem, present, start, tied)
    value = problem.seconds_within(best)
    lp = LinearProgram(problem, present, tied, at)
    bends = bool((problem.per_exchange > 0).any())
    for _ in range(THRESHOLDS.solutions):
        before = at
        at, t = lp.solve()
        seconds = problem.seconds_within(at)
        if seconds < value:
            best, value = at, seconds
        violated = lp.cut(at, t)
        moved = bends and float(np.abs(at - before).max()) > THRESHOLDS.equal_shares
        if moved:
            lp.bend(at)
        if not violated and not moved:
            break
    return best, at, lp


def _start(problem: Problem, present: Mask, start: Array, groups: Sequence[int]) -> Array:
    """The start's shares, equal within each kind, and in segments that are tied."""
    ratios = np.zeros(start.shape)
    for g in dict.fromkeys(groups):
        own = [s for s, other in enumerate(groups) if other == g]
        shares, mask = start[own].mean(axis=0), present[own[0]]
        members = [[j for j in kind if mask[j]] for kind in problem.kinds]
        members = [m for m in members if m]
        x = np.array([[float(shares[m].mean()) for m in members]])
        sums = sum(share * len(m) for share, m in zip(x[0], members, strict=True))
        ratios[own] = spread(len(mask), members, x if sums > 0 else np.ones_like(x))
    return ratios


def gain(problem: Problem, ratios: Array) -> tuple[float, Array]:
    """The part of the stage model's seconds that B by segment would gain on B that all segments have in common, and
    the B that would."""
    start = np.broadcast_to(ratios, (problem.segments, len(ratios)))
    before = problem.step_seconds(start)
    best = minimise(problem, start > 0, start)
    after = problem.seconds_within(best)
    return (1 - after / before if before > 0 and math.isfinite(after) else 0.0), best
