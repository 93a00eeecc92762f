"""Two programs as one: the outer one over machines, the inner one over the accelerators within each (HAP 3, 6).

Both programs are of the same theory and proved each by itself; as rows hold for tensors of any shape, the inner row
of an instruction divides what the machine does by the outer row, where :mod:`hetspmd.rules.nested` knows how.

:func:`nest` walks the outer program's schedule and writes what each accelerator does, the same steps on all of them
(:mod:`hetspmd.program.levels`). Collectives across are where the outer program's schedule has them. One inside runs
as soon as its tensor is there if the same graph reads what it gives, else where that is read.

Collectives between machines share the buckets of the outer program's schedule, those inside have buckets of their
own (:mod:`hetspmd.program.buckets`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetspmd.cluster.collective_kinds import Kind, end_of, kinds_between
from hetspmd.errors import PlanError
from hetspmd.placement import (
    PARTIAL,
    REPLICATE,
    Placement,
    after_cut,
    is_before_cut,
    is_sharded,
    placement_text,
    same_dim,
    shard,
)
from hetspmd.program.buckets import Bucket, Scheduled, Small, coalesces, grouped
from hetspmd.program.levels import (
    Across,
    Both,
    InsideCollective,
    Key,
    Nested,
    NestedStep,
    Together,
    carried,
    provider,
    reads_of,
    written_by,
)
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.program.schedule import Schedule
from hetspmd.program.stored import given_forms
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import Graph


def inner_rows(program: Program) -> dict[int, Triple]:
    """The row of each instruction."""
    return {step.instruction: step.row for step in program.steps if isinstance(step, Compute)}


def nest(
    theory: Theory, outer: Program, schedule: Schedule, inner: Program, inside_bytes: float = 0
) -> Nested:
    """The steps of ``outer`` over machines, as its schedule has them, and of ``inner`` within them, with buckets of
    at most ``inside_bytes`` bytes.

    Raises PlanError if one reads what the other does not leave.
    """
    return _Nesting(theory, outer, schedule, inner, inside_bytes).run()


@dataclass
class _Graph:
    """One local graph while it is written: its steps, the values that are there, and what it takes of the forward
    graph (``before``), with the value that it is taken from."""

    have: dict[Key, None]
    before: Mapping[Key, None] = field(default_factory=dict)
    steps: list[NestedStep] = field(default_factory=list)
    taken: dict[Key, Key] = field(default_factory=dict)

    def provider(self, key: Key) -> Key | None:
        """Where a value comes from; what comes from before is noted."""
        source = provider(self.have, key)
        if source is None:
            source = provider(self.before, key)
            if source is not None:
                self.taken.setdefault(key, source)
        return source

    def of(self, tensor: int) -> list[Key]:
        """The values of a tensor, in the order in which they were made."""
        return [k for k in (*self.have, *self.before) if k[0] == tensor]


class _Nesting:
    def __init__(
        self, theory: Theory, outer: Program, schedule: Schedule, inner: Program, inside_bytes: float
    ) -> None:
        self.theory, self.graph, self.outer = theory, theory.graph, outer
        self.rows = inner_rows(inner)
        moves = (s for s in inner.steps if isinstance(s, Communicate))
        self.moves = {s.tensor: s for s in moves if s.kind != "rebalance"}
        self.order = schedule.steps(outer)
        self.inside_bytes = inside_bytes

    def run(self) -> Nested:
        graph, outer = self.graph, self.outer
        constants = {(c.tensor, REPLICATE, REPLICATE): None for c in graph.constants}
        stored = given_forms(graph, outer)
        forward = _Graph(dict(constants))
        for step in self.order.forward:
            if isinstance(step, Compute) and graph.instructions[step.instruction].is_source:
                (tensor,) = graph.instructions[step.instruction].outputs
                forward.have[(tensor, stored[tensor], REPLICATE)] = None
        loss = None if outer.loss is None else (outer.loss.tensor, REPLICATE, REPLICATE)
        rows = shard(0)
        outputs = tuple(
            (r.tensor, rows, rows) if r.form == rows else (r.tensor, REPLICATE, REPLICATE)
            for r in outer.outputs
        )
        buffers = tuple((r.tensor, REPLICATE, REPLICATE) for r in outer.buffers)
        results = (*(() if loss is None else (loss,)), *outputs, *buffers)
        self._write(forward, self.order.forward, results)
        gradients = tuple((r.tensor, r.form, REPLICATE) for r in outer.gradients)
        backward = _Graph(dict(constants), {k: None for k in forward.have if k not in constants})
        if graph.tangent is not None:
            backward.have[(graph.tangent, REPLICATE, REPLICATE)] = None
        self._write(backward, self.order.backward, gradients)
        return Nested(
            forward=tuple(forward.steps),
            backward=tuple(backward.steps),
            saved=self._saved(backward),
            stored=stored,
            loss=loss,
            outputs=outputs,
            buffers=buffers,
            gradients=gradients,
        )

    def _write(self, into: _Graph, steps: Iterable[Scheduled], results: tuple[Key, ...]) -> None:
        reads = _Reads(self, steps, results)
        for step in steps:
            if isinstance(step, Communicate):
                self._across(into, step, reads)
            elif isinstance(step, Bucket):
                self._together(into, step, reads)
            elif not self.graph.instructions[step.instruction].is_source:
                self._both(into, step, reads)
        for key in results:
            self._reach(into, key)
        bucketed = bucketed_inside(self.graph, into.steps, self.inside_bytes)
        into.steps = [step for step in bucketed if step is not None]

    def _both(self, into: _Graph, step: Compute, reads: _Reads) -> None:
        both = Both(step.instruction, step.row, self.rows[step.instruction])
        for key in _two_levels(reads_of(self.graph, both)):
            self._reach(into, key)
        into.steps.append(both)
        for output in _two_levels(written_by(self.graph, both)):
            tensor, outer, inner = output
            if tensor < 0:
                continue
            into.have[output] = None
            move = self.moves.get(tensor)
            if move is not None and move.source == inner:
                for key in reads.of(tensor):
                    direct = outer in (key[1], REPLICATE)
                    if direct and provider(into.have, key) is None:
                        self._reach(into, key)

    def _across(self, into: _Graph, step: Communicate, reads: _Reads) -> None:
        if any(k[1] == step.target for k in into.of(step.tensor)):
            return
        collected = [k for k in into.of(step.tensor) if k[1] == step.source]
        if not collected:
            raise self._missing((step.tensor, step.source, REPLICATE))
        source = next((k for k in collected if k[2] == REPLICATE), collected[0])
        wanted = {k[2] for k in reads.of(step.tensor) if k[1] == step.target or step.target == REPLICATE}
        moved = any(same_dim(k[1], k[2]) and k[1] != step.target for k in reads.of(step.tensor))
        (handed,) = wanted if len(wanted) == 1 and not moved else (REPLICATE,)
        self._append(
            into,
            source,
            Across(
                step.tensor,
                step.kind,
                step.source,
                step.target,
                source[2],
                handed if is_sharded(handed) else REPLICATE,
            ),
        )

    def _together(self, into: _Graph, bucket: Bucket, reads: _Reads) -> None:
        """Those of a bucket that have not run yet."""
        before = len(into.steps)
        for member in bucket.members:
            self._across(into, member, reads)
        members = tuple(s for s in into.steps[before:] if isinstance(s, Across))
        if len(members) > 1:
            into.steps[before:] = [Together(members)]

    def _append(self, into: _Graph, source: Key, step: InsideCollective | Across) -> None:
        into.provider(source)
        into.steps.append(step)
        if isinstance(step, InsideCollective):
            into.have[(step.tensor, step.outer, step.target)] = None
        else:
            into.have[(step.tensor, step.target, step.handed_out)] = None

    def _reach(self, into: _Graph, key: Key) -> None:
        """Have a value there, by collectives where it cannot be derived."""
        if into.provider(key) is not None:
            return None
        tensor, outer, inner = key
        for source in into.of(tensor):
            if source[1] in (outer, REPLICATE):
                moved = source[1] != outer and same_dim(outer, inner)
                target = REPLICATE if moved or inner == PARTIAL else inner
                kind = default_kind(source[2], target)
                planned = self.moves.get(tensor)
                if planned is not None and planned.source == source[2]:
                    fits = planned.target == REPLICATE or (planned.target == inner and not moved)
                    kind, target = (planned.kind, planned.target) if fits else (kind, target)
                self._append(into, source, InsideCollective(tensor, source[1], kind, source[2], target))
                return self._reach(into, key)
        for source in into.of(tensor):
            target = REPLICATE if outer == PARTIAL else outer
            if is_before_cut(source[1]):
                target = after_cut(source[1])
            handed = inner if is_sharded(inner) else REPLICATE
            step = Across(tensor, default_kind(source[1], target), source[1], target, source[2], handed)
            self._append(into, source, step)
            return self._reach(into, key)
        raise self._missing(key)

    def _missing(self, key: Key) -> PlanError:
        name = self.graph.tensors[key[0]].name
        return PlanError(
            f"the program reads {name} | {placement_text(key[1])} on machines, {placement_text(key[2])} inside, "
            "before it is produced; compile the plan again"
        )

    def _saved(self, backward: _Graph) -> tuple[tuple[Key, bool], ...]:
        graph = self.graph
        lasting = {p.tensor for p in graph.parameters} | {i.tensor for i in graph.inputs}
        lasting |= {b.tensor for b in graph.buffers}
        whole: dict[Key, None] = {}
        slices: dict[Key, Key] = {}
        for key, base in backward.taken.items():
            masked = PARTIAL in (key[1], key[2]) and key != base
            if key == base or masked or key[0] in lasting:
                whole[base] = None
            else:
                slices[key] = base
        compact = [key for key, base in slices.items() if base not in whole]
        return (*((key, False) for key in whole), *((key, True) for key in compact))


def bucketed_inside(
    graph: Graph, steps: Sequence[NestedStep], nbytes: float, apart: Container[int] = ()
) -> list[NestedStep | None]:
    """The steps in their order, with buckets of at most ``nbytes`` bytes of collectives inside machines, and None
    in the place of what is now in a bucket. Any value of a collective's tensor but the one that it is given is
    taken for one that needs its result. Collectives of the tensors ``apart`` stay as they are."""
    moves = [(i, s) for i, s in enumerate(steps) if isinstance(s, InsideCollective)]
    free = [(i, s) for i, s in moves if s.tensor not in apart]
    small = [(i, s) for i, s in free if coalesces(graph, s.tensor, s.kind, nbytes)]
    if len(small) < 2:
        return list(steps)
    tensors = {s.tensor for _, s in small}
    readers: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for at, step in enumerate(steps):
        for key in reads_of(graph, step):
            if key[0] in tensors:
                readers.setdefault(key[0], []).append((at, key))
    places: dict[int, Small] = {}
    for i, move in small:
        ((source, _),), meta = carried(move), graph.tensors[move.tensor]
        reading = (at for at, key in readers[move.tensor] if at > i and key != source)
        places[i] = Small(move.kind, meta.dtype, meta.nbytes, min(reading, default=len(steps)))
    entries: list[NestedStep | None] = list(steps)
    of = dict(small)
    for group in grouped(places, [isinstance(s, Both) for s in steps], moves[-1][0], nbytes):
        for i in group[:-1]:
            entries[i] = None
        entries[group[-1]] = Together(tuple(of[i] for i in group))
    return entries


class _Reads:
    """The values of each tensor that the steps of one graph read by computations, and those that are left."""

    def __init__(self, nesting: _Nesting, steps: Iterable[object], results: tuple[Key, ...]) -> None:
        self._of: dict[int, dict[Key, None]] = {}
        for step in steps:
            if isinstance(step, Compute):
                for key in self._keys(nesting, step):
                    self._of.setdefault(key[0], {})[key] = None
        for key in results:
            self._of.setdefault(key[0], {})[key] = None

    @staticmethod
    def _keys(nesting: _Nesting, step: Compute) -> Iterator[Key]:
        both = Both(step.instruction, step.row, nesting.rows[step.instruction])
        yield from _two_levels(reads_of(nesting.graph, both))

    def of(self, tensor: int) -> tuple[Key, ...]:
        return tuple(self._of.get(tensor, ()))


def _two_levels(keys: Iterable[tuple[int, ...]]) -> list[Key]:
    return [(tensor, outer, inner) for tensor, outer, inner in keys]


def default_kind(source: Placement, target: Placement) -> Kind:
    """The collective that turns one form into another: the first kind between the two."""
    return kinds_between(end_of(source), end_of(target))[0]
