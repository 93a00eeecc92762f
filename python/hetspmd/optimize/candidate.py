"""Candidates: programs with sharding ratios, each with the reason for which it was made, and their comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np

from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StageSeconds, StepCost, StepModel, idle_seconds, on_cluster
from hetspmd.errors import InfeasibleError, SearchError
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.placement import REPLICATE, shard
from hetspmd.program.lengths import Lengths, Matrix
from hetspmd.program.program import Communicate, Program, Result
from hetspmd.program.schedule import Schedule
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import SearchResult


class Candidate:
    """A program of some devices with the ratios and lengths at which it is evaluated, and why it was made.

    What costs time to know is computed when it is asked for. ``searched``: the program was searched at these
    lengths, to which its cost and bound belong.
    """

    def __init__(self, evaluator: Evaluator, ratios: Matrix, lengths: Lengths, reason: str) -> None:
        self.evaluator, self.ratios, self.lengths, self.reason = evaluator, ratios, lengths, reason
        self.searched = lengths == evaluator.searched_at

    @property
    def result(self) -> SearchResult:
        """The program and what the search proved of it."""
        return self.evaluator.result

    @property
    def program(self) -> Program:
        """The program, with outputs as idle devices want them."""
        return self.evaluator.program

    @property
    def schedule(self) -> Schedule:
        """When the steps of the program run."""
        return self.step.schedule

    @property
    def arrivals(self) -> dict[Communicate, int]:
        """The instruction that runs first after each collective has ended, if it ends before it is waited for."""
        return self.step.arrivals(self.lengths)

    @property
    def active(self) -> tuple[int, ...]:
        """Ranks of the devices that take part."""
        return self.evaluator.active

    @property
    def step(self) -> StepModel:
        """The model of its step."""
        return self.evaluator.step

    @cached_property
    def stages(self) -> StageSeconds:
        """Seconds of the stage model."""
        return self.step.computed(self.lengths)

    @cached_property
    def seconds(self) -> float:
        """Predicted seconds of a step, by the simulation of two streams."""
        return self.step.seconds(self.lengths)

    @property
    def simulated(self) -> bool:
        """Whether the step was simulated: where the stage model's bound sufficed, it was not."""
        return "seconds" in vars(self)

    @cached_property
    def cost(self) -> StepCost:
        """The prediction for the cluster."""
        return on_cluster(self.step.cost(self.lengths), self.evaluator.ctx.cluster, self.active)

    @property
    def measured_cost(self) -> StepCost:
        """The prediction with bytes as measured steps of the model would have them."""
        measured = self.step.model.measured
        if measured is None:
            return self.cost
        held = measured.bytes([self.cost.memory_bytes[rank] for rank in self.active])
        everywhere = list(self.cost.memory_bytes)
        for rank, nbytes in zip(self.active, held, strict=True):
            everywhere[rank] = nbytes
        return replace(self.cost, memory_bytes=tuple(everywhere))

    @cached_property
    def lacking(self) -> dict[int, int]:
        """The ranks whose devices do not have the memory that the program holds at its peak, to the bytes that they
        lack, as they are counted."""
        memory = self.step.model.capacity.tolist()
        if not np.isfinite(memory).any():
            return {}
        peaks = self.step.held(self.lengths).peaks
        return {r: int(n - m) for r, n, m in zip(self.active, peaks, memory, strict=True) if n > m}

    @property
    def fits(self) -> bool:
        """Whether every device has the memory that the program holds at its peak."""
        return self.may_fit and not self.lacking

    @cached_property
    def may_fit(self) -> bool:
        """Whether every device may have it, by what is known before any simulation."""
        limited = bool(np.isfinite(self.step.model.capacity).any())
        return (
            not limited or ("lacking" in vars(self) and not self.lacking) or self.step.may_fit(self.lengths)
        )


class Evaluator:
    """One program, to be evaluated at several ratios.

    ``searched_at``: the lengths at which its cost and bound are those of all programs, if any. ``reason``: why the
    program was searched. ``prefetch_distance``: how many groups ahead its gathers are.
    """

    def __init__(
        self,
        ctx: Synthesis,
        costs: CostModel,
        result: SearchResult,
        active: tuple[int, ...],
        searched_at: Lengths | None,
        reason: str,
        prefetch_distance: int = 1,
    ) -> None:
        self.ctx, self.result, self.active = ctx, result, active
        self.searched_at, self.reason = searched_at, reason
        self.prefetch_distance = prefetch_distance
        self.program = self._with_rows(result.program)
        idle = idle_seconds(ctx.theory.graph, self.program, ctx.cluster, active)
        with ctx.clock("balance"):
            self.step = StepModel(costs, self.program, idle=idle, prefetch_distance=prefetch_distance)
        self._candidates: dict[Lengths, Candidate] = {}

    def __call__(self, ratios: Matrix, lengths: Lengths, *, but: str = "") -> Candidate:
        """The candidate at these ratios; ``but``: what sets it apart from the one at which it was searched."""
        candidate = self._candidates.get(lengths)
        if candidate is None or candidate.ratios != ratios:
            candidate = self._candidates[lengths] = Candidate(self, ratios, lengths, self.reason + but)
        return candidate

    def _with_rows(self, program: Program) -> Program:
        """What idle devices are sent costs time, so an output with a row per sample that every active device
        holds whole is left as rows instead, which is free: each device slices what it holds."""
        if len(self.active) == self.ctx.cluster.world:
            return program
        theory, fixed = self.ctx.theory, self.ctx.constraints.forms

        def as_rows(result: Result) -> Result:
            shape = theory.graph.tensors[result.tensor].shape
            axis = theory.axes.axis(result.tensor, 0) if shape else None
            free = result.form == REPLICATE and result.tensor not in fixed
            rows = free and axis is not None and axis.id in self.ctx.batch and axis.units > 1
            return Result(result.tensor, shard(0)) if rows else result

        return replace(program, outputs=tuple(map(as_rows, program.outputs)))


def searched_within(
    ctx: Synthesis,
    active: tuple[int, ...],
    constraints: Constraints,
    at: tuple[Matrix, Lengths],
    reason: str,
    distance: int = 1,
) -> Candidate | None:
    """The best program of the devices ``active`` under these constraints, at ratios and lengths; None if there is
    none."""
    costs, (ratios, lengths) = ctx.costs(active), at
    try:
        result = ctx.search(costs, lengths, within=ctx.searcher.space.within(constraints))
    except (InfeasibleError, SearchError):
        return None
    return Evaluator(ctx, costs, result, active, None, reason, distance)(ratios, lengths)


def best_of(ctx: Synthesis, candidates: Iterable[Candidate]) -> Candidate | None:
    """The fastest candidate that fits; among equals one that was searched as it is, and the first.

    This is the one place where candidates are compared. One whose stage model alone takes longer than the best is
    not simulated.
    """
    best: Candidate | None = None
    with ctx.clock("balance"):
        for candidate in candidates:
            if best is not None and candidate.stages.lower_bound > best.seconds:
                continue
            if candidate.fits and (best is None or is_better(candidate, best)):
                best = candidate
    return best


def is_better(one: Candidate, other: Candidate) -> bool:
    """Whether one candidate is faster than another, or as fast and searched as it is."""
    return (one.seconds, not one.searched) < (other.seconds, not other.searched)


def bounded(result: SearchResult, cost: float, whole: SearchResult) -> SearchResult:
    """A program that the simulation prefers, at its additive cost, with the bound that the search at its lengths
    proved."""
    bound = min(whole.lower_bound, cost)
    gap = (cost - bound) / cost if cost > 0 else 0.0
    return replace(
        result, cost=cost, lower_bound=bound, gap=gap, stop_reason="optimal" if gap == 0 else "rescored"
    )


def certified(ctx: Synthesis, candidate: Candidate) -> Candidate:
    """The candidate with cost and bound of its own lengths, where its program was searched at others, or without a
    bound. A program that is found for the first time then, since the others were searched without one, is the
    candidate if it is better."""
    if candidate.searched and candidate.result.lower_bound > 0.0:
        return candidate
    costs, lengths = ctx.costs(candidate.active), candidate.lengths
    whole = ctx.search(costs, lengths, start=candidate.result, certain=True)
    cost = ctx.searcher.cost(candidate.result, costs, lengths)
    result = bounded(candidate.result, cost, whole)
    if candidate.result.stop_reason == "memory" and result.gap > 0:
        result = replace(result, stop_reason="memory")
    distance = candidate.evaluator.prefetch_distance
    evaluator = Evaluator(ctx, costs, result, candidate.active, lengths, candidate.reason, distance)
    proven = evaluator(candidate.ratios, lengths)
    if candidate.result.stop_reason == "folded" and whole.cost < cost:
        other = Evaluator(ctx, costs, whole, candidate.active, lengths, f"{candidate.reason}, unlike layers")
        return best_of(ctx, [proven, other(candidate.ratios, lengths)]) or proven
    return proven
