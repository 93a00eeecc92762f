"""One instruction on an accelerator of a machine: two triples at once.

The machines run a row of the theory, the *outer* one, and the accelerators within a machine another row of the same
instruction, the *inner* one. What a machine runs is a call of its own, with local shapes; an inner row divides that
call. :func:`localize_nested` gives what one accelerator calls:

- equal rows divide the same factor twice: the accelerator holds a part of its machine's units, as one of all
  accelerators side by side would;
- where one of the rows runs the op whole, the other one says all;
- else the call is localized twice. The first rewrite must leave a call of an op with a rule, and that rule must
  have the second row; so the second step is as certain as any. Either row may come first: rewrites that put a
  function in the op's place change what only their own factor changes.

Two rows that cannot be had at once are refused (None), and so are excluded from the search of inner programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetspmd.errors import RuleError
from hetspmd.placement import PARTIAL
from hetspmd.rules.kernels import empty_shards
from hetspmd.rules.registry import rule_for
from hetspmd.rules.rule import (
    SUM,
    Call,
    Factor,
    Local,
    LocalCall,
    OpRule,
    TensorType,
    Triple,
    local_shape,
    localize,
)
from hetspmd.trace.graph import DEVICE, DType, Ref

Units = tuple[int, int]
"""The units ``[start, stop)`` of a row's factor; (0, 0) of a row without one."""


@dataclass(frozen=True, slots=True)
class Level:
    """A row and the units of its factor that are held."""

    row: Triple
    units: Units


def runs_whole(row: Triple) -> bool:
    """Whether the row runs the op as it is on whole tensors."""
    return row.factor is None and PARTIAL not in row.pre and PARTIAL not in row.post


def localize_nested(
    call: Call, rule: OpRule, outer: Level, inner: Level, rank: int, world: int
) -> LocalCall | None:
    """The call of accelerator ``rank`` of ``world`` in all, or None where the rows cannot be had at once.

    With equal rows ``inner.units`` are counted in the whole factor, and lie within ``outer.units``.
    """
    if outer.row == inner.row or runs_whole(outer.row):
        return localize(call, rule, inner.row, rank, world, *inner.units)
    if runs_whole(inner.row):
        return localize(call, rule, outer.row, rank, world, *outer.units)
    if _gives_nothing(call, rule, outer) or _gives_nothing(call, rule, inner):
        shapes = _shapes(call.outputs, "outputs", rule, outer, inner)
        dtypes = tuple(None if t is None else DType(t.dtype) for t in call.outputs)
        return empty_shards, (shapes, dtypes, DEVICE), {}
    for first, second in ((outer, inner), (inner, outer)):
        local_call = _in_turn(call, rule, first, second, rank, world)
        if local_call is not None:
            return local_call
    return None


def composes(call: Call, rule: OpRule, outer: Triple, inner: Triple) -> bool:
    """Whether two rows of a call can be had at once, of parts that are no whole factor."""

    def part(row: Triple) -> Level:
        size = 0 if row.factor is None else rule.factors[row.factor].size
        return Level(row, (0, (size + 1) // 2))

    held = part(outer)
    within = Level(inner, (0, (held.units[1] + 1) // 2)) if inner == outer else part(inner)
    return localize_nested(call, rule, held, within, 0, 4) is not None


def localize_drawn(call: Call, rule: OpRule, levels: Sequence[Level], rank: int, world: int) -> LocalCall:
    """The call of a random op that ``levels`` divide, even where the shard has no elements: what is drawn must be
    drawn by all."""
    shapes = (_shapes(call.inputs, "inputs", rule, *levels), _shapes(call.outputs, "outputs", rule, *levels))
    first = levels[0]
    return Local(call, rule, first.row, rank, world, *first.units, *shapes).default()


def merged(levels: Sequence[Level]) -> list[Level]:
    """The levels that divide anything, from the outermost. Of those with equal rows the innermost stands for all:
    its units lie within theirs."""
    of: dict[Triple, Level] = {}
    for level in levels:
        if not runs_whole(level.row):
            of[level.row] = level
    return list(of.values())


def _factor(rule: OpRule, level: Level) -> Factor | None:
    return None if level.row.factor is None else rule.factors[level.row.factor]


def _gives_nothing(call: Call, rule: OpRule, level: Level) -> bool:
    """Whether a device without units of the row's factor contributes only zeros and shards of no elements, as
    :func:`~hetspmd.rules.rule.localize` says."""
    factor = _factor(rule, level)
    if factor is None or level.units[0] != level.units[1] or SUM in factor.inputs:
        return False
    present = (t is not None for t in call.outputs)
    return not any(here and place is None for here, place in zip(present, factor.outputs, strict=True))


def _shapes(
    types: tuple[TensorType | None, ...], side: str, rule: OpRule, *levels: Level
) -> tuple[tuple[int, ...], ...]:
    """Local shapes of inputs or outputs where all of ``levels`` divide."""
    shapes = []
    for i, type_ in enumerate(types):
        shape = () if type_ is None else type_.shape
        for level in levels:
            factor = _factor(rule, level)
            if factor is not None and type_ is not None:
                start, stop = level.units
                shape = local_shape(shape, getattr(factor, side)[i], stop - start)
        shapes.append(shape)
    return tuple(shapes)


def _in_turn(
    call: Call, rule: OpRule, first: Level, second: Level, rank: int, world: int
) -> LocalCall | None:
    target, args, kwargs = localize(call, rule, first.row, rank, world, *first.units)
    if not isinstance(target, str) or _refs((args, kwargs)) != list(range(len(call.inputs))):
        return None
    inputs = tuple(
        TensorType(shape, t.dtype)
        for shape, t in zip(_shapes(call.inputs, "inputs", rule, first), call.inputs, strict=True)
    )
    outputs = tuple(
        None if t is None else TensorType(shape, t.dtype)
        for shape, t in zip(_shapes(call.outputs, "outputs", rule, first), call.outputs, strict=True)
    )
    part = Call(target, args, kwargs, inputs, outputs)
    try:
        own = rule_for(part)
    except RuleError:
        return None
    if own is None:
        return None
    wanted = _factor(rule, second)
    for row in own.rows(part):
        if (row.pre, row.post) != (second.row.pre, second.row.post):
            continue
        if wanted is None:
            if row.factor is not None:
                continue
        else:
            factor = None if row.factor is None else own.factors[row.factor]
            same = factor is not None and (factor.size, factor.inputs, factor.outputs) == (
                wanted.size,
                wanted.inputs,
                wanted.outputs,
            )
            if not same:
                continue
        return localize(part, own, row, rank, world, *second.units)
    return None


def _refs(value: Any) -> list[int]:
    """The ids of all references, in order."""
    if isinstance(value, Ref):
        return [value.id]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [id_ for item in value for id_ in _refs(item)]
    return []
