"""Devices that run the loop over micro-batches without waiting for each other (Poplar, Algorithm 2).

Where no collective is in the loop, a device may take its rows in turns of its own: as few as its memory allows, for
each turn reads the parameters again, launches its ops and adds to the sums. A device of much memory then takes all
of its rows at once beside one that takes eight turns for them. With a measured curve of steps it is the number of
turns in which the device is fastest.

Turns and shares depend on each other: a device with more turns holds fewer rows at a time, and has room for a
larger share. So both are improved in turn, from the shares of the step in equal turns, and from those that would be
best if memory were without limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from hetspmd.cost.measured_steps import step_seconds
from hetspmd.cost.model import Array, CostModel
from hetspmd.optimize.alternation import with_best_ratios
from hetspmd.optimize.candidate import Candidate, Evaluator, best_of, bounded, searched_within
from hetspmd.optimize.considered import instead
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.synthesize import Outcome
from hetspmd.placement import REPLICATE
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import Considered
from hetspmd.program.lengths import Lengths, Matrix, by_segment, lengths_for
from hetspmd.program.loop_steps import waits_in_loop
from hetspmd.program.micro_batches import MicroBatches, largest_axis
from hetspmd.ratios.ratios import optimise
from hetspmd.ratios.starts import proportional
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import stored_forms

_ROUNDS: Final = 4
"""How often turns and shares are improved, at most."""
_MORE_TURNS: Final = 4
"""How many times the fewest turns are considered where steps were measured."""
_REASON: Final = ", devices in turns of their own"


def free_running(ctx: Synthesis, outcome: Outcome) -> tuple[Synthesis, Outcome]:
    """The outcome with each device in turns of its own, where that is faster, and the context that says so."""
    best = found = outcome.best
    for candidate in filter(_may_fit, _without_waits(ctx, best)):
        for start in _starts(candidate):
            found = best_of(ctx, [found, *_improved(start)]) or found
    if found is best:
        return ctx, outcome
    own = found.evaluator.ctx
    found = _bounded(found)
    taken = Considered(
        reason=found.reason, active=found.active, seconds=found.seconds, simulated=True, verdict="taken"
    )
    return own, replace(outcome, best=found, considered=instead(outcome.considered, taken))


def in_own_turns(candidate: Candidate, turns: Sequence[int]) -> Candidate:
    """The candidate with so many turns of each active device."""
    evaluator = candidate.evaluator
    ctx = evaluator.ctx.with_own_turns(tuple(turns))
    costs = ctx.costs(candidate.active)
    reason = evaluator.reason.removesuffix(_REASON) + _REASON
    own = Evaluator(ctx, costs, candidate.result, candidate.active, None, reason, evaluator.prefetch_distance)
    return own(candidate.ratios, candidate.lengths)


def _without_waits(ctx: Synthesis, best: Candidate) -> list[Candidate]:
    """Candidates in whose loops are no collectives: the best one if it is so, else programs of its devices in which
    these divide the samples as the micro-batches do, with parameters stored as they are in it, and as is best.
    Where it leaves devices out, the same of all of them."""
    batches, theory = ctx.batches, ctx.theory
    if batches is None:
        return []
    own = ctx.with_repeated(frozenset())
    together = own.batches or batches
    phases, rows = batches.loop.phases, batches.loop.rows

    def allowed(instruction: int, row: Triple, _axis: int | None) -> bool:
        return phases[instruction] != "in" or row == rows[instruction]

    def divided(active: tuple[int, ...], at: tuple[Matrix, Lengths]) -> list[Candidate]:
        if ctx.brief and (own.costs(active).capacity < whole).any():
            return []
        stored = {**ctx.constraints.forms, **stored_forms(theory, best.result.rows)}
        found = (
            searched_within(
                own, active, Constraints(forms, allowed), at, "data parallelism in the loop", distance
            )
            for forms in (stored, ctx.constraints.forms)
        )
        return [c for c in found if c is not None and not waits_in_loop(theory.graph, together, c.program)]

    whole = _read_whole(theory, together)
    distance = best.evaluator.prefetch_distance
    waits = waits_in_loop(theory.graph, batches, best.program)
    candidates = divided(best.active, (best.ratios, best.lengths)) if waits else [best]
    if best.active != ctx.everyone:
        ratios = by_segment(proportional(own.costs(ctx.everyone)), theory.axes.segments)
        candidates += divided(ctx.everyone, (ratios, lengths_for(theory.axes, ratios)))
    return candidates


def _read_whole(theory: Theory, batches: MicroBatches) -> int:
    """Bytes of parameters that a device holds whole through the loop, if it computes as the micro-batches do."""
    graph, loop = theory.graph, batches.loop
    whole: dict[int, int] = {}
    for instruction in graph.instructions:
        if loop.phases[instruction.id] != "in":
            continue
        for t, form in zip(instruction.inputs, loop.rows[instruction.id].pre, strict=True):
            if t in graph.parameter_of and form == REPLICATE:
                root = graph.parameter_of[t]
                whole[root] = max(whole.get(root, 0), graph.tensors[t].nbytes)
    return sum(whole.values())


def own_turns_like(
    theory: Theory, loop: MicroBatches, like: Plan, candidate: Candidate
) -> tuple[int, ...] | None:
    """The turns of an earlier plan's devices for a candidate of another batch, none of which has more turns than
    rows; None where that plan has none, or the candidate's devices wait for each other in the loop."""
    axis = largest_axis(theory, loop.loop.axes)
    if not like.own_turns or axis is None or waits_in_loop(theory.graph, loop, candidate.program):
        return None
    rows = candidate.lengths.units[axis]
    turns = tuple(min(own, max(n, 1)) for own, n in zip(like.own_turns, rows, strict=True))
    return turns if max(turns) > 1 else None


def _may_fit(candidate: Candidate) -> bool:
    """Whether every device has room for what it holds whole, in however many turns."""
    profile = candidate.step.executed.at(candidate.lengths)
    return bool((candidate.step.model.capacity >= profile.whole.max()).all())


def _starts(best: Candidate) -> list[Candidate]:
    """The candidate at its ratios, and at those that are best without a limit of memory."""
    evaluator = best.evaluator
    ctx, costs = evaluator.ctx, evaluator.step.model
    with ctx.clock("balance"):
        ratios = optimise(ctx.theory, costs, evaluator.program, best.ratios, stages=evaluator.step.stages)
    return [best, evaluator(ratios, lengths_for(ctx.theory.axes, ratios), but=", best ratios")]


def _improved(start: Candidate) -> list[Candidate]:
    """Candidates with turns of their own, each with better shares than the one before."""
    found: list[Candidate] = []
    seen: set[tuple[tuple[int, ...], Matrix]] = set()
    at = start
    for _ in range(_ROUNDS):
        turns = _best_turns(at)
        if turns is None or max(turns) == 1 or (turns, at.ratios) in seen:
            break
        seen.add((turns, at.ratios))
        freed = in_own_turns(at, turns)
        found.append(freed)
        evaluator = freed.evaluator
        ratios, lengths = with_best_ratios(evaluator, evaluator.step.model, freed.ratios, freed.lengths)
        at = evaluator(ratios, lengths, but=", best ratios")
        found.append(at)
    return found


def _best_turns(candidate: Candidate) -> tuple[int, ...] | None:
    """The turns in which each device is fastest, of those that fit at the candidate's lengths. A device that has no
    room for a single row at a time takes its rows one by one. None for a step without samples to divide."""
    batches, lengths = candidate.evaluator.ctx.batches, candidate.lengths
    axis = None if batches is None else largest_axis(candidate.evaluator.ctx.theory, batches.loop.axes)
    if batches is None or axis is None:
        return None
    rows = lengths.units[axis]
    room = _rows_that_fit(candidate, batches, axis)
    costs = candidate.evaluator.step.model
    return tuple(
        _turns_of(costs, device, own, min(max(int(room[device]), 1), max(own, 1)))
        for device, own in enumerate(rows)
    )


def _rows_that_fit(candidate: Candidate, batches: MicroBatches, axis: int) -> Array:
    """How many units of an axis each device has room for at a time."""
    profile = candidate.step.held(candidate.lengths)
    table = batches.table(axis, candidate.lengths.units[axis])
    at_once = np.array(table).max(axis=0)
    each = profile.in_turn.sum(axis=1)[:, None] / max(max(batches.turns.units[axis]), 1)
    rest = profile.held - each * at_once
    room = candidate.step.model.capacity - rest
    fits = np.where(each > 0, room / np.maximum(each, 1e-9), np.where(room >= 0, np.inf, 0.0))
    rows: Array = np.clip(np.floor(fits.min(axis=0)), 0, sum(candidate.lengths.units[axis]))
    return rows


def _turns_of(costs: CostModel, device: int, rows: int, room: int) -> int:
    """In how many turns a device is fastest that has room for so many of its rows at a time: the fewest, or, by the
    curve of its measured steps, up to four times as many."""
    fewest = max(math.ceil(rows / room), 1)
    measured = costs.measured
    curve = None if measured is None else measured.steps.by_rank(costs.world)[device]
    if measured is None or curve is None or not curve.points:
        return fewest
    part = measured.rows / max(_samples_of(costs), 1)

    def seconds(turns: int) -> float:
        return turns * step_seconds(curve, math.ceil(rows / turns) * part)

    return min(range(fewest, max(min(_MORE_TURNS * fewest, rows), fewest) + 1), key=seconds)


def _samples_of(costs: CostModel) -> int:
    """The units of the samples of a step."""
    assert costs.batches is not None
    axis = largest_axis(costs.theory, costs.batches.loop.axes)
    return 0 if axis is None else costs.theory.axes.axes[axis].units


def _bounded(candidate: Candidate) -> Candidate:
    """The candidate with the bound of all programs at its lengths, with these turns."""
    ctx, evaluator = candidate.evaluator.ctx, candidate.evaluator
    costs, lengths = evaluator.step.model, candidate.lengths
    whole = ctx.search(costs, lengths, start=candidate.result, certain=True)
    cost = ctx.searcher.cost(candidate.result, costs, lengths)
    result = bounded(candidate.result, cost, whole)
    own = Evaluator(
        ctx, costs, result, candidate.active, lengths, candidate.reason, evaluator.prefetch_distance
    )
    return own(candidate.ratios, lengths)
