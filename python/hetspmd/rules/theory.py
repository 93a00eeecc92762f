"""The background theory of a graph: every Hoare triple that a program may use (HAP 4.2, design 4).

:func:`derive` asks the registry for each instruction's rule, joins dimensions to logical axes and writes out
the rows. Rows whose axis has a single unit are dropped: there is nothing to divide.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from hetspmd.errors import MissingRuleError, MissingRuleWarning
from hetspmd.forms import IDENTITY, all_gather
from hetspmd.rules.axes import Axes, factor_members, logical_axes
from hetspmd.rules.registry import rule_for
from hetspmd.rules.rule import Call, OpRule, Row, call_of
from hetspmd.trace.graph import PARAMETER, Graph, Instruction


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
    rows: tuple[tuple[Row, ...], ...]
    row_axes: tuple[tuple[int | None, ...], ...]
    missing: tuple[int, ...]

    @property
    def triples(self) -> int:
        """Number of Hoare triples of computations."""
        return sum(map(len, self.rows))


def derive(graph: Graph, *, strict: bool = False) -> Theory:
    """The theory of ``graph``.

    Raises MissingRuleError under ``strict`` if an op has no rule, RuleError if a rule does not fit its call;
    otherwise warns once (MissingRuleWarning) about all ops without a rule.
    """
    calls: dict[int, Call] = {}
    rules: dict[int, OpRule] = {}
    missing: list[int] = []
    for instruction in graph.instructions:
        if instruction.is_source:
            continue
        call = calls[instruction.id] = call_of(graph, instruction)
        found = rule_for(call)
        if found is None:
            missing.append(instruction.id)
        rules[instruction.id] = found or OpRule()
    if missing:
        _report_missing(graph, missing, strict)
    axes = logical_axes(graph, rules)
    rows: list[tuple[Row, ...]] = []
    row_axes: list[tuple[int | None, ...]] = []
    for instruction in graph.instructions:
        pairs = (
            _source_rows(graph, instruction, axes)
            if instruction.is_source
            else _op_rows(instruction, rules[instruction.id], calls[instruction.id], axes)
        )
        rows.append(tuple(row for row, _ in pairs))
        row_axes.append(tuple(axis for _, axis in pairs))
    return Theory(graph, axes, calls, rules, tuple(rows), tuple(row_axes), tuple(missing))


def _source_rows(graph: Graph, instruction: Instruction, axes: Axes) -> list[tuple[Row, int | None]]:
    """A parameter may be stored whole or sharded; batch, buffers, constants and the tangent are whole."""
    (tensor,) = instruction.outputs
    name = instruction.op.removeprefix("hetspmd.").capitalize()
    rows: list[tuple[Row, int | None]] = [(Row(name, (), (IDENTITY,)), None)]
    if instruction.op == PARAMETER:
        for dim in range(len(graph.tensors[tensor].shape)):
            axis = axes.axis(tensor, dim)
            if axis is not None and axis.units >= 2:
                rows.append((Row(f"{name}-Shard({dim})", (), (all_gather(dim),)), axis.id))
    return rows


def _op_rows(instruction: Instruction, rule: OpRule, call: Call, axes: Axes) -> list[tuple[Row, int | None]]:
    pairs: list[tuple[Row, int | None]] = []
    for row in rule.rows(call):
        if row.factor is None:
            pairs.append((row, None))
            continue
        member = next(iter(factor_members(instruction.inputs, instruction.outputs, rule, row.factor)), None)
        axis = None if member is None else axes.axis(*member)
        if axis is not None and axis.units >= 2:
            pairs.append((row, axis.id))
    return pairs


def _report_missing(graph: Graph, missing: list[int], strict: bool) -> None:
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
