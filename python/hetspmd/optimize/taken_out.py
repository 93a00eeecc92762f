"""Collectives taken out of the loop of a step in micro-batches again, as many as fit the memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hetspmd.codec.tables import counted
from hetspmd.cost.lasting_bytes import lasting_bytes
from hetspmd.optimize.alternation import fits_at_no_ratios, with_best_ratios
from hetspmd.optimize.candidate import Candidate, best_of, searched_within
from hetspmd.optimize.prefetch import like
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.placement import REPLICATE, is_sharded
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.rules.rule import Triple
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import stored_forms


def taken_out(candidate: Candidate, limit: float | None = None) -> Candidate | None:
    """The candidate with as many collectives taken out of its loop as fit the memory; None where it does not fit
    with all of them in the loop, at no ratios.

    A parameter that is gathered before the loop is gathered once, and read in the backward as it was gathered, so
    that it saves up to two collectives in each micro-batch; a gradient saves one. Parameters come first.
    ``limit``: seconds of another candidate; also None for one in whose loop longer collectives than that are left.
    """
    if limit is not None and _left_in_loop(candidate) > limit:
        return None
    evaluator, ctx = candidate.evaluator, candidate.evaluator.ctx
    costs = ctx.costs(candidate.active)
    if not candidate.fits:
        if ctx.brief and fits_at_no_ratios(candidate):
            return None
        ratios, lengths = with_best_ratios(evaluator, costs, candidate.ratios, candidate.lengths)
        candidate = evaluator(ratios, lengths)
        if not candidate.fits:
            return None
    order = _in_loop(candidate)
    best = candidate
    least, most = 0, _first_too_many(candidate, order)
    while most - least > 1:
        count = (least + most) // 2 if least or most <= len(order) else len(order)
        other = _without(candidate, order[:count])
        if other is None or not other.fits:
            most = count
            continue
        least = count
        best = best_of(ctx, [best, other]) or best
    return best


def _first_too_many(candidate: Candidate, order: Sequence[int]) -> int:
    """How many of these, the first so many, do not fit whatever is searched; more than there are, where all may.

    A parameter that is gathered before the loop is held whole to its end, beside what is stored and summed.
    """
    ctx = candidate.evaluator.ctx
    if ctx.batches is None or not ctx.brief:
        return len(order) + 1
    lasting = lasting_bytes(ctx.theory, candidate.program, candidate.lengths, ctx.batches)
    room = float((candidate.step.model.capacity - lasting).min())
    whole, tensors = _read_whole(candidate), ctx.theory.graph.tensors
    held = accumulate(tensors[t].nbytes if t in whole else 0 for t in order)
    return next((count for count, nbytes in enumerate(held, 1) if nbytes > room), len(order) + 1)


def _left_in_loop(candidate: Candidate) -> float:
    """Seconds of collectives that no more memory than there is can take out of the loop."""
    step, roots = candidate.step, candidate.evaluator.ctx.theory.graph.parameter_of
    order = _in_loop(candidate)
    out = set(order[: _first_too_many(candidate, order) - 1])
    seconds = step.stages.communication(step.model.shares(candidate.lengths))
    left = sum(
        s for t, s in zip(step.stages.moved, seconds.tolist(), strict=True) if roots.get(t, t) not in out
    )
    return float(left) - step.stages.saved


def _read_whole(candidate: Candidate) -> set[int]:
    """The parameters in shards that are read whole in the loop."""
    theory, rows = candidate.evaluator.ctx.theory, candidate.result.rows
    forms = stored_forms(theory, rows)
    roots = theory.graph.parameter_of
    return {
        roots[t]
        for instruction in theory.graph.instructions
        if not instruction.is_source
        for t, form in zip(
            instruction.inputs, theory.rows[instruction.id][rows[instruction.id]].pre, strict=True
        )
        if form == REPLICATE and is_sharded(forms.get(roots.get(t, -1), REPLICATE))
    }


def _in_loop(candidate: Candidate) -> list[int]:
    """The parameters and gradients whose collectives are in the loop, and the parameters that the backward gathers
    again, in the order in which they are taken out."""
    ctx, graph = candidate.evaluator.ctx, candidate.evaluator.ctx.theory.graph
    roots, steps = graph.parameter_of, candidate.program.steps
    moved = dict.fromkeys(roots.get(t, t) for t in used_in_loop(ctx, candidate.program))
    gathered = {roots[s.tensor] for s in steps if isinstance(s, Communicate) and s.tensor in roots}
    gathered |= set() if ctx.brief else {p.tensor for p in graph.parameters}
    for step in steps:
        again = graph.second_reads.get(step.instruction, -1) if isinstance(step, Compute) else -1
        # Shards that are read as they are stored would only be gathered.
        if again in gathered and isinstance(step, Compute) and is_sharded(step.row.pre[0]):
            moved[again] = None
    parameters = [p.tensor for p in graph.parameters if p.tensor in moved]
    return [*parameters, *(t for t in moved if t not in parameters)]


def used_in_loop(ctx: Synthesis, program: Program) -> list[int]:
    """The tensors of which collectives are in the program's loop by choice."""
    steps = [s for s in program.steps if isinstance(s, Communicate)]
    return [] if ctx.batches is None else [s.tensor for s in steps if ctx.batches.repeats(s)]


def _without(candidate: Candidate, outside: Sequence[int]) -> Candidate | None:
    """The candidate with the collectives of these parameters and gradients outside of the loop."""
    ctx, theory = candidate.evaluator.ctx, candidate.evaluator.ctx.theory
    roots, out = theory.graph.parameter_of, frozenset(outside)
    repeated = frozenset[int]() if ctx.batches is None else ctx.batches.repeated
    own = ctx.with_repeated(frozenset(t for t in repeated if roots.get(t, t) not in out))
    rows = candidate.result.rows
    same, again = like(theory, rows), theory.graph.second_reads

    def allowed(instruction: int, row: Triple, axis: int | None) -> bool:
        if instruction in again:
            if again[instruction] in out:
                return row.pre[0] == REPLICATE
            return row is theory.rows[instruction][rows[instruction]]
        return same(instruction, row, axis)

    forms = {**ctx.constraints.forms, **stored_forms(theory, rows)}
    where = "gathered once" if ctx.batches is None else "communicated outside of the loop"
    reason = f"{candidate.reason}, {counted(len(outside), 'tensor')} {where}"
    distance, at = candidate.evaluator.prefetch_distance, (candidate.ratios, candidate.lengths)
    return searched_within(own, candidate.active, Constraints(forms, allowed), at, reason, distance)
