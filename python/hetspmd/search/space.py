"""The search space: which triples and collectives a program may use, and the problem text for the core.

One variable per instruction; its value is a row and, for each output, at most one communication (HAP 4.5).
:func:`search_space` keeps what can matter: rows that the constraints allow, communications from a form that
the producer can make to one that a consumer or a requirement can use. Costs come later
(:mod:`hetspmd.search.pricing`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetspmd.cluster.collective_kinds import Kind
from hetspmd.errors import InfeasibleError
from hetspmd.placement import REPLICATE, Placement, is_before_cut, placement_text, shard, sharded_dim
from hetspmd.program.program import Compute, communications
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints
from hetspmd.trace.graph import PARAMETER, Instruction

Move = tuple[Placement, Placement, Kind]


@dataclass(frozen=True)
class Requirement:
    """At the end of the program the tensor must be available in one of ``any_of``."""

    tensor: int
    any_of: tuple[Placement, ...]


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
            own if few == own else tuple(k for k in few if k in own)
            for few, own in zip(_rows(self.theory, constraints), self.rows, strict=True)
        )
        if not all(rows):
            at = rows.index(())
            name = self.theory.graph.instructions[at].name
            raise InfeasibleError(f"constraints leave no triple of {name}")
        return replace(self, rows=rows, requirements=requirements)

    def storing(self, forms: Mapping[int, Placement]) -> Space:
        """The part of the space in which these parameters are stored in these forms; it shares the rows of all
        other instructions.

        Raises InfeasibleError if a parameter has no such row.
        """
        graph, rows = self.theory.graph, list(self.rows)
        for tensor, form in forms.items():
            i = graph.producers[tensor]
            if (i, form) not in self._stored:
                every = self.theory.rows[i]
                self._stored[i, form] = tuple(k for k in rows[i] if every[k].post[0] == form)
            rows[i] = self._stored[i, form]
            if not rows[i]:
                raise no_triple(graph.instructions[i], form)
        return replace(self, rows=tuple(rows))

    def structure(self) -> str:
        """The core's problem text without costs (rust/core/src/problem.rs).

        Tensors that have a producer are numbered in their order (constants' private tensors have none). A pair
        of forms is one move, whichever collective is the cheaper for it. The second reading of a parameter
        (:attr:`Graph.second_reads`) has two rows for each triple: the first takes what is stored, the second
        what has been communicated for the forward and kept.
        """
        graph = self.theory.graph
        number = {t: n for n, t in enumerate(sorted(graph.producers))}
        names = _quoted([graph.tensors[t].name for t in number])
        tensors = []
        texts: dict[tuple[int, tuple[Placement, ...]], str] = {}  # equal tensors share their moves
        for t, name in zip(number, names, strict=True):
            form = id(self.moves[t]), self.forms[t]
            text = texts.get(form)
            if text is None:
                moves = ",".join(f'[{source},{target},"{kind}",0]' for source, target, kind in self.pairs[t])
                keep = ",".join(f"[{form},0]" for form in self.forms[t])
                text = texts[form] = f'"moves":[{moves}],"keep":[{keep}]}}'
            tensors.append(f'{{"name":{name},{text}')
        row_texts: dict[tuple[object, ...], str] = {}
        instructions = []
        names = _quoted([instruction.name for instruction in graph.instructions])
        for i, (instruction, name) in enumerate(zip(graph.instructions, names, strict=True)):
            again = i in graph.second_reads
            places = tuple(n for n, t in enumerate(instruction.outputs) if t >= 0)
            # Equal instructions share the objects of their rows.
            key = (tuple(map(id, self.theory.rows[i])), self.rows[i], places, again)
            rows = row_texts.get(key)
            if rows is None:
                rows = row_texts[key] = ",".join(
                    f'{{"pre":{list(row.pre)},"post":{[row.post[n] for n in places]},"cost":0{direct}}}'
                    for row in (self.theory.rows[i][k] for k in self.rows[i])
                    for direct in ((',"direct":true', "") if again else ("",))
                )
            inputs = [number[t] for t in instruction.inputs]
            outputs = [number[t] for t in instruction.outputs if t >= 0]
            instructions.append(f'{{"name":{name},"inputs":{inputs},"outputs":{outputs},"rows":[{rows}]}}')
        requirements = [{"tensor": number[r.tensor], "any_of": r.any_of} for r in self.requirements]
        ties = [{"parameter": number[p], "gradient": number[g]} for p, g in self.ties]
        return (
            f'{{"version":1,"tensors":[{",".join(tensors)}],"instructions":[{",".join(instructions)}],'
            f'"requirements":{json.dumps(requirements)},"ties":{json.dumps(ties)}}}'
        )

    @cached_property
    def pairs(self) -> tuple[tuple[Move, ...], ...]:
        """Of the moves of each tensor the first for each pair of forms; equal tensors share them."""
        shared_pairs: dict[int, tuple[Move, ...]] = {}
        by_tensor = []
        for moves in self.moves:
            pairs = shared_pairs.get(id(moves))
            if pairs is None:
                first: dict[tuple[Placement, Placement], Move] = {}
                for move in moves:
                    first.setdefault(move[:2], move)
                pairs = shared_pairs[id(moves)] = tuple(first.values())
            by_tensor.append(pairs)
        return tuple(by_tensor)

    @cached_property
    def forms(self) -> tuple[tuple[Placement, ...], ...]:
        """The forms in which each tensor may be held: as produced and as communicated."""
        produced = _produced(self.theory, self.rows)
        shared_forms: dict[tuple[int, frozenset[Placement]], tuple[Placement, ...]] = {}
        by_tensor = []
        for moves, forms in zip(self.moves, produced, strict=True):
            key = id(moves), forms
            if key not in shared_forms:
                shared_forms[key] = tuple(sorted(forms | {target for _, target, _ in moves}))
            by_tensor.append(shared_forms[key])
        return tuple(by_tensor)

    def compute(self, instruction: int, row: int) -> Compute:
        """The step of an instruction by one of its rows; always the same object in all spaces of a theory, so that
        what is told of a step is told once."""
        step = self._computes.get((instruction, row))
        if step is None:
            step = self._computes[instruction, row] = Compute(instruction, self.theory.rows[instruction][row])
        return step

    @cached_property
    def _stored(self) -> dict[tuple[int, Placement], tuple[int, ...]]:
        return {}

    @cached_property
    def _computes(self) -> dict[tuple[int, int], Compute]:
        kept: dict[tuple[int, int], Compute] = vars(self.theory).setdefault("_computes", {})
        return kept


def _quoted(names: list[str]) -> list[str]:
    """Each as JSON text, which has no line breaks."""
    return json.dumps(names, separators=("\n", ":"))[1:-1].split("\n") if names else []


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
    allowed = constraints.row_filter
    every = [tuple(range(count)) for count in range(max(map(len, theory.rows), default=0) + 1)]
    for i, instruction in enumerate(graph.instructions):
        keep: Sequence[int] = every[len(theory.rows[i])]
        if allowed is not None:
            axes = theory.row_axes[i]
            keep = [k for k in keep if allowed(i, theory.rows[i][k], axes[k])]
        if not batch.keys().isdisjoint(instruction.inputs):
            keep = [
                k
                for k in keep
                if all(
                    batch.get(t, f) == f
                    for t, f in zip(instruction.inputs, theory.rows[i][k].pre, strict=True)
                )
            ]
        if instruction.op == PARAMETER and instruction.outputs[0] in constraints.forms:
            wanted = constraints.forms[instruction.outputs[0]]
            keep = [k for k in keep if theory.rows[i][k].post[0] == wanted]
        if not keep:
            raise no_triple(instruction, constraints.forms.get(instruction.outputs[0]))
        rows.append(tuple(keep))
    return tuple(rows)


def no_triple(instruction: Instruction, form: Placement | None) -> InfeasibleError:
    """The error for an instruction of which the constraints leave no row; ``form``: in which it is asked for."""
    asked = f" in the form {placement_text(form)}" if form is not None else ""
    return InfeasibleError(f"{instruction.name}: no triple is left{asked}; loosen the constraints on it")


def _requirements(theory: Theory, constraints: Constraints, rows_of_outputs: bool) -> tuple[Requirement, ...]:
    graph = theory.graph
    batch = theory.batch_axes
    requirements: dict[int, Requirement] = {}
    if graph.loss is not None:
        requirements[graph.loss] = Requirement(graph.loss, (REPLICATE,))
    for tensor in graph.updates:
        requirements[tensor] = Requirement(tensor, (REPLICATE,))
    for output in graph.outputs:
        t = output.tensor
        if t is None or t in requirements:
            continue
        axis = theory.axes.axis(t, 0) if graph.tensors[t].shape else None
        by_rows = rows_of_outputs and axis is not None and axis.id in batch and axis.units >= 2
        wanted = constraints.forms.get(t)
        forms = (wanted,) if wanted is not None else (REPLICATE, shard(0)) if by_rows else (REPLICATE,)
        requirements[t] = Requirement(t, forms)
    return tuple(requirements.values())


def _moves(
    theory: Theory,
    rows: Sequence[tuple[int, ...]],
    requirements: Sequence[Requirement],
    ties: Sequence[tuple[int, int]],
) -> tuple[tuple[Move, ...], ...]:
    graph = theory.graph
    produced = _produced(theory, rows)
    wanted = _wanted(theory, rows)
    for requirement in requirements:
        wanted[requirement.tensor] |= frozenset(requirement.any_of)
    for parameter, gradient in ties:
        wanted[gradient] |= produced[parameter]
    by_tensor: list[tuple[Move, ...]] = []
    shared_moves: dict[tuple[object, ...], tuple[Move, ...]] = {}
    of, axes = theory.axes.of, theory.axes.axes
    divided: dict[int, list[int]] = {}
    for (tensor, dim), axis in of.items():
        if axes[axis].units >= 2:
            divided.setdefault(tensor, []).append(dim)
    for e in graph.tensors:
        key = (tuple(sorted(divided.get(e.id, ()))), e.dtype != "bool", produced[e.id], wanted[e.id])
        moves = shared_moves.get(key)
        if moves is None:
            moves = shared_moves[key] = _moves_between(*key)
        by_tensor.append(moves)
    return tuple(by_tensor)


def _moves_between(
    dims: tuple[int, ...], summable: bool, produced: frozenset[Placement], wanted: frozenset[Placement]
) -> tuple[Move, ...]:
    """Communications of a tensor from a form in which it is produced to one that is wanted, or to replicated if any
    is."""
    copied = tuple(sorted(sharded_dim(form) for form in produced if is_before_cut(form)))
    return tuple(
        (source, target, kind)
        for source, target, kind in communications(dims, summable=summable, copied=copied)
        if source in produced and (target in wanted or (target == REPLICATE and wanted))
    )


def _produced(theory: Theory, rows: Sequence[tuple[int, ...]]) -> list[frozenset[Placement]]:
    """Per tensor the forms that ``rows`` produce."""
    produced: list[frozenset[Placement]] = [frozenset()] * len(theory.graph.tensors)
    for instruction, forms in _each(theory, rows, lambda row: row.post):
        for t, own in zip(instruction.outputs, forms, strict=True):
            if t >= 0:
                produced[t] = own
    return produced


def _wanted(theory: Theory, rows: Sequence[tuple[int, ...]]) -> list[frozenset[Placement]]:
    """Per tensor the forms that ``rows`` read."""
    wanted: list[frozenset[Placement]] = [frozenset()] * len(theory.graph.tensors)
    for instruction, forms in _each(theory, rows, lambda row: row.pre):
        for t, own in zip(instruction.inputs, forms, strict=True):
            if wanted[t] is not own:
                wanted[t] |= own
    return wanted


def _each(
    theory: Theory, rows: Sequence[tuple[int, ...]], side: Callable[[Triple], tuple[Placement, ...]]
) -> Iterator[tuple[Instruction, list[frozenset[Placement]]]]:
    """Each instruction and the forms of one side of its rows, by place; found once for those of the same rows."""
    shared_forms: dict[tuple[int, tuple[int, ...]], list[frozenset[Placement]]] = {}
    for instruction, all_, indices in zip(theory.graph.instructions, theory.rows, rows, strict=True):
        forms = shared_forms.get((id(all_), indices))
        if forms is None:
            forms = shared_forms[id(all_), indices] = _by_place([side(all_[k]) for k in indices])
        yield instruction, forms


def _by_place(tuples: Sequence[tuple[Placement, ...]]) -> list[frozenset[Placement]]:
    """The different entries at each place of tuples of one length."""
    return [frozenset(forms) for forms in zip(*tuples, strict=True)]
