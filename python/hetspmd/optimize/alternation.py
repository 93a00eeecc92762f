"""Search and ratios in turns (HAP 3.1).

From each starting ratio B the search gives the best program Q at the lengths of B, the linear program the
best B for Q, and so on until the pair repeats.

Only candidates that fit every device's memory can become a plan. Where the best program at some lengths does not
fit, the best that does is searched at prices of memory (:mod:`hetspmd.search.memory_limits`), and the ratios are
bounded by what the program holds.
"""

from __future__ import annotations

import math
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
    worth: float = math.inf,
) -> Rounds:
    """Search and ratios in turns from each of the ``starts``, by name, on the devices ``active``, which are those
    of ``costs``. ``within``: the programs among which is searched. Where memory is short, ratios in proportion to
    it are a further start, and a quick synthesis takes further ones only until something fits.

    ``worth``: seconds of a step by a candidate on other devices, which fits. A start whose best program without
    regard to memory takes longer than that, or than one that fits from another start, at the best ratios too, is
    not searched at prices of memory; the start that lacks least memory comes first therefore. Where the first
    programs take much longer than ``worth``, there are no further rounds.
    """
    return _Alternation(ctx, costs, active, within, worth).run(starts)


class _Alternation:
    """Search and ratios in turns on some devices: :func:`alternate`."""

    def __init__(
        self,
        ctx: Synthesis,
        costs: CostModel,
        active: tuple[int, ...],
        within: Space | None,
        worth: float,
    ) -> None:
        self.ctx, self.costs, self.active, self.within, self.worth = ctx, costs, active, within, worth
        self.limited = bool(np.isfinite(capacities(costs)).any())
        self.rounds = Rounds()
        self._latest: Candidate | None = None  # what the last round came to

    def run(self, starts: Sequence[tuple[str, Ratios | Matrix]]) -> Rounds:
        """The rounds from all starts."""
        ctx, rounds, segments = self.ctx, self.rounds, self.ctx.theory.axes.segments
        queue = [_Start(name, by_segment(start, segments)) for name, start in starts]
        taken = [start.ratios for start in queue]
        if self.limited and len(queue) > 1 and not ctx.quick:
            queue = [_Start(s.name, s.ratios, self._searched(s, 0, s.ratios)) for s in queue]
            queue.sort(key=self._lacking)
        while queue and not (ctx.quick and rounds.replaced and any(c.fits for c in rounds.candidates)):
            start = queue.pop(0)
            short = self._from(start)
            if ctx.quick and short and not rounds.candidates and _far(ctx, rounds.lacking):
                break
            if self._hopeless():
                break
            if short and not queue and start.name != "memory":
                by = by_segment(by_memory(self.costs), segments)
                taken += [iteration.ratios for iteration in rounds.iterations]
                differ = (np.abs(np.subtract(by, other)).max() for other in taken)
                if all(most > ctx.thresholds.equal_starts for most in differ):
                    queue.append(_Start("memory", by))
        return rounds

    def _from(self, start: _Start) -> bool:
        """Search and ratios in turns from one start. Whether memory was short."""
        ctx, costs, rounds = self.ctx, self.costs, self.rounds
        ratios, searched = start.ratios, start.searched
        before: SearchResult | None = None
        short = False
        seen: set[tuple[object, ...]] = set()
        for index in range(ctx.thresholds.rounds):
            lengths = lengths_for(ctx.theory.axes, ratios)
            if ctx.quick and rounds.replaced and (ctx.least.at(lengths) > capacities(costs)).any():
                return True
            evaluator = searched or self._searched(start, index, ratios, before)
            searched = None
            tried = [evaluator(ratios, lengths)]
            if not tried[0].fits:
                rounds.replaced += tried
                short = True
                tried = self._that_fit(tried[0])
                if not tried:
                    break
            else:
                tried.append(self._at_best_ratios(tried[0]))
            rounds.candidates += tried
            for first, second in zip(tried[::2], tried[1::2], strict=True):
                seconds = min(first.stages.seconds, second.stages.seconds)
                rounds.iterations.append(Iteration(start.name, index, ratios, first.result.cost, seconds))
            result, better, moved = tried[1].result, tried[1].ratios, tried[1].lengths
            compared = [c for c in (self._latest, *tried[:2]) if c is not None]
            self._latest = tried[1]
            key = (result.rows, result.moves, moved)
            if key in seen or moved == lengths:
                break
            again = index or ctx.quick
            if result.stop_reason == "memory" and again and not _much_better(ctx, compared):
                break
            if self._hopeless():
                break
            seen.add(key)
            ratios, before = better, result
        return short

    def _searched(
        self, start: _Start, index: int, ratios: Matrix, before: SearchResult | None = None
    ) -> Evaluator:
        """The best program without regard to memory."""
        lengths = lengths_for(self.ctx.theory.axes, ratios)
        reason = start.name if start.name == "alone" else f"{start.name} ratios, round {index + 1}"
        result = self.ctx.search(self.costs, lengths, start=before, within=self.within)
        return Evaluator(self.ctx, self.costs, result, self.active, lengths, reason)

    def _lacking(self, start: _Start) -> float:
        """The largest part of a device's memory that the program that was searched for a start lacks there."""
        assert start.searched is not None
        candidate = start.searched(start.ratios, lengths_for(self.ctx.theory.axes, start.ratios))
        if candidate.fits:
            return 0.0
        memory = self.ctx.cluster.devices
        return max(missing / memory[rank].memory for rank, missing in candidate.lacking.items())

    def _that_fit(self, short: Candidate) -> list[Candidate]:
        """Candidates in the place of one that does not fit, in pairs: the best program that fits at its lengths,
        and that at its best ratios; its own program at other ratios, if it fits there."""
        free = self._free(short)
        elsewhere = free if free.fits else self._at_best_ratios(short)
        fitting = self._fitting(short, min(short.seconds, free.seconds))
        tried = [] if fitting is None else [fitting, self._at_best_ratios(fitting)]
        return [*tried, elsewhere, elsewhere] if elsewhere.fits else tried

    def _at_best_ratios(self, candidate: Candidate) -> Candidate:
        """A candidate's program at the best ratios that keep within the memory."""
        better, moved = with_best_ratios(candidate.evaluator, self.costs, candidate.ratios, candidate.lengths)
        return candidate.evaluator(better, moved, but=", best ratios")

    def _fitting(self, short: Candidate, least: float) -> Candidate | None:
        """The candidate of the best program that fits in the place of one that does not; None where there is none,
        or where it could not be better than what is known. ``least``: seconds of the one that does not fit, at its
        best ratios without regard to memory too."""
        ctx, costs, rounds, lengths = self.ctx, self.costs, self.rounds, short.lengths
        if (ctx.least.at(lengths) > capacities(costs)).any():
            # Nothing fits at these lengths, so that no search is needed to know it.
            rounds.lacking = nearest(rounds.lacking, error_of(ctx, short))
            return None
        best = self._best()
        if best is not None and least >= best:
            return None
        # Where others fit already, a few searches tell enough.
        quick = ctx.quick or best is not None
        fitting, lacking = search_fitting(
            ctx,
            costs,
            lengths,
            short.result,
            self.within,
            self.active,
            quick=quick,
            worth=0.0 if ctx.quick or best is None else best,
        )
        if fitting is None:
            rounds.lacking = nearest(rounds.lacking, lacking)
            return None
        reason = f"{short.reason}, within the memory"
        candidate = Evaluator(ctx, costs, fitting, self.active, lengths, reason)(short.ratios, lengths)
        if not candidate.fits:  # with what idle devices are sent; it may do so at other ratios
            rounds.lacking = nearest(rounds.lacking, error_of(ctx, candidate))
        return candidate

    def _free(self, candidate: Candidate) -> Candidate:
        """A candidate's program at the best ratios without regard to memory."""
        ctx, evaluator = self.ctx, candidate.evaluator
        if self.costs.world == 1:
            return candidate
        with ctx.clock("balance"):
            better = optimise(
                ctx.theory, self.costs, evaluator.program, candidate.ratios, stages=evaluator.step.stages
            )
            lengths = lengths_for(ctx.theory.axes, better)
        return evaluator(better, lengths, but=", best ratios")

    def _best(self) -> float | None:
        """The fewest seconds of a candidate that fits, here or on other devices; None where none does."""
        known = [c.seconds for c in self.rounds.candidates if c.fits]
        known += [self.worth] if self.worth < math.inf else []
        return min(known, default=None)

    def _hopeless(self) -> bool:
        """Whether what fits takes much longer than what fits on other devices."""
        if self.worth == math.inf:
            return False
        most = self.worth * (1 + self.ctx.thresholds.near_best)
        candidates = self.rounds.candidates
        return bool(candidates) and all(c.stages.lower_bound > most or c.seconds > most for c in candidates)


@dataclass(frozen=True)
class _Start:
    """Ratios from which rounds start, with the best program at them without regard to memory where it is known."""

    name: str
    ratios: Matrix
    searched: Evaluator | None = None


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
    worth: float = 0.0,
) -> tuple[SearchResult | None, MemoryLimitError | None]:
    """The best program that fits at these lengths, or the error of the program found that lacks the fewest bytes.
    ``quick``: none is searched further where a few searches have found none that takes fewer seconds than
    ``worth``.
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
                known=Known(ctx.earlier_prices, active, worth) if within is None else None,
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
    better = ratios
    # Whole units may be more than the share that fits: then the device gets a smaller bound.
    for attempt in range(ctx.thresholds.memory_attempts):
        with ctx.clock("balance"):
            better = optimise(
                ctx.theory,
                costs,
                evaluator.program,
                ratios,
                most=most,
                room=room,
                stages=evaluator.step.stages,
                near=better if attempt else None,
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
