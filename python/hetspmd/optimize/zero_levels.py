"""How often a step communicates parameters and gradients, where memory is short (ZeRO 0 to 3).

A parameter in shards is gathered once in a step, or again for the backward. In micro-batches that is outside of the
loop, or in each of them, and a gradient is reduced once after the loop, or in each of them. Seldom is cheapest, and
holds most: gathered parameters, and gradients summed whole. So a step is planned like this first. Only where memory
keeps a faster program from being taken are there others:

- the best program with every collective in the loop that can be there, which holds least, and that of ZeRO-3, whose
  parameters are stored in even shares, or where there is room;
- the same with as many of their collectives taken out of the loop again as fit the memory: those that save most
  seconds for a byte first. So each parameter has its own level.

Seconds and memory are those of :class:`~hetspmd.optimize.candidate.Candidate`, as for any other program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np

from hetspmd.cost.lasting_bytes import lasting_bytes
from hetspmd.cost.memory import OPTIMIZER_BYTES
from hetspmd.cost.model import Array
from hetspmd.errors import ConstraintError, MemoryLimitError
from hetspmd.optimize.alternation import Rounds, nearest
from hetspmd.optimize.baselines import baselines
from hetspmd.optimize.candidate import Candidate, Evaluator, best_of, bounded, searched_within
from hetspmd.optimize.considered import among, instead, memory_is_short
from hetspmd.optimize.outside_of_the_loop import lacks_outside
from hetspmd.optimize.prefetch import further, storage_axes, stored_evenly
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.synthesize import Outcome, rounds_on_all, synthesize
from hetspmd.optimize.taken_out import taken_out, used_in_loop
from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.placement import REPLICATE, Placement, is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import Considered
from hetspmd.program.lengths import Lengths, by_segment, lengths_for
from hetspmd.program.loop_steps import repeatable
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import Compute
from hetspmd.ratios.starts import proportional
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints, RowFilter, spelling, zero
from hetspmd.search.memory_limits import capacities
from hetspmd.search.search import stored_forms

_LEVELS: Final = {1: "zero_1", 2: "zero_2", 3: "zero_3"}
"""The levels of ZeRO that store parameters in shards, with their names as baselines."""
_LEANEST: Final = 3


@dataclass(frozen=True)
class Begun:
    """A step of which the first searches have been made.

    levels     the levels of ZeRO
    leave_out  a program whose collectives are outside of the loop lacks memory
    rounds     then, in a brief synthesis, the rounds of search and ratios on all devices, with collectives in it
    in_loop    the best candidate of these, if one fits
    fitting    this one and ZeRO-3, if they fit, with collectives taken out of the loop
    """

    levels: _Levels
    leave_out: bool
    rounds: Rounds | None = None
    in_loop: Candidate | None = None
    fitting: tuple[Candidate, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Those of the fastest candidate; None where none is known."""
        return min((c.seconds for c in self.fitting), default=None)


def begin_step(ctx: Synthesis) -> Begun:
    """The first searches of a step.

    Raises what :func:`~hetspmd.optimize.synthesize.synthesize` raises but for MemoryLimitError.
    """
    levels = _Levels(ctx)
    # A program that holds no more than one whose collectives are outside of the loop has them in it.
    if ctx.batches is None or not lacks_outside(ctx, partial(levels.at, 1)):
        return Begun(levels, leave_out=False)
    if not ctx.brief:
        return Begun(levels, leave_out=True)
    own = ctx.with_repeated(_repeated(ctx))
    rounds = rounds_on_all(own)
    best = best_of(own, rounds.candidates)
    seconds = None if best is None else best.seconds
    found = [taken_out(c, seconds) for c in (best, levels.at(_LEANEST, seconds)) if c is not None]
    return Begun(levels, True, rounds, best, tuple(c for c in found if c is not None))


def synthesize_step(ctx: Synthesis, begun: Begun | int | None = None) -> tuple[Synthesis, Outcome]:
    """The best candidate of a step, and the context that says which collectives are in its loop: those of a level
    of ZeRO that is given in the place of what has ``begun``, or such as the search decides.

    Raises what :func:`~hetspmd.optimize.synthesize.synthesize` raises.
    """
    batches = ctx.batches
    if isinstance(begun, int):
        ctx = ctx.with_repeated(repeated_in(ctx.theory, batches, begun))
        return ctx, _at_level(ctx, begun)
    begun = begun or begin_step(ctx)
    levels = begun.levels
    outcome, lacking = (None, None) if begun.leave_out else _planned(ctx)
    if outcome is not None and not memory_is_short(outcome.considered, outcome.best.seconds):
        return ctx, outcome if batches is None else _beside(outcome, levels.every())
    outcome = None if outcome is None else _beside(outcome, levels.every())
    in_loop, missing = (None, None) if batches is None else _in_loop(ctx, begun.rounds)
    fitting: list[Candidate | None] = list(begun.fitting)
    if in_loop is not None and in_loop.best is not begun.in_loop:
        fitting.append(taken_out(in_loop.best))
    if begun.rounds is None:
        leanest = levels.at(_LEANEST)
        fitting += [] if leanest is None else [taken_out(leanest)]
    best = best_of(ctx, [c for c in fitting if c is not None])
    if best is None or (outcome is not None and outcome.best.seconds <= best.seconds):
        if outcome is None:
            lacking = nearest(lacking, missing)
            assert lacking is not None, "no candidate fits, so one lacks memory"
            raise lacking
        return ctx, outcome
    best = _certified(ctx, best)
    ways = {"outside of the loop": outcome, "in the loop": in_loop} if batches else {"": outcome}
    considered = [c for way, one in ways.items() if one for c in _among(one.considered, way)]
    considered += [_short(ctx, error) for error in (lacking, missing) if error is not None]
    iterations = next((one.iterations for one in (in_loop, outcome) if one), ())
    beside = outcome or _beside(_known_kinds(ctx, best, in_loop), levels.every())
    return best.evaluator.ctx, replace(
        beside, best=best, iterations=iterations, considered=instead(considered, _taken(best))
    )


def _at_level(ctx: Synthesis, level: int) -> Outcome:
    """The best candidate at a level of ZeRO that is asked for: of those that are searched, and of the level's ways
    to store parameters, which may fit, or be faster, where shards in the shares of the work are not.

    Raises what :func:`~hetspmd.optimize.synthesize.synthesize` raises.
    """
    outcome, lacking = _planned(ctx, ())
    best = best_of(ctx, _level(ctx, level)) if level in _LEVELS else None
    if best is not None:
        best = further(ctx, ctx.costs(best.active), best) or best
    if best is None or (outcome is not None and outcome.best.seconds <= best.seconds):
        if outcome is None:
            assert lacking is not None, "no candidate fits, so one lacks memory"
            raise lacking
        return outcome
    if outcome is None:
        return replace(_known_kinds(ctx, best, None), considered=(_taken(best),))
    return replace(outcome, best=best, considered=instead(outcome.considered, _taken(best)))


def _known_kinds(ctx: Synthesis, best: Candidate, in_loop: Outcome | None) -> Outcome:
    """An outcome with the baselines of a step of which no program fits with collectives outside of the loop."""
    costs = ctx.costs(ctx.everyone)
    kinds = baselines(ctx, costs)
    seconds = {name: candidate.seconds for name, candidate in kinds.items()}
    seconds["fastest_device_alone"] = float(min(costs.alone()))
    over = [name for name, candidate in kinds.items() if not candidate.fits]
    over += [name for name in (in_loop.over_memory if in_loop else ()) if name == "fastest_device_alone"]
    return Outcome(best=best, baselines=seconds, iterations=(), over_memory=tuple(over))


def _repeated(ctx: Synthesis) -> frozenset[int]:
    return repeated_in(ctx.theory, ctx.batches, _LEANEST)


def _among(considered: tuple[Considered, ...], way: str) -> tuple[Considered, ...]:
    return among(considered, way) if way else considered


def _planned(
    ctx: Synthesis, subsets: Sequence[tuple[int, ...]] | None = None
) -> tuple[Outcome | None, MemoryLimitError | None]:
    try:
        return synthesize(ctx, subsets), None
    except MemoryLimitError as error:
        return None, error


def _in_loop(ctx: Synthesis, rounds: Rounds | None) -> tuple[Outcome | None, MemoryLimitError | None]:
    """The best candidate with every collective in the loop that can be there. Its bound is
    proved of what is left in the loop."""
    try:
        return synthesize(ctx.with_repeated(_repeated(ctx)), rounds=rounds, beside=True), None
    except MemoryLimitError as error:
        return None, error


def _beside(outcome: Outcome, levels: Mapping[int, Candidate]) -> Outcome:
    """The outcome with the levels of ZeRO among its baselines."""
    named = {_LEVELS[level]: candidate for level, candidate in levels.items()}
    return replace(
        outcome,
        baselines={**outcome.baselines, **{name: c.seconds for name, c in named.items()}},
        over_memory=(*outcome.over_memory, *(name for name, c in named.items() if not c.fits)),
    )


def _taken(best: Candidate) -> Considered:
    return Considered(
        reason=best.reason, active=best.active, seconds=best.seconds, simulated=True, verdict="taken"
    )


def _short(ctx: Synthesis, lacking: MemoryLimitError) -> Considered:
    """That no program was found that fits: what the nearest one lacks, and the seconds that any takes at least."""
    return Considered(
        reason="any other program",
        active=ctx.everyone,
        seconds=ctx.costs(ctx.everyone).lower_bound(),
        simulated=False,
        verdict="memory",
        lacking=tuple(sorted((rank, missing) for rank, (missing, _) in lacking.lacking.items())),
    )


def fits_leanest(ctx: Synthesis) -> bool:
    """Whether data parallelism with everything in shards, and every collective in the loop, fits: ZeRO-3."""
    return any(candidate.fits for candidate in reversed(_level(ctx, _LEANEST)))


class _Levels:
    """Data parallelism with parameters in shards, by the level of ZeRO: the best of its ways to store them that
    fits, else the last. Each is searched when it is asked for."""

    def __init__(self, ctx: Synthesis) -> None:
        self._ctx, self._found = ctx, dict[int, Candidate | None]()

    def at(self, level: int, best: float | None = None) -> Candidate | None:
        """That of a level; None where the constraints exclude it, or it is the level before. ``best``: seconds of
        another candidate that fits."""
        if level == 2 and self._ctx.batches is None:  # there it is level 1
            return None
        if level not in self._found:
            ways = _level(self._ctx, level, best)
            several = best_of(self._ctx, ways) if len(ways) > 1 else None
            self._found[level] = several or (ways[-1] if ways else None)
        return self._found[level]

    def every(self) -> dict[int, Candidate]:
        """Those of all levels that there are."""
        return {level: c for level in _LEVELS if (c := self.at(level)) is not None}


def _level(ctx: Synthesis, level: int, best: float | None = None) -> list[Candidate]:
    """A level of ZeRO at proportional ratios: with parameters stored in these shares, in even ones, and in those
    that fill each device's memory, where it is known. In a brief synthesis only the first of them where memory has
    no room for the level in any number of micro-batches, or where its collectives alone take many times as long as
    the ``best`` other candidate: how parameters are stored changes neither."""
    wanted, theory = zero(ctx.theory, level), ctx.theory
    if any(wanted.forms.get(t, form) != form for t, form in ctx.constraints.forms.items()):
        return []
    own = ctx.with_repeated(repeated_in(theory, ctx.batches, level))
    costs = own.costs(own.everyone)
    ratios = by_segment(proportional(costs), theory.axes.segments)
    constraints = Constraints({**ctx.constraints.forms, **wanted.forms}, wanted.row_filter)

    def at(lengths: Lengths, how: str) -> list[Candidate]:
        candidate = searched_within(own, own.everyone, constraints, (ratios, lengths), f"ZeRO-{level}{how}")
        return [] if candidate is None else [candidate]

    def otherwise(candidate: Candidate, stored: Lengths, how: str) -> list[Candidate]:
        """The level with parameters stored otherwise; a quick synthesis does not search what cannot fit."""
        lasting = lasting_bytes(theory, candidate.program, stored, own.batches)
        return [] if ctx.quick and (lasting > capacities(costs)).any() else at(stored, how)

    lengths = lengths_for(theory.axes, ratios)
    candidates = at(lengths, "")
    for candidate in () if ctx.brief and _out_of_reach(ctx, level, candidates, best) else candidates[:1]:
        free = storage_axes(theory, candidate.program)
        even = stored_evenly(theory, lengths, ratios, free)
        candidates += otherwise(candidate, even, ", stored evenly")
        if np.isfinite(capacities(costs)).all():
            room = _room(candidates[-1], capacities(costs), free)
            if room.sum() > 0:
                filled = stored_evenly(theory, lengths, ratios, free, room.tolist())
                candidates += otherwise(candidate, filled, ", stored where there is room")
    return candidates


def _out_of_reach(ctx: Synthesis, level: int, candidates: Sequence[Candidate], best: float | None) -> bool:
    """Whether a level is no more than a baseline, from its first candidate."""
    if level < _LEANEST and ctx.prepared is not None and ctx.prepared.lacks_outside:
        return True
    times = ctx.thresholds.out_of_reach
    return best is not None and any(c.stages.lower_bound > times * best for c in candidates)


def _room(candidate: Candidate, capacity: Array, free: frozenset[int]) -> Array:
    """Bytes of each device beside what the candidate holds there but for what it only stores, along the axes
    ``free``."""
    theory, units = candidate.evaluator.ctx.theory, candidate.lengths.units
    stored = np.zeros(len(capacity))
    forms = stored_forms(theory, candidate.result.rows)
    for parameter in theory.graph.parameters:
        form, meta = forms[parameter.tensor], theory.graph.tensors[parameter.tensor]
        axis = theory.axes.sharded(parameter.tensor, form) if is_sharded(form) else None
        if axis is not None and axis.id in free:
            trained = 0 if parameter.gradient is None else meta.nbytes + meta.numel * OPTIMIZER_BYTES
            stored += (meta.nbytes + trained) * np.array(units[axis.id], dtype=float) / max(axis.units, 1)
    held = np.array(candidate.step.held(candidate.lengths).peaks, dtype=float)
    return np.maximum(capacity - (held - stored), 0.0)


def repeated_in(theory: Theory, batches: MicroBatches | None, level: int) -> frozenset[int]:
    """The tensors whose collectives are in the loop at a level of ZeRO: none up to 1, gradients at 2, all at 3; but
    for small ones, whose latencies would cost more than holding them."""
    if level < 2 or batches is None:
        return frozenset()
    able, nbytes = repeatable(theory, batches), {t.id: t.nbytes for t in theory.graph.tensors}
    ordered = sorted(able, key=lambda t: (nbytes[t], t))
    small = THRESHOLDS.small_in_loop * sum(nbytes[t] for t in ordered)
    sums = accumulate(nbytes[t] for t in ordered)
    large = frozenset(t for t, held in zip(ordered, sums, strict=True) if held > small)
    return large if level == 3 else large & batches.summed


def zero_of(theory: Theory, asked: Constraints, level: int) -> Constraints:
    """The user's constraints, and those of a level of ZeRO. Raises ConstraintError where they contradict."""
    wanted = zero(theory, level)
    for tensor, form in asked.forms.items():
        if wanted.forms.get(tensor, form) != form:
            stored, name = spelling(wanted.forms[tensor]), theory.graph.tensors[tensor].name
            raise ConstraintError(
                f"zero={level} stores {name} {stored}, and a constraint {asked.origins.get(tensor, name)} says "
                f"{spelling(form)}; leave one of the two out"
            )
    return Constraints({**wanted.forms, **asked.forms}, wanted.row_filter, asked.origins)


def loop_like(theory: Theory, batches: MicroBatches, like: Plan) -> MicroBatches:
    """The loop with the collectives in it that an earlier plan of the same model has in its own."""
    roots, repeated = like.graph.parameter_of, frozenset(like.repeated)
    gradients = {p.gradient: p.name for p in like.graph.parameters}
    names = {p.tensor: p.name for p in like.graph.parameters}
    gathered = {names[roots[t]] for t in repeated if t in roots}
    reduced = {gradients[t] for t in repeated if t in gradients}
    own, able = theory.graph.parameter_of, repeatable(theory, batches)
    of = {p.tensor: p.name for p in theory.graph.parameters}
    sums = {p.gradient: p.name for p in theory.graph.parameters}
    again = {t for t in able if of.get(own.get(t, -1)) in gathered or sums.get(t) in reduced}
    return replace(batches, repeated=frozenset(again))


def rereads_like(theory: Theory, forms: Mapping[int, Placement], like: Plan) -> RowFilter:
    """Lets the backward gather again the parameters that it gathers again in an earlier plan, of those that are
    stored in shards by ``forms``."""
    again = {
        like.graph.second_reads[step.instruction]
        for step in like.program.steps
        if isinstance(step, Compute) and step.instruction in like.graph.second_reads
        if is_sharded(step.row.pre[0])
    }
    names = {p.name for p in like.graph.parameters if p.tensor in again}
    gathered = {
        p.tensor
        for p in theory.graph.parameters
        if p.name in names and is_sharded(forms.get(p.tensor, REPLICATE))
    }

    def allowed(instruction: int, row: Triple, _axis: int | None) -> bool:
        parameter = theory.graph.second_reads.get(instruction)
        return parameter not in gathered or is_sharded(row.pre[0])

    return allowed


def _certified(ctx: Synthesis, candidate: Candidate) -> Candidate:
    """The candidate with the bound of all programs at its lengths, wherever their collectives stand: none takes
    less than outside of the loop."""
    own = candidate.evaluator.ctx
    own = own.with_repeated(frozenset(used_in_loop(own, candidate.program)))
    active, lengths = candidate.active, candidate.lengths
    whole = ctx.search(ctx.costs(active), lengths, start=candidate.result, certain=True)
    costs = own.costs(active)
    cost = own.searcher.cost(candidate.result, costs, lengths)
    result = bounded(candidate.result, cost, whole)
    distance = candidate.evaluator.prefetch_distance
    evaluator = Evaluator(own, costs, result, active, lengths, candidate.reason, distance)
    return evaluator(candidate.ratios, lengths)
