"""From the values that the search chose to a program in execution order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hetspmd.placement import Placement, available
from hetspmd.program.program import Communicate, Program, Result, Step
from hetspmd.search.space import Move, Space


def assemble_program(space: Space, rows: Sequence[int], moves: Sequence[Move | None]) -> Program:
    """The program with ``theory.rows[i][rows[i]]`` for instruction i and ``moves[t]`` for tensor t.

    Computations keep the graph's order. A communication comes right after its producer, where it can start
    earliest; but one that only the backward reads, and one of a parameter, comes right before its first
    reader, so that the whole tensor is not kept for longer than needed. Communications that nobody needs
    are left out.

    A parameter that is communicated for its second reading alone is communicated right before it; the program
    is as good as one that communicates the second reading. If there is no such program, the communication comes
    before the forward's last reader: what the second reading takes is what was kept
    (:mod:`hetspmd.search.memory_prices`).
    """
    theory = space.theory
    graph = theory.graph
    chosen = _Chosen(space, rows)
    after: dict[int, list[Step]] = {}
    before: dict[int, list[Step]] = {}
    targets: dict[int, Placement] = {}
    for t, move in enumerate(moves):
        if move is None:
            continue
        source, target, kind = move
        if all(available(source, form) for form in chosen.needed(t)):
            continue
        targets[t] = target
        step = Communicate(t, kind, source, target)
        producer = graph.producer(t)
        readers = [i for i, form in chosen.reads(t) if not available(source, form)]
        if readers and readers[0] in graph.second_reads and _reuses_forward(space, readers[0], source, moves):
            readers = [max(i for i in graph.consumers[t] if i < readers[0])]
        late = readers and (producer.is_source or graph.instructions[readers[0]].phase != producer.phase)
        if late:
            before.setdefault(readers[0], []).append(step)
        else:
            after.setdefault(producer.id, []).append(step)
    steps: list[Step] = []
    for i, row in enumerate(rows):
        if i in before:
            steps += before[i]
        steps.append(space.compute(i, row))
        if i in after:
            steps += after[i]
    return _with_results(steps, chosen, targets)


class _Chosen:
    """What the chosen rows produce and read."""

    def __init__(self, space: Space, rows: Sequence[int]) -> None:
        self.theory, self.rows = space.theory, rows
        self.allowed = {r.tensor: r.any_of for r in space.requirements}
        self.tied: dict[int, list[int]] = {}
        for parameter, gradient in space.ties:
            self.tied.setdefault(gradient, []).append(parameter)

    def stored(self, t: int) -> Placement:
        """The form in which a tensor is produced."""
        producer = self.theory.graph.producer(t)
        row = self.theory.rows[producer.id][self.rows[producer.id]]
        return row.post[producer.outputs.index(t)]

    def reads(self, t: int) -> Iterator[tuple[int, Placement]]:
        """The instructions that read a tensor, in order, and in which form."""
        graph = self.theory.graph
        for i in graph.consumers.get(t, ()):
            row = self.theory.rows[i][self.rows[i]]
            for tensor, form in zip(graph.instructions[i].inputs, row.pre, strict=True):
                if tensor == t:
                    yield i, form

    def needed(self, t: int) -> Iterator[Placement]:
        """The forms in which a tensor is read, by the rows and at the end (where there is no choice)."""
        for _, form in self.reads(t):
            yield form
        for parameter in self.tied.get(t, ()):
            yield self.stored(parameter)
        allowed = self.allowed.get(t)
        if allowed is not None and not any(available(self.stored(t), form) for form in allowed):
            yield allowed[0]


def _reuses_forward(space: Space, second: int, stored: Placement, moves: Sequence[Move | None]) -> bool:
    """Whether a second reading cannot be communicated in the parameter's place: it is communicated from another
    form, or has no row for the stored one."""
    (tensor,) = space.theory.graph.instructions[second].outputs
    direct = any(space.theory.rows[second][k].pre[0] == stored for k in space.rows[second])
    return moves[tensor] is not None or not direct


def _with_results(steps: list[Step], chosen: _Chosen, targets: Mapping[int, Placement]) -> Program:
    """The program, whose communications make the forms ``targets``, with what it leaves behind."""
    graph, allowed = chosen.theory.graph, chosen.allowed

    def result(t: int) -> Result:
        """The form at the end: one that is there, else one that follows from a replicated tensor."""
        have = (chosen.stored(t), targets[t]) if t in targets else (chosen.stored(t),)
        for form in have:
            if form in allowed[t]:
                return Result(t, form)
        return Result(t, next(f for f in allowed[t] if any(available(h, f) for h in have)))

    return Program(
        tuple(steps),
        None if graph.loss is None else result(graph.loss),
        tuple(result(o.tensor) for o in graph.outputs if o.tensor is not None),
        tuple(
            Result(p.gradient, chosen.stored(p.tensor)) for p in graph.parameters if p.gradient is not None
        ),
        tuple(map(result, graph.updates)),
    )
