"""The background theory of a graph: every Hoare triple that a program may use (HAP 4.2).

:func:`derive` asks the registry for each instruction's rule, joins dimensions to logical axes and writes out
the rows. Rows whose axis has a single unit are dropped: there is nothing to divide. A rule is a function of
its call alone, so instructions with equal calls (those of equal layers) share one call, one rule and its rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hetspmd.errors import MissingRuleError, MissingRuleWarning
from hetspmd.placement import REPLICATE, before_cut, is_sharded, shard, sharded_dim
from hetspmd.rules.axes import Axes, factor_cuts, logical_axes
from hetspmd.rules.registry import rule_for
from hetspmd.rules.rule import Call, OpRule, Triple, call_of
from hetspmd.trace.collector import collector_paused
from hetspmd.trace.graph import PARAMETER, REBALANCE, Argument, Graph, Instruction, Ref
from hetspmd.trace.values import draws


@dataclass(frozen=True)
class Theory:
    """The triples of a graph.

    ``rows[i]`` are the triples of instruction i, ``row_axes[i][r]`` the logical axis that row r shards (None
    where the whole op runs on every device). ``rules`` and ``calls`` hold what the rows came from, for
    instructions that are no sources. ``missing`` lists instructions without a rule.
    """

    graph: Graph
    axes: Axes
    calls: Mapping[int, Call]
    rules: Mapping[int, OpRule]
    rows: tuple[tuple[Triple, ...], ...]
    row_axes: tuple[tuple[int | None, ...], ...]
    missing: tuple[int, ...]

    @property
    def triples(self) -> int:
        """Number of Hoare triples of computations."""
        return sum(map(len, self.rows))

    @cached_property
    def batch_axes(self) -> frozenset[int]:
        """Logical axes of dim 0 of the inputs, in whatever segment: the samples."""
        inputs = (i.tensor for i in self.graph.inputs if self.graph.tensors[i.tensor].shape)
        axes = (self.axes.axis(tensor, 0) for tensor in inputs)
        groups = {axis.group for axis in axes if axis is not None}
        return frozenset(axis.id for axis in self.axes.axes if axis.group in groups)

    @cached_property
    def deferred(self) -> frozenset[int]:
        """The tensors of which only gradients are made, by views: nothing waits for a collective of theirs before
        the step's end."""
        graph = self.graph
        readers: dict[int, list[int]] = {}
        for instruction in graph.instructions:
            for tensor in instruction.inputs:
                readers.setdefault(tensor, []).append(instruction.id)
        results = set(graph.updates) | {o.tensor for o in graph.outputs} | {graph.loss}
        gradients = {p.gradient for p in graph.parameters if p.gradient is not None}
        tensors: set[int] = set()

        def shows_only(reader: int) -> bool:
            rule = self.rules.get(reader)
            outputs = graph.instructions[reader].outputs
            return rule is not None and rule.alias and all(t in tensors for t in outputs if t >= 0)

        for instruction in reversed(graph.instructions):
            for tensor in instruction.outputs:
                read = readers.get(tensor, ())
                eligible = tensor >= 0 and tensor not in results and (read or tensor in gradients)
                if eligible and all(map(shows_only, read)):
                    tensors.add(tensor)
        return frozenset(tensors)


@dataclass(frozen=True)
class _Kind:
    """What instructions with equal calls have in common."""

    call: Call
    rule: OpRule
    has_rule: bool

    @cached_property
    def rows(self) -> tuple[tuple[Triple, tuple[int, int] | None], ...]:
        """Each row with the first place that its factor cuts, ``(position among inputs then outputs, dim)``;
        rows of a factor that cuts nothing are left out."""
        first = [next(iter(factor_cuts(f)), None) for f in self.rule.factors]
        pairs = [
            (row, None if row.factor is None else first[row.factor]) for row in self.rule.rows(self.call)
        ]
        return tuple((row, place) for row, place in pairs if row.factor is None or place is not None)


def derive(graph: Graph, *, strict: bool = False, quiet: bool = False) -> Theory:
    """The theory of ``graph``.

    Raises MissingRuleError under ``strict`` if an op has no rule, RuleError if a rule does not fit its call;
    otherwise warns once (MissingRuleWarning) about all ops without a rule, if not ``quiet``.
    """
    with collector_paused():
        kinds = _kinds(graph)
        missing = [id_ for id_, kind in kinds.items() if not kind.has_rule]
        theory = _theory(graph, kinds, tuple(missing))
    if not quiet:
        report_missing(theory, strict)
    return theory


def theory_of(graph: Graph, rules: Mapping[int, OpRule]) -> Theory:
    """The theory of ``graph`` by rules given per instruction, for each that is no source. Raises RuleError if one
    does not fit its call."""
    kinds = {}
    for id_, rule in rules.items():
        call = call_of(graph, graph.instructions[id_])
        rule.verify(call)
        kinds[id_] = _Kind(call, rule, True)
    return _theory(graph, kinds, ())


def _theory(graph: Graph, kinds: Mapping[int, _Kind], missing: tuple[int, ...]) -> Theory:
    rules = {id_: kind.rule for id_, kind in kinds.items()}
    axes = logical_axes(graph, rules)
    rows: list[tuple[Triple, ...]] = []
    unique_rows: dict[
        tuple[int, ...], tuple[Triple, ...]
    ] = {}  # by the rows' objects: equal instructions share them
    row_axes: list[tuple[int | None, ...]] = []
    for instruction in graph.instructions:
        if instruction.is_source:
            pairs = _source_rows(graph, instruction, axes)
        else:
            pairs = _op_rows(instruction, kinds[instruction.id], axes)
        if instruction.op == REBALANCE:
            pairs = _copying(pairs, instruction, axes)
        key = tuple([id(row) for row, _ in pairs])
        if key not in unique_rows:
            unique_rows[key] = tuple([row for row, _ in pairs])
        rows.append(unique_rows[key])
        row_axes.append(tuple(axis for _, axis in pairs))
    calls = {id_: kind.call for id_, kind in kinds.items()}
    return Theory(graph, axes, calls, rules, tuple(rows), tuple(row_axes), missing)


def _kinds(graph: Graph) -> dict[int, _Kind]:
    """The kind of every instruction that is no source."""
    types: dict[tuple[tuple[int, ...], str], int] = {}
    type_of = [types.setdefault((t.shape, t.dtype), len(types)) for t in graph.tensors]
    type_of.append(-1)  # of an output that is None: tensor -1
    by_key: dict[tuple[Any, ...], _Kind] = {}
    kinds: dict[int, _Kind] = {}
    for instruction in graph.instructions:
        if instruction.is_source:
            continue
        key = (
            instruction.op,
            _typed(instruction.args),
            _typed(instruction.kwargs),
            tuple([type_of[t] for t in instruction.inputs]),
            tuple([type_of[t] for t in instruction.outputs]),
        )
        kind = by_key.get(key)
        if kind is None:
            call = call_of(graph, instruction)
            rule = rule_for(call)
            kind = by_key[key] = _Kind(call, rule or OpRule(random=draws(instruction.op)), rule is not None)
        kinds[instruction.id] = kind
    return kinds


def _typed(value: Argument) -> Any:
    """A key of an argument: every Ref alike (a call numbers them in order), and numbers with their types,
    since 1, 1.0 and True are equal in Python, and so are 0.0 and -0.0."""
    if isinstance(value, tuple):
        return tuple([_typed(item) for item in value])
    if isinstance(value, Ref):
        return Ref
    kind = type(value)
    return value if kind is int or kind is str else (kind, repr(value))


def _source_rows(graph: Graph, instruction: Instruction, axes: Axes) -> list[tuple[Triple, int | None]]:
    """A parameter may be stored whole or sharded; batch, buffers, constants and the tangent are whole."""
    (tensor,) = instruction.outputs
    name = instruction.op.removeprefix("hetspmd.").capitalize()
    rows: list[tuple[Triple, int | None]] = [(Triple(name, (), (REPLICATE,)), None)]
    if instruction.op == PARAMETER:
        for dim in range(len(graph.tensors[tensor].shape)):
            axis = axes.axis(tensor, dim)
            if axis is not None and axis.units >= 2:
                rows.append((Triple(f"{name}-Shard({dim})", (), (shard(dim),)), axis.id))
    return rows


def _op_rows(instruction: Instruction, kind: _Kind, axes: Axes) -> list[tuple[Triple, int | None]]:
    pairs: list[tuple[Triple, int | None]] = []
    tensors = (*instruction.inputs, *instruction.outputs)
    for row, place in kind.rows:
        if place is None:
            pairs.append((row, None))
            continue
        axis = axes.axis(tensors[place[0]], place[1])
        if axis is not None and axis.units >= 2:
            pairs.append((row, axis.id))
    return pairs


def _copying(
    pairs: list[tuple[Triple, int | None]], instruction: Instruction, axes: Axes
) -> list[tuple[Triple, int | None]]:
    """The rows of a cut: a shard is copied as it is, with the lengths of the segment that it comes from. A dim that
    the copy itself is not divided along is none to copy."""
    (tensor,) = instruction.outputs
    rows: list[tuple[Triple, int | None]] = []
    for row, axis in pairs:
        if not is_sharded(row.post[0]):
            rows.append((row, axis))
            continue
        own, copied = axes.sharded(tensor, row.post[0]), before_cut(sharded_dim(row.post[0]))
        if own is not None and own.units >= 2 and axes.sharded(tensor, copied) is not None:
            rows.append((Triple(row.name, row.pre, (copied,)), axis))
    return rows


def report_missing(theory: Theory, strict: bool = False) -> None:
    """Warn (MissingRuleWarning) of all ops without a rule; MissingRuleError under ``strict``."""
    graph, missing = theory.graph, theory.missing
    if not missing:
        return
    lines = []
    seen: dict[str, int] = {}
    for id_ in missing:
        seen.setdefault(graph.instructions[id_].op, id_)
    for op, id_ in seen.items():
        instruction = graph.instructions[id_]
        count = sum(graph.instructions[i].op == op for i in missing)
        nbytes = sum(
            graph.tensors[t].nbytes
            for i in missing
            if graph.instructions[i].op == op
            for t in (*graph.instructions[i].inputs, *graph.instructions[i].outputs)
            if t >= 0
        )
        lines.append(
            f"  {op} ({count}x, first in {instruction.source or 'the model'}): every device runs it whole and "
            f"moves {nbytes / 1e6:.3g} MB of its tensors in full\n"
            f"    @hetspmd.rule({op!r})\n"
            f"    def _(call):\n"
            f"        return hetspmd.OpRule(factors=(...))  # docs/extending.md"
        )
    text = "ops without a rule run replicated, which is right but not divided:\n" + "\n".join(lines)
    if strict:
        raise MissingRuleError(text)
    warnings.warn(text, MissingRuleWarning, stacklevel=3)
