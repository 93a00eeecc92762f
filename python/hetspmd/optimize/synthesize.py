"""The best candidate on all devices and on subsets of them.

Candidates are compared by the two-stream simulation (:func:`hetspmd.optimize.candidate.best_of`). They come from
the rounds of search and ratios (:mod:`hetspmd.optimize.alternation`), from known kinds of programs
(:mod:`hetspmd.optimize.baselines`), from searches that weigh hidden communication less
(:mod:`hetspmd.optimize.overlap`), from prefetched parameters (:mod:`hetspmd.optimize.prefetch`), and from the
storage of parameters (:mod:`hetspmd.optimize.parameter_sharding`). Where none of those on all devices fits the
memory, what they store whole is stored in shards.

The same is done for subsets of the devices, the fastest one alone among them; the devices of a better
subset's plan are its active ones, the others idle. A subset whose bound :meth:`CostModel.lower_bound` is no
better than the best so far is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from hetspmd.cost.model import CostModel
from hetspmd.errors import MemoryLimitError
from hetspmd.optimize.alternation import Rounds, alternate, nearest, search_fitting
from hetspmd.optimize.baselines import baselines
from hetspmd.optimize.candidate import Candidate, Evaluator, best_of, certified
from hetspmd.optimize.considered import LeftOut, verdicts
from hetspmd.optimize.overlap import overlap_variants
from hetspmd.optimize.parameter_sharding import storage_variants
from hetspmd.optimize.prefetch import in_shards
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.plan.reports import Considered, Iteration
from hetspmd.program.lengths import Lengths, Matrix
from hetspmd.ratios.starts import device_subsets, proportional, starting_ratios
from hetspmd.search import constraints as known
from hetspmd.search.memory_limits import capacities


class RoundSeconds(NamedTuple):
    """The fewest seconds of a step that rounds of search and ratios came to, in the stage model and simulated."""

    stages: float
    simulated: float

    @classmethod
    def of(cls, rounds: Rounds) -> Self | None:
        """Those of rounds; None where memory decided: what other candidates come to then says more."""
        candidates = rounds.candidates
        if rounds.replaced or not candidates:
            return None
        return cls(min(c.stages.seconds for c in candidates), min(c.seconds for c in candidates))

    def gains(self, before: Self, part: float) -> bool:
        """Whether one of them is less by this part than before."""
        return any(now < was * (1 - part) for now, was in zip(self, before, strict=True))


@dataclass(frozen=True)
class Outcome:
    """What a synthesis gave.

    best         the best candidate
    baselines    predicted seconds of a step by known kinds of programs
    iterations   the rounds that led to the best candidate
    over_memory  the baselines that do not fit the devices' memory
    considered   all candidates, each with why it was not taken
    candidates   the same, but for devices that were left out, as they are
    rounds       seconds that the rounds on the best candidate's devices came to; None where memory decided
    """

    best: Candidate
    baselines: dict[str, float]
    iterations: tuple[Iteration, ...]
    over_memory: tuple[str, ...] = ()
    considered: tuple[Considered, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    rounds: RoundSeconds | None = None


@dataclass(frozen=True)
class _Subset:
    """The best candidate on some devices, and the rounds that led to it."""

    costs: CostModel
    best: Candidate
    rounds: Rounds


def rounds_on_all(ctx: Synthesis) -> Rounds:
    """The rounds of search and ratios on all devices, with which a synthesis begins."""
    costs = ctx.costs(ctx.everyone)
    return alternate(ctx, costs, ctx.everyone, starting_ratios(costs))


def synthesize(
    ctx: Synthesis,
    subsets: Iterable[tuple[int, ...]] | None = None,
    rounds: Rounds | None = None,
    *,
    beside: bool = False,
) -> Outcome:
    """The best candidate on all devices or on one of the ``subsets`` (default: those that may be faster).

    ``rounds``: those on all devices, where they have been made. ``beside``: the outcome is one of several, of
    which another one has the baselines: in a brief synthesis its best candidate has no bound of its own lengths,
    and of known kinds only tensor parallelism is tried, since the levels of ZeRO are.

    Raises InfeasibleError, MemoryLimitError and SearchError as :func:`hetspmd.compile` does.
    """
    costs = ctx.costs(ctx.everyone)
    rounds = rounds or rounds_on_all(ctx)
    fits = any(candidate.fits for candidate in rounds.candidates)
    found = _at_last(ctx, rounds.lacking, subsets) if ctx.quick and not fits else None
    kinds = baselines(ctx, costs, ("tensor_parallel",) if beside and ctx.brief else None)
    tried, best = _on_all(ctx, costs, list(kinds.values()), rounds)
    alone = {"fastest_device_alone": float(min(costs.alone()))}
    seconds = {name: candidate.seconds for name, candidate in kinds.items()} | alone
    over = [name for name, candidate in kinds.items() if not candidate.fits]
    winners = [] if best is None else [_Subset(costs, best, rounds)]
    lacking, left_out, replaced = rounds.lacking, list[LeftOut](), list(rounds.replaced)
    for ranks in device_subsets(costs) if subsets is None else subsets:
        part = ctx.costs(ranks)
        limited = len(ranks) == 1 and np.isfinite(capacities(part)).any()
        slow = best is not None and part.lower_bound() >= best.seconds and not limited
        short = () if slow else _short(ctx, part, ranks)
        if slow or short:
            left_out.append(LeftOut(ranks, part.lower_bound(), short))
            over += ["fastest_device_alone"] if short and len(ranks) == 1 else []
            continue
        candidates, rounds = _on_subset(ctx, part, ranks, math.inf if best is None else best.seconds)
        tried += candidates
        replaced += rounds.replaced
        lacking = nearest(lacking, rounds.lacking)
        if limited and not any(candidate.fits for candidate in candidates):
            over.append("fastest_device_alone")
        if (better := best_of(ctx, candidates)) is not None:
            winners.append(_Subset(part, better, rounds))
            best = best_of(ctx, [better] if best is None else [best, better])
    if best is None:
        winners = [found or _at_last(ctx, lacking, subsets)]
        tried.append(best := winners[0].best)
    best = best_of(ctx, stored := _all_with_storage(ctx, winners, best, tried)) or best
    own = next(s.rounds for s, c in zip(winners, stored, strict=True) if c is best)
    if len(best.active) < ctx.cluster.world and len(winners[0].best.active) == ctx.cluster.world:
        seconds["all_devices"] = stored[0].seconds
    return Outcome(
        best=best if beside and ctx.brief else certified(ctx, best),
        baselines=seconds,
        iterations=tuple(own.iterations),
        over_memory=tuple(over),
        considered=verdicts(ctx, [*tried, *replaced], best, left_out),
        candidates=tuple(tried),
        rounds=RoundSeconds.of(own),
    )


def _on_all(
    ctx: Synthesis, costs: CostModel, kinds: list[Candidate], rounds: Rounds
) -> tuple[list[Candidate], Candidate | None]:
    """The candidates on all devices, known kinds among them, and the best of those that fit."""
    tried = [*kinds, *rounds.candidates]
    best = best_of(ctx, tried)
    if best is None:
        tried += in_shards(ctx, costs, [*kinds, *rounds.replaced])
        best = best_of(ctx, tried)
    if best is None:
        return tried, None
    more = overlap_variants(ctx, costs, ctx.everyone, best, rounds)
    return [*tried, *more], best_of(ctx, [best, *more])


def synthesize_on(
    ctx: Synthesis,
    active: tuple[int, ...],
    starts: Sequence[tuple[str, Matrix]],
    before: RoundSeconds | None = None,
) -> Outcome | None:
    """The best candidate from these starts on the devices ``active``, without baselines; None if none found fits,
    or if the rounds from the starts gain nothing on those ``before`` and memory decided in neither."""
    costs = ctx.costs(active)
    rounds = alternate(ctx, costs, active, starts)
    tried = list(rounds.candidates)
    best = best_of(ctx, tried)
    own = RoundSeconds.of(rounds)
    if best is None:
        return None
    if own is not None and before is not None and not own.gains(before, ctx.thresholds.more_segments_gain):
        return None
    more = overlap_variants(ctx, costs, active, best, rounds)
    tried += more
    best = best_of(ctx, [best, *more]) or best
    best = _with_storage(ctx, _Subset(costs, best, rounds), best, tried, ctx.thresholds.near_best)
    return Outcome(
        best=certified(ctx, best),
        baselines={},
        iterations=tuple(rounds.iterations),
        considered=verdicts(ctx, tried, best),
        rounds=own,
    )


def candidate_at(ctx: Synthesis, ratios: Matrix, lengths: Lengths, active: tuple[int, ...]) -> Candidate:
    """The candidate of the best program at given lengths, whether it fits or not."""
    costs = ctx.costs(active)
    result = ctx.search(costs, lengths)
    return Evaluator(ctx, costs, result, active, lengths, "given ratios")(ratios, lengths)


def within_memory(ctx: Synthesis, candidate: Candidate) -> Candidate | None:
    """The candidate, or that of the best program at its lengths that fits; None if none found does."""
    if candidate.fits:
        return candidate
    costs, active, lengths = ctx.costs(candidate.active), candidate.active, candidate.lengths
    result, _ = search_fitting(ctx, costs, lengths, candidate.result, None, active)
    if result is None:
        return None
    evaluator = Evaluator(ctx, costs, result, active, lengths, f"{candidate.reason}, within the memory")
    fitting = evaluator(candidate.ratios, lengths)
    return fitting if fitting.fits else None


def _on_subset(
    ctx: Synthesis, costs: CostModel, ranks: tuple[int, ...], worth: float
) -> tuple[list[Candidate], Rounds]:
    """Candidates of a proper subset of the devices, and the rounds among them. ``worth``: the fewest seconds of a
    candidate on other devices."""
    if len(ranks) > 1:
        rounds = alternate(ctx, costs, ranks, (("proportional", proportional(costs)),), worth=worth)
        place = best_of(ctx, rounds.candidates) or next(
            (c for c in rounds.replaced if c.seconds < worth), None
        )
        if place is None:
            return rounds.candidates, rounds
        # Where memory is short, what hides communication often holds less, and gains much.
        if not rounds.replaced and place.seconds > worth * (1 + ctx.thresholds.near_best_prefetch):
            return rounds.candidates, rounds
        return rounds.candidates + overlap_variants(ctx, costs, ranks, place, rounds), rounds
    alone = ctx.searcher.space.within(known.single_device(ctx.theory, ctx.constraints.forms))
    rounds = alternate(ctx, costs, ranks, (("alone", (1.0,)),), alone)
    return rounds.candidates, rounds


def _short(ctx: Synthesis, costs: CostModel, ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The bytes that devices lack at least for any program, in proportion to their memory; nothing where one might
    fit."""
    capacity = capacities(costs)
    if np.isinf(capacity).any():
        return ()
    missing = ctx.least.needed(capacity).missing
    parts = np.ceil(missing * capacity / capacity.sum()).astype(int).tolist()
    return tuple(zip(ranks, parts, strict=True)) if missing else ()


def _all_with_storage(
    ctx: Synthesis, subsets: Sequence[_Subset], best: Candidate, tried: list[Candidate]
) -> list[Candidate]:
    """:func:`_with_storage` of each subset, first of that of ``best``: what it gains tells how much others may."""
    thresholds = ctx.thresholds
    first = next(place for place, subset in enumerate(subsets) if subset.best is best)
    settled = _with_storage(ctx, subsets[first], best, tried, thresholds.near_best)
    gained = 1 - settled.seconds / best.seconds
    near = min(max(thresholds.near_stored, 2 * gained), thresholds.near_best)
    return [
        settled if place == first else _with_storage(ctx, subset, best, tried, near)
        for place, subset in enumerate(subsets)
    ]


def _with_storage(
    ctx: Synthesis, subset: _Subset, best: Candidate, tried: list[Candidate], near: float
) -> Candidate:
    """The subset's best candidate with its parameters' storage settled, where it takes at most the part ``near``
    longer than ``best``, and could then be as good. What is tried for that is added to ``tried``."""
    candidate = subset.best
    most = best.seconds * (1 + near)
    if candidate.stages.lower_bound >= best.seconds or candidate.seconds > most:
        return candidate
    stored, more = storage_variants(ctx, subset.costs, candidate)
    tried += more
    return stored


def _at_last(
    ctx: Synthesis, lacking: MemoryLimitError | None, subsets: Iterable[tuple[int, ...]] | None
) -> _Subset:
    """:func:`_without_regard` where no candidate fits. Raises MemoryLimitError if that does not either: fewer
    devices have less memory, and ZeRO's levels are tried besides."""
    found = _without_regard(ctx, lacking, None if subsets is None else ())
    if found is None:
        raise _none_fits(lacking)
    return found


def _without_regard(
    ctx: Synthesis, lacking: MemoryLimitError | None, subsets: Iterable[tuple[int, ...]] | None
) -> _Subset | None:
    """The best candidate without regard to memory, where what was found lacks little, if it fits: rounds and
    storage may come to less memory than what stands before it needs."""
    amounts = () if lacking is None else lacking.lacking.values()
    if all(device.memory == math.inf for device in ctx.cluster.devices):
        return None  # what is lacking is another limit, as that of rows
    if any(missing > ctx.thresholds.nearly_fits * whole for missing, whole in amounts):
        return None
    devices = tuple(replace(device, memory=math.inf) for device in ctx.cluster.devices)
    outcome = synthesize(replace(ctx, cluster=replace(ctx.cluster, devices=devices), bound=None), subsets)
    best, costs = outcome.best, ctx.costs(outcome.best.active)
    distance = best.evaluator.prefetch_distance
    evaluator = Evaluator(ctx, costs, best.result, best.active, None, best.reason, distance)
    candidate = evaluator(best.ratios, best.lengths)
    rounds = Rounds(iterations=list(outcome.iterations))
    return _Subset(costs, candidate, rounds) if candidate.fits else None


def _none_fits(lacking: MemoryLimitError | None) -> MemoryLimitError:
    assert lacking is not None, "no candidate fits, so one lacks memory"
    return lacking
