"""Search and ratios in turns (HAP 3.1).

From each starting ratio B the search gives the best program Q at the lengths of B, the linear program the
best B for Q, and so on until the pair repeats.

Only candidates that fit every device's memory can become a plan. Where the best program at some lengths does not
fit, the best that does is searched at prices of memory (:mod:`hetspmd.search.memory_limits`), and the ratios are
bounded by what the program holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetspmd.cluster.machines import device_word
from hetspmd.cost.model import Array, CostModel
from hetspmd.errors import MemoryLimitError
from hetspmd.optimize.candidate import Candidate, Evaluator
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.plan.reports import Iteration
from hetspmd.program.lengths import Lengths, Matrix, Ratios, by_segment, lengths_for
from hetspmd.ratios.problem import Room
from hetspmd.ratios.ratios import optimise
from hetspmd.ratios.starts import by_memory
from hetspmd.search.earlier_prices import Known
from hetspmd.search.memory_limits import capacities, search_that_fits
from hetspmd.search.search import SearchResult
from hetspmd.search.space import Space


@dataclass
class Rounds:
    """What the rounds from all starts gave.

    candidates  two of each of the ``iterations``
    replaced    those that do not fit, in whose place other programs were searched
    lacking     of all programs that do not fit the error of the one that lacks the fewest bytes
    """

    candidates: list[Candidate] = field(default_factory=list)
    replaced: list[Candidate] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)
    lacking: MemoryLimitError | None = None


def nearest(one: MemoryLimitError | None, other: MemoryLimitError | None) -> MemoryLimitError | None:
    """The error of the two that lacks the fewest bytes; the first if they lack as many."""
    if one is None or other is None:
        return one or other

    def missing(error: MemoryLimitError) -> int:
        return sum(amount for amount, _ in error.lacking.values())

    return other if missing(other) < missing(one) else one


def error_of(ctx: Synthesis, candidate: Candidate) -> MemoryLimitError:
    """The error of a candidate that does not fit."""
    devices = ctx.cluster.devices
    amounts = {rank: (missing, int(devices[rank].memory)) for rank, missing in candidate.lacking.items()}
    return MemoryLimitError(amounts, [d.name for d in devices], device_word(ctx.cluster))


def alternate(
    ctx: Synthesis,
    costs: CostModel,
    active: tuple[int, ...],
    starts: Sequence[tuple[str, Ratios | Matrix]],
    within: Space | None = None,
) -> Rounds:
    """Search and ratios in turns from each of the ``starts``, by name, on the devices ``active``, which are those
    of ``costs``. ``within``: the programs among which is searched. Where memory is short, ratios in proportion to
    it are a further start, and a quick synthesis takes further ones only until something fits."""
    segments = ctx.theory.axes.segments
    queue = [(name, by_segment(start, segments)) for name, start in starts]
    rounds, first = Rounds(), queue[0][1]
    while queue and not (ctx.quick and rounds.replaced and any(c.fits for c in rounds.candidates)):
        name, ratios = queue.pop(0)
        short = _rounds_from(ctx, costs, active, (name, ratios), within, rounds)
        if ctx.quick and short and not rounds.candidates and _far(ctx, rounds.lacking):
            break
        by = by_segment(by_memory(costs), segments) if short else first
        if (
            not queue
            and name != "memory"
            and np.abs(np.subtract(by, first)).max() > ctx.thresholds.equal_starts
        ):
            queue.append(("memory", by))
    return rounds


def _rounds_from(
    ctx: Synthesis,
    costs: CostModel,
    active: tuple[int, ...],
    start: tuple[str, Matrix],
    within: Space | None,
    rounds: Rounds,
) -> bool:
    """Search and ratios in turns from one start, added to ``rounds``. Whether memory was short."""
    name, ratios = start
    before: SearchResult | None = None
    short = False
    seen: set[tuple[object, ...]] = set()
    for index in range(ctx.thresholds.rounds):
        lengths = lengths_for(ctx.theory.axes, ratios)
        if ctx.quick and rounds.replaced and (ctx.least.at(lengths) > capacities(costs)).any():
            return True
        reason = name if name == "alone" else f"{name} ratios, round {index + 1}"
        result = ctx.search(costs, lengths, start=before, within=within)
        evaluator = Evaluator(ctx, costs, result, active, lengths, reason)
        tried = [evaluator(ratios, lengths)]
        if not tried[0].fits:
            rounds.replaced += tried
            short = True
            if (ctx.least.at(lengths) > capacities(costs)).any():
                # Nothing fits at these lengths, so that no search is needed to know it.
                rounds.lacking = nearest(rounds.lacking, error_of(ctx, tried[0]))
                break
            # Where others fit already, from other ratios, a few searches tell enough.
            quick = ctx.quick or any(c.fits for c in rounds.candidates)
            fitting, lacking = search_fitting(ctx, costs, lengths, result, within, active, quick=quick)
            if fitting is None:
                rounds.lacking = nearest(rounds.lacking, lacking)
                break
            result = fitting
            evaluator = Evaluator(ctx, costs, result, active, lengths, f"{reason}, within the memory")
            tried = [evaluator(ratios, lengths)]
            if not tried[0].fits:  # with what idle devices are sent; it may do so at other ratios
                rounds.lacking = nearest(rounds.lacking, error_of(ctx, tried[0]))
        better, moved = with_best_ratios(evaluator, costs, ratios, lengths)
        tried.append(evaluator(better, moved, but=", best ratios"))
        rounds.candidates += tried
        rounds.iterations.append(
            Iteration(name, index, ratios, result.cost, min(c.stages.seconds for c in tried))
        )
        key = (result.rows, result.moves, moved)
        if key in seen or moved == lengths:
            break
        again = index or ctx.quick
        if result.stop_reason == "memory" and again and not _much_better(ctx, rounds.candidates[-3:]):
            break
        seen.add(key)
        ratios, before = better, result
    return short


def _far(ctx: Synthesis, lacking: MemoryLimitError | None) -> bool:
    """Whether some device lacks so much that no program fits at other ratios either."""
    amounts = lacking.lacking.values() if lacking is not None else ()
    return any(missing > ctx.thresholds.far_from_fitting * whole for missing, whole in amounts)


def search_fitting(
    ctx: Synthesis,
    costs: CostModel,
    lengths: Lengths,
    best: SearchResult,
    within: Space | None,
    active: tuple[int, ...],
    *,
    quick: bool = False,
) -> tuple[SearchResult | None, MemoryLimitError | None]:
    """The best program that fits at these lengths, or the error of the program found that lacks the fewest bytes.
    ``quick``: none is searched further where a few searches have found none.
    """
    names, word = [d.name for d in ctx.cluster.devices], device_word(ctx.cluster)
    try:
        with ctx.clock("synth"):
            fitting = search_that_fits(
                ctx.searcher,
                costs,
                lengths,
                ctx.limits,
                best,
                within=within,
                memory_prices=ctx.memory_prices,
                known=Known(ctx.earlier_prices, active) if within is None else None,
                quick=quick,
            )
    except MemoryLimitError as error:
        amounts = {active[j]: both for j, both in error.lacking.items()}
        return None, MemoryLimitError(amounts, names, word)
    return fitting, None


def fits_at_no_ratios(candidate: Candidate) -> bool:
    """Whether the devices' largest shares of what a program holds at least, but for buffers of collectives, are
    together less than all of it."""
    step = candidate.step
    if not np.isfinite(step.model.capacity).all():
        return False
    profile = step.executed.at(candidate.lengths, buffers=False)
    return float(profile.largest_shares(step.model.capacity).clip(0.0, 1.0).sum()) < 1.0


def with_best_ratios(
    evaluator: Evaluator, costs: CostModel, ratios: Matrix, lengths: Lengths
) -> tuple[Matrix, Lengths]:
    """The best ratios for a program that keep within the memory, and their lengths."""
    if costs.world == 1:
        return ratios, lengths
    ctx = evaluator.ctx
    capacity = capacities(costs)
    again = ctx.thresholds.bounded_again
    most: Array | None = None
    room: Room | None = None
    if np.isfinite(capacity).any():
        profile = evaluator.step.held(lengths)
        if len(ratios) == 1:
            most = profile.largest_shares(capacity)
        else:
            room = Room.of(profile, capacity)
    # Whole units may be more than the share that fits: then the device gets a smaller bound.
    for _ in range(ctx.thresholds.memory_attempts):
        with ctx.clock("balance"):
            better = optimise(
                ctx.theory,
                costs,
                evaluator.program,
                ratios,
                most=most,
                room=room,
                stages=evaluator.step.stages,
            )
            moved = lengths_for(ctx.theory.axes, better)
        if most is None and room is None:
            return better, moved
        held = evaluator(better, moved, but=", best ratios").cost.memory_bytes
        needed = np.array([held[rank] for rank in evaluator.active], dtype=float)
        over = needed > capacity
        if not over.any():
            return better, moved
        if most is not None:
            most = np.where(over, np.minimum(most, better[0]) * again, most)
        if room is not None:
            room = replace(room, capacity=np.where(over, room.capacity * again, room.capacity))
    return ratios, lengths


def _much_better(ctx: Synthesis, last: Sequence[Candidate]) -> bool:
    """Whether the last of two or three candidates is worth another search at prices of memory, which is dear."""
    return last[-1].stages.seconds < last[0].stages.seconds * (1 - ctx.thresholds.memory_search_gain)
