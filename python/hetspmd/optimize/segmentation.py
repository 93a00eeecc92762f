"""Several segments, each with sharding ratios of its own, where that makes the step shorter (HAP 5.2).

HAP leaves their number to the user. Here cost decides:

1. What could segments gain? In the best program of one segment, the ratios of each of eight segments are set
   free, and cuts cost nothing: a linear program. If even that gains less than the thresholds say,
   one segment it is.
2. Else the graph is cut into 2, 4, 8 segments (:mod:`hetspmd.optimize.partition`), those of these numbers that
   could gain as much by the same linear program. Each cut graph has a theory of its own, in which a tensor's copy
   for another segment may have other lengths for the price of an all-to-all. Search and ratios alternate from the
   ratios of one segment, at which cuts are free, and from those of the linear program. Where these rounds come to
   no fewer seconds than those of one segment, and all that they found fits the memory, that is the end: what hides
   communication does so with one segment as well. More segments are tried while the simulated step gets shorter.

The best pair wins, so a plan is never worse than with one segment, unless a number of them is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from hetspmd.cost.model import Array, CostModel
from hetspmd.optimize.candidate import Candidate
from hetspmd.optimize.compile_options import Segments
from hetspmd.optimize.considered import among, one_taken
from hetspmd.optimize.in_micro_batches import composed
from hetspmd.optimize.partition import partition, segmented
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.synthesize import Outcome, synthesize_on
from hetspmd.program.lengths import Matrix, by_segment
from hetspmd.program.loop_steps import repeatable
from hetspmd.program.micro_batches import micro_batches
from hetspmd.ratios.problem import Placement, Problem
from hetspmd.ratios.ratios import gain
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints
from hetspmd.trace.graph import REBALANCE


def in_segments(
    ctx: Synthesis,
    one: Outcome,
    segments: Segments,
    constraints: Callable[[Theory], Constraints],
) -> tuple[Synthesis, Outcome]:
    """The best outcome beside ``one``, the best of one segment, and the synthesis that gave it. ``constraints``:
    those of the user in a theory. A number of segments is kept to even where fewer are better, as far as the model
    can be divided."""
    theory, clock, thresholds = ctx.theory, ctx.clock, ctx.thresholds
    active = one.best.active
    if segments == 1 or len(active) == 1:
        return ctx, one
    costs = ctx.costs(active)
    weights = [float(s) for s in costs.whole().mean(axis=1)]
    most = thresholds.segments
    if segments == "auto":
        with clock("balance"):
            gained, _ = possible_gain(
                one.best, costs, partition(theory, weights, most, thresholds.uneven_halves)
            )
        if gained < thresholds.segments_gain:
            return ctx, one
    synthesis, best = ctx, one
    taken = 1
    ways = {1: one.considered}
    counts = (segments,) if segments != "auto" else tuple(2**n for n in range(1, most.bit_length()))
    before: tuple[int, ...] = ()
    for count in counts:
        with clock("balance"):
            places = partition(theory, weights, count, thresholds.uneven_halves)
            if max(places, default=0) == 0 or places == before:
                break
            gained, apart = possible_gain(one.best, costs, places)
        before = places
        if segments == "auto" and gained < thresholds.segments_gain:
            continue
        with clock("rules"):
            cut = segmented(theory, places)
        inside = _cut(ctx, cut, constraints(cut))
        inside.searcher.hard = ctx.searcher.hard
        starts = _starts(ctx, one.best.ratios, apart, cut.axes.segments)
        # What hides communication does so with one segment as well: the rounds must tell the gain.
        other = synthesize_on(inside, active, starts, one.rounds if segments == "auto" else None)
        if other is None:
            if segments == "auto" and one.rounds is not None:
                break
            continue
        ways[count] = among(other.considered, f"{cut.axes.segments} segments")
        if segments == "auto" and other.best.seconds > best.best.seconds * (
            1 - thresholds.more_segments_gain
        ):
            break
        synthesis, best = inside, replace(other, baselines=one.baselines, over_memory=one.over_memory)
        taken = count
    if best is not one:
        best = replace(best, baselines={**one.baselines, "one_segment": one.best.seconds})
    considered = one_taken(((way, count == taken) for count, way in ways.items()), best.best)
    return synthesis, replace(best, considered=considered)


def _cut(ctx: Synthesis, cut: Theory, constraints: Constraints) -> Synthesis:
    """The context of the same step with cuts. In micro-batches the loop has the same collectives, and those of the
    copies of what these are of."""
    batches = ctx.batches
    if batches is None:
        return replace(ctx, theory=cut, constraints=constraints)
    loop = micro_batches(cut, batches.count)
    original = {i.outputs[0]: i.inputs[0] for i in cut.graph.instructions if i.op == REBALANCE}
    repeated = frozenset(t for t in repeatable(cut, loop) if original.get(t, t) in batches.repeated)
    loop = replace(loop, repeated=repeated)
    return replace(ctx, theory=cut, constraints=composed(cut, loop, constraints), batches=loop, prepared=None)


def possible_gain(candidate: Candidate, costs: CostModel, places: Sequence[int]) -> tuple[float, Array]:
    """What the candidate's program of one segment would gain with ratios for each of the segments ``places`` of its
    instructions, as a part of the stage model's seconds, if cuts cost nothing; and those ratios."""
    stages, graph = candidate.step.stages, costs.theory.graph
    placement = Placement(
        max(places, default=0) + 1,
        np.array([places[i] for i in stages.instructions], dtype=np.int64),
        tuple(places[graph.producers[t]] for t in stages.moved),
    )
    return gain(Problem(stages, placement=placement), np.asarray(candidate.ratios[0], float))


def _starts(ctx: Synthesis, one: Matrix, apart: Array, count: int) -> list[tuple[str, Matrix]]:
    starts: list[tuple[str, Matrix]] = [("one segment", by_segment(one[0], count))]
    free = tuple(tuple(map(float, row)) for row in apart[:count])
    if len(free) == count and np.abs(np.subtract(free, starts[0][1])).max() > ctx.thresholds.equal_starts:
        starts.append(("free cuts", free))
    return starts
