"""Candidates whose communication other work can hide.

At the lengths of the best candidate more programs are searched, with less weight on communication that other work
can hide; and at those of the other starts' best candidates, where these are nearly as good. Programs that tie in
the search may differ by a fifth in the simulation (an all-reduce costs what a reduce-scatter and an all-gather
cost together, of which the latter can be hidden), and which of them comes out changes with the lengths.
"""

from __future__ import annotations

from hetspmd.cost.model import CostModel
from hetspmd.optimize.alternation import Rounds, fits_at_no_ratios, with_best_ratios
from hetspmd.optimize.candidate import Candidate, Evaluator, best_of, bounded, is_better
from hetspmd.optimize.prefetch import prefetched
from hetspmd.optimize.synthesis import Synthesis


def overlap_variants(
    ctx: Synthesis, costs: CostModel, active: tuple[int, ...], best: Candidate, rounds: Rounds
) -> list[Candidate]:
    """Candidates with programs that are best if part of the communication is hidden, on the same devices: at the
    lengths of ``best``, and of those of the ``rounds`` that are nearly as good; and with prefetched parameters.

    ``best`` need not fit the memory: a program in which less communication counts often holds less."""
    if costs.world == 1:
        return []
    candidates: list[Candidate] = []
    for place in (best, *_near(ctx, best, rounds)):
        tried = [place.result.rows]
        for weight in ctx.thresholds.overlap_weights:
            other = ctx.search(costs, place.lengths, start=place.result, overlap=weight)
            if other.rows in tried:
                continue
            tried.append(other.rows)
            searched_at = None
            if place.searched:
                # Its own bound is of the weighted costs; the bound of all programs is the unweighted search's.
                other = bounded(other, other.cost, place.result)
                searched_at = place.lengths
            reason = f"hidden communication at {weight:g} of its cost, at {place.reason}"
            evaluator = Evaluator(ctx, costs, other, active, searched_at, reason)
            candidates.append(evaluator(place.ratios, place.lengths))
            if ctx.brief and fits_at_no_ratios(candidates[-1]):
                continue
            ratios, lengths = with_best_ratios(evaluator, costs, place.ratios, place.lengths)
            candidates.append(evaluator(ratios, lengths, but=", best ratios"))
    fitting = best_of(ctx, [best, *candidates])
    if fitting is None:
        return candidates
    return candidates + prefetched(ctx, costs, fitting, [*rounds.candidates, *candidates])


def _near(ctx: Synthesis, best: Candidate, rounds: Rounds) -> list[Candidate]:
    """The best candidate of each start, where it takes not much longer than ``best`` and has other lengths."""
    most = best.seconds * (1 + ctx.thresholds.near_best)
    starts: dict[str, Candidate] = {}
    with ctx.clock("balance"):
        for index, candidate in enumerate(rounds.candidates):
            if candidate.stages.lower_bound > most or not candidate.fits or candidate.seconds > most:
                continue
            start = rounds.iterations[index // 2].start
            if start not in starts or is_better(candidate, starts[start]):
                starts[start] = candidate
    candidates: list[Candidate] = []
    for candidate in starts.values():
        if all(candidate.lengths != other.lengths for other in (best, *candidates)):
            candidates.append(candidate)
    return candidates
