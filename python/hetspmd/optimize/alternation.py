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
    of ``costs``. ``within``: the programs among which is searched."""
    rounds = Rounds()
    segments = ctx.theory.axes.segments
    queue = [(name, by_segment(start, segments)) for name, start in starts]
    first = queue[0][1]
    while queue:
        name, ratios = queue.pop(0)
        before: SearchResult | None = None
        seen: set[tuple[object, ...]] = set()
        for index in range(ctx.thresholds.rounds):
            lengths = lengths_for(ctx.theory.axes, ratios)
            reason = name if name == "alone" else f"{name} ratios, round {index + 1}"
            result = ctx.search(costs, lengths, start=before, within=within)
            evaluator = Evaluator(ctx, costs, result, active, lengths, reason)
            tried = [evaluator(ratios, lengths)]
            if not tried[0].fits:
                rounds.replaced += tried
                by = by_segment(by_memory(costs), segments)
                if (
                    not queue
                    and name != "memory"
                    and np.abs(np.subtract(by, first)).max() > ctx.thresholds.equal_starts
                ):
                    queue.append(("memory", by))
                if (ctx.least.at(lengths) > capacities(costs)).any():
                    # Nothing fits at these lengths, so that no search is needed to know it.
                    rounds.lacking = nearest(rounds.lacking, error_of(ctx, tried[0]))
                    break
                fitting, lacking = search_fitting(ctx, costs, lengths, result, within, active)
                rounds.lacking = nearest(rounds.lacking, lacking)
                if fitting is None:
                    break
                result = fitting
                evaluator = Evaluator(ctx, costs, result, active, lengths, f"{reason}, within the memory")
                tried = [evaluator(ratios, lengths)]
            better, moved = with_best_ratios(evaluator, costs, ratios, lengths)
            tried.append(evaluator(better, moved, but=", best ratios"))
            rounds.candidates += tried
            rounds.iterations.append(
                Iteration(name, index, ratios, result.cost, min(c.stages.seconds for c in tried))
            )
            key = (result.rows, result.moves, moved)
            if key in seen or moved == lengths:
                break
            if result.stop_reason == "memory" and index and not _much_better(ctx, rounds.candidates[-3:]):
                break
            seen.add(key)
            ratios, before = better, result
    return rounds


def search_fitting(
    ctx: Synthesis,
    costs: CostModel,
    lengths: Lengths,
    best: SearchResult,
    within: Space | None,
    active: tuple[int, ...],
) -> tuple[SearchResult | None, MemoryLimitError | None]:
    """The best program that fits at these lengths, None if there seems to be none; and, if what comes out does not
    fit as it is executed, the error of the program found that lacks the fewest bytes.

    The search knows what collectives hold while they are started. What a program holds more while they are on
    their way is known once it is there, and left free in the next search. A program that still does not fit may do
    so at other ratios.
    """
    names, word = [d.name for d in ctx.cluster.devices], device_word(ctx.cluster)
    capacity = capacities(costs)
    reserve: Array = np.zeros(costs.world)
    lacking: MemoryLimitError | None = None
    fitting: SearchResult | None = None
    for _ in range(ctx.thresholds.memory_attempts):
        try:
            with ctx.clock("synth"):
                fitting = search_that_fits(
                    ctx.searcher,
                    costs,
                    lengths,
                    ctx.limits,
                    best,
                    within=within,
                    reserve=reserve,
                    memory_prices=ctx.memory_prices,
                    known=Known(ctx.earlier_prices, active) if within is None else None,
                )
        except MemoryLimitError as error:
            amounts = {active[j]: both for j, both in error.lacking.items()}
            return None, nearest(lacking, MemoryLimitError(amounts, names, word))
        step = Evaluator(ctx, costs, fitting, active, lengths, "").step
        held = np.array(step.held(lengths).peaks, dtype=float)
        over = np.flatnonzero(held > capacity).tolist()
        if not over:
            return fitting, None
        amounts = {active[j]: (int(held[j] - capacity[j]), int(capacity[j])) for j in over}
        lacking = nearest(lacking, MemoryLimitError(amounts, names, word))
        more = held - np.array(step.holdings.at(lengths).peaks, dtype=float)
        if (more <= reserve).all():
            break
        reserve = np.maximum(reserve, more)
    return fitting, lacking


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
    """Whether the last of three candidates is worth another search at prices of memory, which is dear."""
    return last[-1].stages.seconds < last[0].stages.seconds * (1 - ctx.thresholds.memory_search_gain)
