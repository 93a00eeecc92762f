"""Several segments, each with sharding ratios of its own, where that makes the step shorter (HAP 5.2).

HAP leaves their number to the user. Here cost decides:

1. What could segments gain? In the best program of one segment, the ratios of each of ``MOST`` segments are set
   free, and cuts cost nothing: a linear program. If even that gains less than ``WORTH`` of the stage model's step,
   one segment it is.
2. Else the graph is cut into 2, 4, 8 segments (:mod:`hetspmd.optimize.partition`), those of these numbers that
   could gain as much by the same linear program. Each cut graph has a theory of its own, in which a tensor's copy
   for another segment may have other lengths for the price of an all-to-all. Search and ratios alternate from the
   ratios of one segment, at which cuts are free, and from those of the linear program. More segments are tried
   while the simulated step gets shorter.

The best pair wins, so a plan is never worse than with one segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.model import Array, CostModel
from hetspmd.errors import ConstraintError
from hetspmd.optimize.alternation import Alternation, Outcome
from hetspmd.optimize.candidate import Clock, Pair
from hetspmd.optimize.partition import partition, segmented
from hetspmd.program.lengths import Matrix, by_segment
from hetspmd.ratios.problem import Placement, Problem
from hetspmd.ratios.ratios import gain
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Limits

__all__ = ["MOST", "WORTH", "Segments", "check_segments", "in_segments", "possible_gain"]

Segments: TypeAlias = int | Literal["auto"]
"""A number of segments, or as many as gain."""

MOST: Final = 8
WORTH: Final = 0.01
BETTER: Final = 1e-3
"""The part of the step that more segments must gain."""


def check_segments(segments: object) -> None:
    """Raise ConstraintError for what is no number of segments."""
    number = isinstance(segments, int) and not isinstance(segments, bool) and segments >= 1
    if segments != "auto" and not number:
        raise ConstraintError(f"segments={segments!r}: give 'auto' or a number from 1 on")


def in_segments(
    theory: Theory,
    cluster: Cluster,
    one: Outcome,
    segments: Segments,
    fixed: Callable[[Theory], Constraints],
    limits: Limits,
    clock: Clock,
    alternation: Callable[..., Alternation] = Alternation,
) -> tuple[Theory, Outcome]:
    """The best outcome beside ``one``, the best of one segment, and its theory. ``fixed``: the constraints in a
    theory. A number of segments is kept to even where fewer are better, as far as the model can be divided."""
    active = one.pair.active
    if segments == 1 or len(active) == 1:
        return theory, one
    costs = CostModel(theory, cluster.part(active))
    weights = [float(s) for s in costs.whole().mean(axis=1)]
    if segments == "auto":
        with clock("balance"):
            most, _ = possible_gain(one.pair, costs, partition(theory, weights, MOST))
        if most < WORTH:
            return theory, one
    found, best = theory, one
    counts = (segments,) if segments != "auto" else tuple(2**n for n in range(1, MOST.bit_length()))
    before: tuple[int, ...] = ()
    for count in counts:
        with clock("balance"):
            places = partition(theory, weights, count)
            if max(places, default=0) == 0 or places == before:
                break
            most, apart = possible_gain(one.pair, costs, places)
        before = places
        if segments == "auto" and most < WORTH:
            continue
        with clock("rules"):
            cut = segmented(theory, places)
        starts = _starts(one.pair.ratios, apart, cut.axes.segments)
        other = alternation(cut, cluster, fixed(cut), limits, clock).on(active, starts)
        if other is None:
            continue
        if segments == "auto" and other.pair.seconds > best.pair.seconds * (1 - BETTER):
            break
        found, best = cut, replace(other, baselines=one.baselines, over_memory=one.over_memory)
    if best is not one:
        best = replace(best, baselines={**one.baselines, "one_segment": one.pair.seconds})
    return found, best


def possible_gain(pair: Pair, costs: CostModel, places: Sequence[int]) -> tuple[float, Array]:
    """What the pair's program of one segment would gain with ratios for each of the segments ``places`` of its
    instructions, as a part of the stage model's seconds, if cuts cost nothing; and those ratios."""
    stages, graph = pair.judge.step.stages, costs.theory.graph
    placement = Placement(
        max(places, default=0) + 1,
        np.array([places[i] for i in stages.instructions], dtype=np.int64),
        tuple(places[graph.producers[t]] for t in stages.moved),
    )
    return gain(Problem(stages, placement=placement), np.asarray(pair.ratios[0], float))


def _starts(one: Matrix, apart: Array, count: int) -> list[tuple[str, Matrix]]:
    found: list[tuple[str, Matrix]] = [("one segment", by_segment(one[0], count))]
    free = tuple(tuple(map(float, row)) for row in apart[:count])
    if len(free) == count and max(np.abs(np.subtract(free, found[0][1])).max(axis=1)) > 1e-3:
        found.append(("free cuts", free))
    return found
