"""From the values that the search chose to a program in execution order."""

from __future__ import annotations

from collections.abc import Sequence

from hetspmd.forms import Form, available
from hetspmd.rules.theory import Theory
from hetspmd.synth.program import Communicate, Compute, Program, Result, Step
from hetspmd.synth.space import Move, Space


def assemble_program(space: Space, rows: Sequence[int], moves: Sequence[Move | None]) -> Program:
    """The program with ``theory.rows[i][rows[i]]`` for instruction i and ``moves[t]`` for tensor t.

    Computations keep the graph's order. A communication comes right after its producer, where it can start
    earliest; but one that only the backward reads, and one of a parameter, comes right before its first
    reader, so that the whole tensor is not kept for longer than needed. Communications that nobody needs
    are left out.

    A parameter that is communicated for its second reading alone is communicated right before it; the program
    is as good as one that communicates the second reading. If there is no such program, the communication comes
    before the forward's last reader: what the second reading takes is what was kept (:mod:`hetspmd.synth.memory`).
    """
    theory = space.theory
    graph = theory.graph
    needed = _needed(space, rows)
    after: dict[int, list[Communicate]] = {}
    before: dict[int, list[Communicate]] = {}
    for t, move in enumerate(moves):
        if move is None:
            continue
        source, target, kind = move
        if all(available(source, form) for form in needed[t]):
            continue
        step = Communicate(t, kind, source, target)
        producer = graph.producer(t)
        readers = [
            i for i in graph.consumers.get(t, ())
            if any(
                tensor == t and not available(source, form)
                for tensor, form in zip(graph.instructions[i].inputs, theory.rows[i][rows[i]].pre, strict=True)
            )
        ]  # fmt: skip
        if readers and readers[0] in graph.second_reads and _kept(space, readers[0], source, moves):
            readers = [max(i for i in graph.consumers[t] if i < readers[0])]
        late = readers and (producer.is_source or graph.instructions[readers[0]].phase != producer.phase)
        if late:
            before.setdefault(readers[0], []).append(step)
        else:
            after.setdefault(producer.id, []).append(step)
    steps: list[Step] = []
    for instruction in graph.instructions:
        steps += before.get(instruction.id, [])
        steps.append(Compute(instruction.id, theory.rows[instruction.id][rows[instruction.id]]))
        steps += after.get(instruction.id, [])
    return _with_results(theory, steps, space, moves)


def _kept(space: Space, second: int, stored: Form, moves: Sequence[Move | None]) -> bool:
    """Whether a second reading cannot be communicated in the parameter's place: it is communicated from another
    form, or has no row for the stored one."""
    (tensor,) = space.theory.graph.instructions[second].outputs
    direct = any(space.theory.rows[second][k].pre[0] == stored for k in space.rows[second])
    return moves[tensor] is not None or not direct


def _needed(space: Space, rows: Sequence[int]) -> list[set[Form]]:
    """The forms in which each tensor is read, by the chosen rows and at the end (where there is no choice)."""
    theory = space.theory
    graph = theory.graph
    needed: list[set[Form]] = [set() for _ in graph.tensors]
    produced: dict[int, Form] = {}
    for i, instruction in enumerate(graph.instructions):
        row = theory.rows[i][rows[i]]
        for t, form in zip(instruction.inputs, row.pre, strict=True):
            needed[t].add(form)
        for t, form in zip(instruction.outputs, row.post, strict=True):
            if t >= 0:
                produced[t] = form
    for parameter, gradient in space.ties:
        needed[gradient].add(produced[parameter])
    for requirement in space.requirements:
        t = requirement.tensor
        if not any(available(produced[t], form) for form in requirement.any_of):
            needed[t].add(requirement.any_of[0])
    return needed


def _with_results(theory: Theory, steps: list[Step], space: Space, moves: Sequence[Move | None]) -> Program:
    graph = theory.graph
    have: dict[int, list[Form]] = {}
    stored: dict[int, Form] = {}
    for step in steps:
        if isinstance(step, Compute):
            for t, form in zip(graph.instructions[step.instruction].outputs, step.row.post, strict=True):
                if t >= 0:
                    have.setdefault(t, []).append(form)
                    stored[t] = form
        else:
            have[step.tensor].append(step.target)
    allowed = {r.tensor: r.any_of for r in space.requirements}

    def result(t: int) -> Result:
        """The form at the end: one that is there, else one that follows from Identity."""
        for form in have[t]:
            if form in allowed[t]:
                return Result(t, form)
        return Result(t, next(f for f in allowed[t] if any(available(h, f) for h in have[t])))

    return Program(
        tuple(steps),
        None if graph.loss is None else result(graph.loss),
        tuple(result(o.tensor) for o in graph.outputs if o.tensor is not None),
        tuple(Result(p.gradient, stored[p.tensor]) for p in graph.parameters if p.gradient is not None),
        tuple(result(b.updated) for b in graph.buffers if b.updated is not None),
    )
