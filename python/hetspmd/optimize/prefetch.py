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
- **How far ahead** they are gathered (:attr:`~hetspmd.program.program.Program.ahead`): far enough that the links
  are busy while large layers compute, not so far that what is needed soon waits behind what is needed late.

A derived program computes by the same triples; the search, confined to them, chooses its collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Final, Protocol

from hetspmd.cost.model import CostModel
from hetspmd.errors import InfeasibleError, SearchError
from hetspmd.optimize.candidate import Context, Judge, Pair
from hetspmd.placement import REPLICATE, Placement, is_sharded, shard
from hetspmd.program.lengths import Lengths, Matrix, apportion
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.rules.rule import Row
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints, RowFilter
from hetspmd.search.search import Found, Searcher, stored_forms
from hetspmd.search.space import Space

__all__ = [
    "AHEAD",
    "PARTS",
    "WORTH",
    "Searching",
    "divisible",
    "gathered_ahead",
    "last_first",
    "like",
    "storage_axes",
    "stored_evenly",
]

AHEAD: Final = (2, 3, 4, 6, 8, 12, 16)
"""Distances that are tried, beside one."""

PATIENCE: Final = 3
"""Distances in a row that need not gain anything."""

PARTS: Final = (1.0, 0.85, 0.7, 0.5)
"""Parts of the parameters' bytes that are stored in shards."""

SMALL: Final = 0.01
"""The smallest parameters, with this part of all bytes, stay as they are."""

WORTH: Final = 0.03
"""The part of the step that must be left to gain: between the step and what the devices compute or the links carry,
and in which the links are idle while the forward runs."""

EVEN: Final = 1 / 32
"""The part by which the largest shard may be larger than the mean to be as small as any need be."""

NEAR: Final = 0.25
"""Pairs whose gathers may gain are at most this part slower than the best."""

MOST: Final = 4
"""Pairs of which distances are tried."""


class Searching(Context, Protocol):
    """Where programs are searched."""

    searcher: Searcher

    def _search(
        self, costs: CostModel, lengths: Lengths, start: Found | None, within: Space | None = None
    ) -> Found: ...


def gathered_ahead(of: Searching, costs: CostModel, best: Pair, pairs: Iterable[Pair]) -> list[Pair]:
    """Pairs like ``best`` with parameters stored in shards, and such as they, it and the best of ``pairs`` with
    gathers further ahead, on the same devices."""
    if costs.world == 1 or best.seconds * (1 - WORTH) <= best.stages.floor:
        return []
    found = list(_derived(of, costs, best))
    most = best.seconds * (1 + NEAR)
    near = [
        p for p in (best, *found, *pairs) if p.stages.floor < best.seconds and p.seconds <= most and p.fits
    ]
    near.sort(key=lambda pair: pair.seconds)
    further = (_further(of, costs, pair) for pair in _different(near)[:MOST])
    return found + [pair for pair in further if pair is not None]


def storage_axes(theory: Theory, program: Program) -> frozenset[int]:
    """Logical axes along which no computation of the program is divided: shards along them are only stored, viewed
    and sent."""
    graph, axes = theory.graph, theory.axes
    given = graph.sources | graph.second_reads.keys()
    used: set[int] = set()
    for step in program.steps:
        if isinstance(step, Compute) and step.instruction not in given:
            instruction = graph.instructions[step.instruction]
            forms = zip(
                (*instruction.inputs, *instruction.outputs), (*step.row.pre, *step.row.post), strict=True
            )
            for tensor, form in forms:
                if tensor >= 0 and is_sharded(form) and (axis := axes.sharded(tensor, form)) is not None:
                    used.add(axis.id)
    return frozenset(axis.id for axis in axes.axes) - used


def stored_evenly(theory: Theory, lengths: Lengths, ratios: Matrix, free: frozenset[int]) -> Lengths:
    """``lengths`` with even shares of the axes ``free`` for all devices that have a share of the axis's segment."""
    shares = [tuple(float(share > 0) for share in row) for row in ratios]

    @cache
    def even(units: int, segment: int) -> tuple[int, ...]:
        return apportion(units, shares[segment])

    units = tuple(
        even(axis.units, axis.segment) if axis.id in free else own
        for axis, own in zip(theory.axes.axes, lengths.units, strict=True)
    )
    return Lengths(lengths.world, units)


def _derived(of: Searching, costs: CostModel, pair: Pair) -> Iterable[Pair]:
    """Pairs like this one: with even shards, and with more parameters in shards where the links have time for it
    while the forward runs."""
    theory, rows = of.theory, pair.found.rows
    free = storage_axes(theory, pair.program)
    stored = stored_forms(theory, rows)
    lengths = stored_evenly(theory, pair.lengths, pair.ratios, free)
    sharded = [a for t, form in stored.items() if is_sharded(form) and (a := theory.axes.sharded(t, form))]
    evened = any(lengths.units[axis.id] != pair.lengths.units[axis.id] for axis in sharded)
    whole = [t for t, form in stored.items() if form == REPLICATE and t not in of.fixed.forms]
    divided = divisible(theory, whole, free, pair.lengths.world) if _idle(costs, pair) >= WORTH else {}
    seen = set() if evened else {frozenset[int]()}
    for part in (*PARTS, 0.0):
        last = _last(theory, divided, part)
        if last in seen:
            continue
        seen.add(last)
        forms = {**of.fixed.forms, **stored, **{t: divided[t] for t in last}}
        within = of.searcher.space.within(Constraints(forms, like(theory, rows)))
        try:
            found = of._search(costs, lengths, None, within)
        except (InfeasibleError, SearchError):
            continue
        # Its bound is of programs of its kind.
        yield Judge(of, costs, found, pair.active, None)(pair.ratios, lengths)


def _idle(costs: CostModel, pair: Pair) -> float:
    """The part of the step in which the forward runs and the links are idle."""
    run = pair.judge.step.streams.run(costs.shares(pair.lengths))
    forward = float(run.forward.max())
    busy = sum(end - start for start, end in zip(run.starts, run.ends, strict=True) if end <= forward)
    return (forward - busy) / pair.seconds


def divisible(theory: Theory, whole: Iterable[int], free: frozenset[int], world: int) -> dict[int, Placement]:
    """Of the parameters those that can be divided along free axes, and the form: along the first dim of which the
    largest shard is about as small as any (slices along dim 0 need not be copied), otherwise along the one with
    the smallest."""
    found: dict[int, Placement] = {}
    for tensor in whole:
        dims = range(len(theory.graph.tensors[tensor].shape))
        units = {d: a.units for d in dims if (a := theory.axes.axis(tensor, d)) is not None and a.id in free}
        over = {d: max(-(-n // world) * world / n - 1, EVEN) for d, n in units.items() if n >= world}
        if over:
            found[tensor] = shard(min(over, key=lambda d: (over[d], d)))
    return found


def _last(theory: Theory, divided: dict[int, Placement], part: float) -> frozenset[int]:
    """Of the parameters those that the forward reads last, with at most ``part`` of their bytes, but not the
    smallest."""
    graph = theory.graph
    found: set[int] = set()
    room = part * sum(graph.tensors[t].nbytes for t in divided)
    for tensor in last_first(theory, divided):
        if (nbytes := graph.tensors[tensor].nbytes) <= room:
            room -= nbytes
            found.add(tensor)
    return frozenset(found)


def last_first(theory: Theory, parameters: Iterable[int], smallest: float = SMALL) -> list[int]:
    """The parameters, but for the smallest, with that part of all bytes; what the forward reads last is first."""
    graph = theory.graph
    nbytes = {t: graph.tensors[t].nbytes for t in parameters}
    total, small = sum(nbytes.values()), 0
    left = sorted(nbytes, key=lambda t: (nbytes[t], t))
    while left and small + nbytes[left[0]] <= smallest * total:
        small += nbytes[left.pop(0)]
    return sorted(left, key=lambda t: (-min(graph.consumers.get(t, (0,))), t))


def like(theory: Theory, rows: Sequence[int]) -> RowFilter:
    """The triples of a program, any of what is given to it and of second readings."""
    graph = theory.graph
    own = [theory.rows[i][k] for i, k in enumerate(rows)]

    def allowed(instruction: int, row: Row, _axis: int | None) -> bool:
        given = graph.instructions[instruction].is_source or instruction in graph.second_reads
        return given or row is own[instruction]

    return allowed


def _different(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs without those whose program and lengths another before them has."""
    first: dict[object, Pair] = {}
    for pair in pairs:
        first.setdefault((pair.found.rows, pair.found.moves, pair.lengths), pair)
    return list(first.values())


def _further(of: Searching, costs: CostModel, pair: Pair) -> Pair | None:
    """The pair with its gathers as far ahead as is best; None where the distance of one is."""
    graph = of.theory.graph
    given = {p.tensor for p in graph.parameters} | {
        graph.instructions[i].outputs[0] for i in graph.second_reads
    }
    sent = sum(isinstance(s, Communicate) and s.tensor in given for s in pair.program.steps)
    if sent < 2 or pair.program.ahead != 1:
        return None
    best, distance, waited = pair.seconds, 1, 0
    step = pair.judge.step
    shares = costs.shares(pair.lengths)
    for groups in AHEAD:
        if waited == PATIENCE or groups > sent:
            break
        with of.clock("balance"):
            seconds = step.ahead(groups).streams.seconds(shares)
        waited = 0 if seconds < best else waited + 1
        if seconds < best:
            best, distance = seconds, groups
    if distance == 1:
        return None
    found = replace(pair.found, program=replace(pair.found.program, ahead=distance))
    return Judge(of, costs, found, pair.active, pair.judge.searched_at)(pair.ratios, pair.lengths)
