"""Gathers that the forward hides: programs of which only the simulation tells that they are better.

In data parallelism all communication falls into the backward, and the links are idle while the forward runs. A
parameter that is stored in shards is gathered in the forward, and its gradient is reduce-scattered in the backward
(ZeRO-3): on a ring the same bytes as an all-reduce, half of them where the links are idle. The additive costs of
the search do not tell one from the other. So from a good program others are derived, which differ in how parameters
are stored, and the simulation of the two streams judges them:

- **Which** parameters: all, and those of the last layers that make up a part of the bytes. What the forward reads
  first cannot be gathered behind anything. Only dims are divided along which the program divides nothing else.
- **In which shares**: even ones. A ring takes as long as its largest share, and what is only stored takes no time
  to compute. Devices without a share of the work store nothing.
- **How far ahead** they are gathered, the schedule's prefetch distance (:mod:`hetspmd.program.schedule`): far
  enough that the links are busy while large layers compute, not so far that what is needed soon waits behind what
  is needed late.

A derived program computes by the same triples; the search, confined to them, chooses its collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StepModel
from hetspmd.errors import InfeasibleError, SearchError
from hetspmd.optimize.candidate import Candidate, Evaluator
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.thresholds import Thresholds
from hetspmd.placement import REPLICATE, Placement, is_sharded, shard
from hetspmd.program.lengths import Lengths, Matrix, apportion
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints, RowFilter
from hetspmd.search.search import stored_forms


def prefetched(
    ctx: Synthesis, costs: CostModel, best: Candidate, candidates: Iterable[Candidate]
) -> list[Candidate]:
    """Candidates like ``best`` with parameters stored in shards, and such as they, it and the best of
    ``candidates`` with gathers further ahead, on the same devices."""
    if costs.world == 1 or best.seconds * (1 - ctx.thresholds.hidden_gain) <= best.stages.lower_bound:
        return []
    derived = list(_derived(ctx, costs, best))
    most = best.seconds * (1 + ctx.thresholds.near_best_prefetch)
    near = [
        c
        for c in (best, *derived, *candidates)
        if c.stages.lower_bound < best.seconds and c.seconds <= most and c.fits
    ]
    near.sort(key=lambda candidate: candidate.seconds)
    different = _different(near)[: ctx.thresholds.prefetch_candidates]
    ahead = (further(ctx, costs, candidate) for candidate in different)
    return derived + [candidate for candidate in ahead if candidate is not None]


def in_shards(ctx: Synthesis, costs: CostModel, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates like these with even shards and more parameters in shards, whether or not the forward hides their
    gathers: they hold fewer bytes."""
    return [
        derived for c in _different(list(candidates)) for derived in _derived(ctx, costs, c, hidden=False)
    ]


def storage_axes(theory: Theory, program: Program) -> frozenset[int]:
    """Logical axes along which no computation of the program is divided: shards along them are only stored, viewed
    and sent."""
    graph, axes = theory.graph, theory.axes
    sources = graph.sources | graph.second_reads.keys()
    used: set[int] = set()
    for step in program.steps:
        if isinstance(step, Compute) and step.instruction not in sources:
            instruction = graph.instructions[step.instruction]
            forms = zip(
                (*instruction.inputs, *instruction.outputs), (*step.row.pre, *step.row.post), strict=True
            )
            for tensor, form in forms:
                if tensor >= 0 and is_sharded(form) and (axis := axes.sharded(tensor, form)) is not None:
                    used.add(axis.id)
    return frozenset(axis.id for axis in axes.axes) - used


def stored_evenly(
    theory: Theory,
    lengths: Lengths,
    ratios: Matrix,
    free: frozenset[int],
    weights: Sequence[float] | None = None,
) -> Lengths:
    """``lengths`` with even shares of the axes ``free``, or such as these ``weights``, for all devices that have a
    share of the axis's segment."""
    weights = weights or [1.0] * lengths.world
    shares = [tuple(w * (share > 0) for w, share in zip(weights, row, strict=True)) for row in ratios]

    @cache
    def even(units: int, segment: int) -> tuple[int, ...]:
        return apportion(units, shares[segment])

    units = tuple(
        even(axis.units, axis.segment) if axis.id in free else own
        for axis, own in zip(theory.axes.axes, lengths.units, strict=True)
    )
    return Lengths(lengths.world, units)


def _derived(
    ctx: Synthesis, costs: CostModel, candidate: Candidate, *, hidden: bool = True
) -> Iterable[Candidate]:
    """Candidates like this one: with even shards, and with more parameters in shards. ``hidden``: the latter only
    where the links have time for it while the forward runs."""
    theory, rows = ctx.theory, candidate.result.rows
    free = storage_axes(theory, candidate.program)
    stored = stored_forms(theory, rows)
    lengths = stored_evenly(theory, candidate.lengths, candidate.ratios, free)
    sharded = [a for t, form in stored.items() if is_sharded(form) and (a := theory.axes.sharded(t, form))]
    evened = any(lengths.units[axis.id] != candidate.lengths.units[axis.id] for axis in sharded)
    whole = [t for t, form in stored.items() if form == REPLICATE and t not in ctx.constraints.forms]
    divided = (
        divisible(theory, whole, free, candidate.lengths.world, ctx.thresholds.even_shard)
        if not hidden or _idle(costs, candidate) >= ctx.thresholds.hidden_gain
        else {}
    )
    seen = set() if evened else {frozenset[int]()}
    alike = ctx.searcher.space.within(Constraints(ctx.constraints.forms, like(theory, rows)))
    for part in (*ctx.thresholds.sharded_parts, 0.0):
        last = _last(ctx, divided, part)
        if last in seen:
            continue
        seen.add(last)
        try:
            within = alike.storing({**stored, **{t: divided[t] for t in last}})
            result = ctx.search(costs, lengths, within=within)
        except (InfeasibleError, SearchError):
            continue
        # Its bound is of programs of its kind.
        stored_as = f"{len(last)} more parameters in shards" if last else "parameters in even shards"
        reason = f"{stored_as}, else as {candidate.reason}"
        yield Evaluator(ctx, costs, result, candidate.active, None, reason)(candidate.ratios, lengths)


def _idle(costs: CostModel, candidate: Candidate) -> float:
    """The part of the step in which the forward runs and the links are idle."""
    run = candidate.step.streams.run(costs.shares(candidate.lengths))
    forward = float(run.forward.max())
    busy = sum(end - start for start, end in zip(run.starts, run.ends, strict=True) if end <= forward)
    return (forward - busy) / candidate.seconds


def divisible(
    theory: Theory, whole: Iterable[int], free: frozenset[int], world: int, even: float
) -> dict[int, Placement]:
    """Of the parameters those that can be divided along free axes, and the form: along the first dim of which the
    largest shard is about as small as any (slices along dim 0 need not be copied), otherwise along the one with
    the smallest. ``even``: by which part a largest shard may be larger than the mean and counts as even."""
    placements: dict[int, Placement] = {}
    for tensor in whole:
        dims = range(len(theory.graph.tensors[tensor].shape))
        units = {d: a.units for d in dims if (a := theory.axes.axis(tensor, d)) is not None and a.id in free}
        over = {d: max(-(-n // world) * world / n - 1, even) for d, n in units.items() if n >= world}
        if over:
            placements[tensor] = shard(min(over, key=lambda d: (over[d], d)))
    return placements


def _last(ctx: Synthesis, divided: dict[int, Placement], part: float) -> frozenset[int]:
    """Of the parameters those that the forward reads last, with at most ``part`` of their bytes, but not the
    smallest."""
    graph = ctx.theory.graph
    tensors: set[int] = set()
    room = part * sum(graph.tensors[t].nbytes for t in divided)
    for tensor in last_first(ctx.theory, divided, ctx.thresholds.smallest_parameters):
        if (nbytes := graph.tensors[tensor].nbytes) <= room:
            room -= nbytes
            tensors.add(tensor)
    return frozenset(tensors)


def last_first(theory: Theory, parameters: Iterable[int], smallest: float) -> list[int]:
    """The parameters, but for the smallest, with that part of all bytes; what the forward reads last is first."""
    graph = theory.graph
    nbytes = {t: graph.tensors[t].nbytes for t in parameters}
    total, small = sum(nbytes.values()), 0
    rest = sorted(nbytes, key=lambda t: (nbytes[t], t))
    while rest and small + nbytes[rest[0]] <= smallest * total:
        small += nbytes[rest.pop(0)]
    return sorted(rest, key=lambda t: (-min(graph.consumers.get(t, (0,))), t))


def like(theory: Theory, rows: Sequence[int]) -> RowFilter:
    """The triples of a program, any of what is given to it and of second readings."""
    graph = theory.graph
    own = [theory.rows[i][k] for i, k in enumerate(rows)]

    def allowed(instruction: int, row: Triple, _axis: int | None) -> bool:
        any_row = graph.instructions[instruction].is_source or instruction in graph.second_reads
        return any_row or row is own[instruction]

    return allowed


def _different(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates without those whose program and lengths another before them has."""
    first: dict[object, Candidate] = {}
    for c in candidates:
        first.setdefault((c.result.rows, c.result.moves, c.lengths), c)
    return list(first.values())


def further(ctx: Synthesis, costs: CostModel, candidate: Candidate) -> Candidate | None:
    """The candidate with its gathers as far ahead as is best, of what fits; None where the distance of one is."""
    if candidate.evaluator.prefetch_distance != 1:
        return None
    limited = any(math.isfinite(device.memory) for device in costs.cluster.devices)

    def fits(distance: int) -> bool:
        return not limited or _ahead(ctx, costs, candidate, distance).fits

    with ctx.clock("balance"):
        distance = best_distance(candidate.step, candidate.lengths, ctx.thresholds, fits)
    return None if distance == 1 else _ahead(ctx, costs, candidate, distance)


def best_distance(
    step: StepModel, lengths: Lengths, thresholds: Thresholds, fits: Callable[[int], bool]
) -> int:
    """How many groups ahead the gathers of a step are best, of the distances that fit. ``step`` has them one group
    ahead."""
    graph = step.model.theory.graph
    parameters = {p.tensor for p in graph.parameters} | {
        graph.instructions[i].outputs[0] for i in graph.second_reads
    }
    sent = sum(isinstance(s, Communicate) and s.tensor in parameters for s in step.program.steps)
    distance, waited = 1, 0
    if sent < 2:
        return distance
    shares = step.model.shares(lengths)
    least = step.streams.seconds(shares)
    for groups in thresholds.prefetch_distances:
        if waited == thresholds.distances_without_gain or groups > sent:
            break
        seconds = step.prefetching(groups).streams.seconds(shares)
        gains = seconds < least and fits(groups)
        waited = 0 if gains else waited + 1
        if gains:
            least, distance = seconds, groups
    return distance


def _ahead(ctx: Synthesis, costs: CostModel, candidate: Candidate, distance: int) -> Candidate:
    """The candidate with its gathers so many groups ahead."""
    searched_at = candidate.evaluator.searched_at
    reason = f"gathers {distance} ahead, else as {candidate.reason}"
    evaluator = Evaluator(ctx, costs, candidate.result, candidate.active, searched_at, reason, distance)
    return evaluator(candidate.ratios, candidate.lengths)
