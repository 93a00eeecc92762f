"""The search space: which triples and collectives a program may use, and the problem text for the core.

One variable per instruction; its value is a row and, for each output, at most one communication (HAP 4.5).
:func:`search_space` keeps what can matter: rows that the constraints allow, communications from a form that
the producer can make to one that a consumer or a requirement can use. Costs come later
(:mod:`hetspmd.synth.pricing`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetspmd.errors import InfeasibleError
from hetspmd.forms import IDENTITY, Form, all_gather, form_text, is_before_cut, sharded_dim
from hetspmd.rules.rule import Row
from hetspmd.rules.theory import Theory
from hetspmd.synth.constraints import Constraints, batch_axes
from hetspmd.synth.program import Kind, communications
from hetspmd.trace.graph import PARAMETER

Move = tuple[Form, Form, Kind]


@dataclass(frozen=True)
class Requirement:
    """At the end of the program the tensor must be available in one of ``any_of``."""

    tensor: int
    any_of: tuple[Form, ...]


@dataclass(frozen=True)
class Space:
    """``rows[i]``: indices into ``theory.rows[i]`` that may be used; ``moves[t]``: communications of a tensor;
    ``ties``: (parameter tensor, gradient tensor) that must agree in form."""

    theory: Theory
    rows: tuple[tuple[int, ...], ...]
    moves: tuple[tuple[Move, ...], ...]
    requirements: tuple[Requirement, ...]
    ties: tuple[tuple[int, int], ...]
    rows_of_outputs: bool = True

    def within(self, constraints: Constraints) -> Space:
        """The part of the space that ``constraints``, which hold this space's and more, leave.

        It keeps the communications, of which some may no longer matter. Raises InfeasibleError if an instruction
        has no row left.
        """
        requirements = _requirements(self.theory, constraints, self.rows_of_outputs)
        rows = tuple(
            tuple(k for k in few if k in own)
            for few, own in zip(_rows(self.theory, constraints), map(frozenset, self.rows), strict=True)
        )
        if not all(rows):
            at = rows.index(())
            name = self.theory.graph.instructions[at].name
            raise InfeasibleError(f"constraints leave no triple of {name}")
        return replace(self, rows=rows, requirements=requirements)

    def structure(self) -> str:
        """The core's problem text without costs (rust/core/src/problem.rs).

        Tensors that have a producer are numbered in their order (constants' private tensors have none). A pair
        of forms is one move, whichever collective is the cheaper for it. The second reading of a parameter
        (:attr:`Graph.second_reads`) has two rows for each triple: the first takes what is stored, the second
        what has been communicated for the forward and kept.
        """
        graph = self.theory.graph
        number = {t: n for n, t in enumerate(sorted(graph.producers))}
        tensors = []
        for t in number:
            text = ",".join(f'[{source},{target},"{kind}",0]' for source, target, kind in self.pairs[t])
            keep = ",".join(f"[{form},0]" for form in self.forms[t])
            tensors.append(f'{{"name":{json.dumps(graph.tensors[t].name)},"moves":[{text}],"keep":[{keep}]}}')
        known: dict[tuple[tuple[Row, ...], tuple[int, ...], tuple[int, ...], bool], str] = {}
        instructions = []
        for i, instruction in enumerate(graph.instructions):
            again = i in graph.second_reads
            places = tuple(n for n, t in enumerate(instruction.outputs) if t >= 0)
            key = (self.theory.rows[i], self.rows[i], places, again)
            rows = known.get(key)
            if rows is None:
                rows = known[key] = ",".join(
                    f'{{"pre":{list(row.pre)},"post":{[row.post[n] for n in places]},"cost":0{direct}}}'
                    for row in (self.theory.rows[i][k] for k in self.rows[i])
                    for direct in ((',"direct":true', "") if again else ("",))
                )
            inputs = [number[t] for t in instruction.inputs]
            outputs = [number[t] for t in instruction.outputs if t >= 0]
            name = json.dumps(instruction.name)
            instructions.append(f'{{"name":{name},"inputs":{inputs},"outputs":{outputs},"rows":[{rows}]}}')
        requirements = [{"tensor": number[r.tensor], "any_of": r.any_of} for r in self.requirements]
        ties = [{"parameter": number[p], "gradient": number[g]} for p, g in self.ties]
        return (
            f'{{"version":1,"tensors":[{",".join(tensors)}],"instructions":[{",".join(instructions)}],'
            f'"requirements":{json.dumps(requirements)},"ties":{json.dumps(ties)}}}'
        )

    @cached_property
    def pairs(self) -> tuple[tuple[Move, ...], ...]:
        """Of the moves of each tensor the first for each pair of forms."""
        found = []
        for moves in self.moves:
            first: dict[tuple[Form, Form], Move] = {}
            for move in moves:
                first.setdefault(move[:2], move)
            found.append(tuple(first.values()))
        return tuple(found)

    @cached_property
    def forms(self) -> tuple[tuple[Form, ...], ...]:
        """The forms in which each tensor may be held: as produced and as communicated."""
        graph = self.theory.graph
        found: list[set[Form]] = [{target for _, target, _ in moves} for moves in self.moves]
        for i, instruction in enumerate(graph.instructions):
            for n, t in enumerate(instruction.outputs):
                if t >= 0:
                    found[t].update(self.theory.rows[i][k].post[n] for k in self.rows[i])
        return tuple(tuple(sorted(forms)) for forms in found)


def search_space(theory: Theory, constraints: Constraints, *, rows_of_outputs: bool = True) -> Space:
    """The space that ``constraints`` leave.

    Every device is given the whole batch; a form that is asked of an input is the one in which its readers take
    it. An output other than the loss is needed whole, or (``rows_of_outputs``) as rows: sharded along dim 0 where
    that counts samples. Raises InfeasibleError if an instruction has no row left.
    """
    rows = _rows(theory, constraints)
    requirements = _requirements(theory, constraints, rows_of_outputs)
    ties = tuple((p.tensor, p.gradient) for p in theory.graph.parameters if p.gradient is not None)
    moves = _moves(theory, rows, requirements, ties)
    return Space(theory, rows, moves, requirements, ties, rows_of_outputs)


def _rows(theory: Theory, constraints: Constraints) -> tuple[tuple[int, ...], ...]:
    """Per instruction the rows that the constraints allow."""
    graph = theory.graph
    batch = {i.tensor: constraints.forms[i.tensor] for i in graph.inputs if i.tensor in constraints.forms}
    rows: list[tuple[int, ...]] = []
    for i, instruction in enumerate(graph.instructions):
        keep: Sequence[int] = range(len(theory.rows[i]))
        allowed = constraints.row_filter
        if allowed is not None:
            axes = theory.row_axes[i]
            keep = [k for k in keep if allowed(i, theory.rows[i][k], axes[k])]
        if not batch.keys().isdisjoint(instruction.inputs):
            keep = [
                k for k in keep
                if all(batch.get(t, f) == f for t, f in zip(instruction.inputs, theory.rows[i][k].pre, strict=True))
            ]  # fmt: skip
        if instruction.op == PARAMETER and instruction.outputs[0] in constraints.forms:
            wanted = constraints.forms[instruction.outputs[0]]
            keep = [k for k in keep if theory.rows[i][k].post[0] == wanted]
        if not keep:
            form = constraints.forms.get(instruction.outputs[0])
            asked = f" in the form {form_text(form)}" if form is not None else ""
            raise InfeasibleError(
                f"{instruction.name}: no triple is left{asked}; loosen the constraints on it"
            )
        rows.append(tuple(keep))
    return tuple(rows)


def _requirements(theory: Theory, constraints: Constraints, rows_of_outputs: bool) -> tuple[Requirement, ...]:
    graph = theory.graph
    batch = batch_axes(theory)
    found: dict[int, Requirement] = {}
    if graph.loss is not None:
        found[graph.loss] = Requirement(graph.loss, (IDENTITY,))
    for buffer in graph.buffers:
        if buffer.updated is not None:
            found[buffer.updated] = Requirement(buffer.updated, (IDENTITY,))
    for output in graph.outputs:
        t = output.tensor
        if t is None or t in found:
            continue
        axis = theory.axes.axis(t, 0) if graph.tensors[t].shape else None
        by_rows = rows_of_outputs and axis is not None and axis.id in batch and axis.units >= 2
        wanted = constraints.forms.get(t)
        forms = (wanted,) if wanted is not None else (IDENTITY, all_gather(0)) if by_rows else (IDENTITY,)
        found[t] = Requirement(t, forms)
    return tuple(found.values())


def _moves(
    theory: Theory, rows: Sequence[tuple[int, ...]], requirements: Sequence[Requirement],
    ties: Sequence[tuple[int, int]],
) -> tuple[tuple[Move, ...], ...]:  # fmt: skip
    graph = theory.graph
    produced: list[set[Form]] = [set() for _ in graph.tensors]
    wanted: list[set[Form]] = [set() for _ in graph.tensors]
    for i, instruction in enumerate(graph.instructions):
        for k in rows[i]:
            row = theory.rows[i][k]
            for t, form in zip(instruction.outputs, row.post, strict=True):
                if t >= 0:
                    produced[t].add(form)
            for t, form in zip(instruction.inputs, row.pre, strict=True):
                wanted[t].add(form)
    for requirement in requirements:
        wanted[requirement.tensor].update(requirement.any_of)
    for parameter, gradient in ties:
        wanted[gradient].update(produced[parameter])
    found: list[tuple[Move, ...]] = []
    known: dict[tuple[object, ...], tuple[Move, ...]] = {}
    for e in graph.tensors:
        dims = tuple(
            d for d in range(len(e.shape)) if (a := theory.axes.axis(e.id, d)) is not None and a.units >= 2
        )
        copied = tuple(sorted(sharded_dim(form) for form in produced[e.id] if is_before_cut(form)))
        key = (dims, copied, e.dtype != "bool", frozenset(produced[e.id]), frozenset(wanted[e.id]))
        moves = known.get(key)
        if moves is None:
            moves = known[key] = tuple(
                (source, target, kind)
                for source, target, kind in communications(dims, summable=e.dtype != "bool", copied=copied)
                if source in produced[e.id]
                and (target in wanted[e.id] or (target == IDENTITY and wanted[e.id]))
            )
        found.append(moves)
    return tuple(found)
