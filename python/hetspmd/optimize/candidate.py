"""Pairs of a program and its sharding ratios: what the alternation compares (HAP 3.1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StageSeconds, StepCost, StepModel, idle_seconds, on_cluster
from hetspmd.placement import REPLICATE, shard
from hetspmd.program.lengths import Lengths, Matrix
from hetspmd.program.program import Program, Result
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Found

__all__ = ["Clock", "Context", "Judge", "Pair", "bounded"]


@dataclass
class Clock:
    """Wall seconds per stage; ``progress`` is told each stage that begins."""

    seconds: MutableMapping[str, float] = field(default_factory=dict)
    progress: Callable[[str], object] | None = None

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(stage)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class Context(Protocol):
    """What pairs are judged in: the theory, the whole cluster, the constraints and the axes of the batch."""

    theory: Theory
    cluster: Cluster
    fixed: Constraints
    clock: Clock
    batch: frozenset[int]


class Pair:
    """A program of some devices with the ratios and lengths it is judged at; what costs time to know is computed
    when it is asked for. ``searched``: the program was searched at these lengths, to which its cost and bound
    belong."""

    def __init__(self, judge: Judge, ratios: Matrix, lengths: Lengths) -> None:
        self.judge, self.ratios, self.lengths = judge, ratios, lengths
        self.searched = lengths == judge.searched_at

    @property
    def found(self) -> Found:
        """The program and what the search proved of it."""
        return self.judge.found

    @property
    def program(self) -> Program:
        """The program, with outputs as idle devices want them."""
        return self.judge.program

    @property
    def active(self) -> tuple[int, ...]:
        """Ranks of the devices that take part."""
        return self.judge.active

    @cached_property
    def stages(self) -> StageSeconds:
        """Seconds of the stage model."""
        return self.judge.step.computed(self.lengths)

    @cached_property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.judge.step.streams.seconds(self.judge.step.model.shares(self.lengths))

    @cached_property
    def cost(self) -> StepCost:
        """The prediction for the cluster."""
        return on_cluster(self.judge.step.cost(self.lengths), self.judge.cluster, self.active)

    @cached_property
    def fits(self) -> bool:
        """Whether every device has the memory that the program holds at its peak."""
        memory = [self.judge.cluster.devices[rank].memory for rank in self.active]
        if not np.isfinite(memory).any():
            return True
        peaks = self.judge.step.held(self.lengths).peaks
        return all(n <= m for n, m in zip(peaks, memory, strict=True))


class Judge:
    """One program, to be judged at several ratios; ``searched_at``: where its cost and bound are those of all
    programs, if anywhere."""

    def __init__(
        self,
        of: Context,
        costs: CostModel,
        found: Found,
        active: tuple[int, ...],
        searched_at: Lengths | None,
    ) -> None:
        self.of, self.found, self.active, self.searched_at = of, found, active, searched_at
        self.cluster = of.cluster
        self.program = self._left(found.program)
        idle = idle_seconds(of.theory.graph, self.program, of.cluster, active)
        with of.clock("balance"):
            self.step = StepModel(costs, self.program, idle=idle)
        self._known: dict[Lengths, Pair] = {}

    def __call__(self, ratios: Matrix, lengths: Lengths) -> Pair:
        found = self._known.get(lengths)
        if found is None or found.ratios != ratios:
            found = self._known[lengths] = Pair(self, ratios, lengths)
        return found

    def _left(self, program: Program) -> Program:
        """What idle devices are sent costs time, so an output with a row per sample that every active device
        holds whole is left as rows instead, which is free: each device slices what it holds."""
        if len(self.active) == self.of.cluster.world:
            return program
        theory = self.of.theory

        def left(result: Result) -> Result:
            shape = theory.graph.tensors[result.tensor].shape
            axis = theory.axes.axis(result.tensor, 0) if shape else None
            free = result.form == REPLICATE and result.tensor not in self.of.fixed.forms
            rows = free and axis is not None and axis.id in self.of.batch and axis.units > 1
            return Result(result.tensor, shard(0)) if rows else result

        return replace(program, outputs=tuple(map(left, program.outputs)))


def bounded(found: Found, cost: float, whole: Found) -> Found:
    """A program that the simulation prefers, at its additive cost, with the bound that the search at its lengths
    proved."""
    bound = min(whole.lower_bound, cost)
    gap = (cost - bound) / cost if cost > 0 else 0.0
    return replace(
        found, cost=cost, lower_bound=bound, gap=gap, stop_reason="optimal" if gap == 0 else "rescored"
    )
