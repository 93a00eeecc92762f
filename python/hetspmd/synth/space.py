"""The search space: which triples and collectives a program may use, and the problem text for the core.

One variable per instruction; its value is a row and, for each output, at most one communication (HAP 4.5).
:func:`search_space` keeps what can matter: rows that the constraints allow, communications from a form that
the producer can make to one that a consumer or a requirement can use. :meth:`Space.problem` adds the costs
at given lengths, in whole units of :func:`cost_unit`; of a padded and a grouped implementation only the cheaper
remains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hetspmd.errors import InfeasibleError
from hetspmd.forms import IDENTITY, Form, all_gather, form_text
from hetspmd.rules.theory import Theory
from hetspmd.synth.constraints import Constraints, batch_axes
from hetspmd.synth.program import Kind, communications
from hetspmd.trace.graph import PARAMETER

PICOSECONDS = 1e12
"""Of a second; the unit of costs in the core, but for graphs that take days."""

_LARGEST_TOTAL = 2.0**56
"""The core adds costs in 64-bit integers, with room to spare for its bounds."""

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

    def problem(
        self, row_seconds: Sequence[Sequence[float]], move_seconds: Sequence[Sequence[float]],
        per_second: float = PICOSECONDS,
    ) -> tuple[str, tuple[tuple[int, ...], ...]]:  # fmt: skip
        """The core's problem text, and for each tensor the indices of the moves kept in it (the core numbers
        the tensors that have a producer in their order here; constants' private tensors have none).

        ``row_seconds[i][k]`` is the cost of row ``theory.rows[i][k]`` and ``move_seconds[t][k]`` that of
        ``moves[t][k]``, in seconds; ``per_second`` units of cost make a second (:func:`cost_unit`).
        """
        graph = self.theory.graph
        kept: list[tuple[int, ...]] = []
        tensors = []
        number = {t: n for n, t in enumerate(sorted(graph.producers))}
        for t, moves in enumerate(self.moves):
            if t not in number:
                kept.append(())
                continue
            costs = [round(s * per_second) for s in move_seconds[t]]
            best: dict[tuple[Form, Form], int] = {}
            for k, (source, target, _) in enumerate(moves):
                key = (source, target)
                if key not in best or costs[k] < costs[best[key]]:
                    best[key] = k
            kept.append(tuple(best.values()))
            texts = [[*moves[k], costs[k]] for k in best.values()]
            tensors.append({"name": graph.tensors[t].name, "moves": texts})
        instructions = []
        for i, instruction in enumerate(graph.instructions):
            rows = [
                {
                    "pre": self.theory.rows[i][k].pre,
                    "post": [
                        f
                        for f, t in zip(self.theory.rows[i][k].post, instruction.outputs, strict=True)
                        if t >= 0
                    ],
                    "cost": round(row_seconds[i][k] * per_second),
                }
                for k in self.rows[i]
            ]
            instructions.append(
                {
                    "name": instruction.name,
                    "inputs": [number[t] for t in instruction.inputs],
                    "outputs": [number[t] for t in instruction.outputs if t >= 0],
                    "rows": rows,
                }
            )
        document = {
            "version": 1,
            "tensors": tensors,
            "instructions": instructions,
            "requirements": [{"tensor": number[r.tensor], "any_of": r.any_of} for r in self.requirements],
            "ties": [{"parameter": number[p], "gradient": number[g]} for p, g in self.ties],
        }
        return json.dumps(document, separators=(",", ":")), tuple(kept)


def cost_unit(row_seconds: Sequence[Sequence[float]], move_seconds: Sequence[Sequence[float]]) -> float:
    """How many units of cost make a second: picoseconds, or coarser where a program with the dearest value of every
    instruction would not fit in 64 bits (a device of a few FLOP/s)."""
    dearest = sum(max(seconds, default=0.0) for seconds in (*row_seconds, *move_seconds))
    return min(PICOSECONDS, _LARGEST_TOTAL / dearest) if dearest > 0 else PICOSECONDS


def search_space(theory: Theory, constraints: Constraints, *, rows_of_outputs: bool = True) -> Space:
    """The space that ``constraints`` leave.

    Every device is given the whole batch; a form that is asked of an input is the one in which its readers take
    it. An output other than the loss is needed whole, or (``rows_of_outputs``) as rows: sharded along dim 0 where
    that counts samples. Raises InfeasibleError if an instruction has no row left.
    """
    graph = theory.graph
    batch = {i.tensor: constraints.forms[i.tensor] for i in graph.inputs if i.tensor in constraints.forms}
    rows: list[tuple[int, ...]] = []
    for i, instruction in enumerate(graph.instructions):
        keep = []
        for k, row in enumerate(theory.rows[i]):
            if constraints.row_filter is not None and not constraints.row_filter(
                i, row, theory.row_axes[i][k]
            ):
                continue
            if any(batch.get(t, form) != form for t, form in zip(instruction.inputs, row.pre, strict=True)):
                continue
            if (
                instruction.op == PARAMETER
                and constraints.forms.get(instruction.outputs[0], row.post[0]) != row.post[0]
            ):
                continue
            keep.append(k)
        if not keep:
            wanted = constraints.forms.get(instruction.outputs[0])
            asked = f" in the form {form_text(wanted)}" if wanted is not None else ""
            raise InfeasibleError(
                f"{instruction.name}: no triple is left{asked}; loosen the constraints on it"
            )
        rows.append(tuple(keep))
    requirements = _requirements(theory, constraints, rows_of_outputs)
    ties = tuple((p.tensor, p.gradient) for p in graph.parameters if p.gradient is not None)
    moves = _moves(theory, rows, requirements, ties)
    return Space(theory, tuple(rows), moves, requirements, ties)


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
    for e in graph.tensors:
        dims = tuple(
            d for d in range(len(e.shape)) if (a := theory.axes.axis(e.id, d)) is not None and a.units >= 2
        )
        found.append(
            tuple(
                (source, target, kind)
                for source, target, kind in communications(dims, summable=e.dtype != "bool")
                if source in produced[e.id]
                and (target in wanted[e.id] or (target == IDENTITY and wanted[e.id]))
            )
        )
    return tuple(found)
