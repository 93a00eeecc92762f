"""A step in micro-batches across machines: what each accelerator does before, in and after the loop.

There are three levels. Time is the outermost: the loop divides the samples. The machines divide a micro-batch by
the outer program, and the accelerators within each what their machine has by the inner program, as without a loop
(:mod:`hetspmd.program.nesting`). All rows are of the same theory, and each level is proved by itself; that the
three together do what they say is proved by :mod:`hetspmd.program.nested_turns_check`.

:func:`nest_turns` walks the steps of the machines in their turns (:mod:`hetspmd.program.turn_steps`) and writes
those of the accelerators, the same on all of them. A collective between machines stays in its part of the step:
before the loop, in it or after it. A collective inside stands

- in the loop, where the loop makes its operand, and the loop reads what it gives;
- after the loop, where it turns a sum over the micro-batches: gradients are summed inside a machine once;
- before the loop, where it turns what is there before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hetspmd.errors import PlanError
from hetspmd.placement import (
    PARTIAL,
    REPLICATE,
    after_cut,
    is_before_cut,
    is_sharded,
    placement_text,
    same_dim,
    shard,
)
from hetspmd.program.level_layout import LevelKey
from hetspmd.program.levels import (
    Across,
    Both,
    InsideCollective,
    NestedStep,
    Together,
    carried,
    provider,
    reads_of,
    within,
    written_by,
)
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.nesting import bucketed_inside, default_kind, inner_rows
from hetspmd.program.program import Communicate, Program
from hetspmd.program.schedule import Schedule
from hetspmd.program.time_split import Phase
from hetspmd.program.turn_steps import TurnSteps, turn_steps
from hetspmd.rules.theory import Theory


def nest_turns(
    theory: Theory,
    outer: tuple[Program, Schedule],
    batches: MicroBatches,
    inner: Program,
    inside_bytes: float = 0,
) -> TurnSteps:
    """The steps of the program ``outer`` over machines in micro-batches, as its schedule has them, and of ``inner``
    within them, with buckets of at most ``inside_bytes`` bytes inside.

    Raises PlanError if one reads what the others do not leave, and where machines have turns of their own.
    """
    if batches.own_turns:
        raise PlanError(
            "machines run the loop over micro-batches together, and this plan has turns of their own"
        )
    if batches.joined:
        raise PlanError("a step across machines leaves no rows of its micro-batches, and this plan does")
    return _Nesting(theory, turn_steps(theory, *outer, batches), batches, inner, outer[0]).run(inside_bytes)


@dataclass
class _Part:
    """The steps of a part while they are written, and the values that are there. ``taken``: of the parts before.
    ``reads``: the values of each tensor that computations of the part read, and of what is before the loop those of
    later parts as well."""

    phase: Phase
    have: dict[LevelKey, None] = field(default_factory=dict)
    of: dict[int, dict[LevelKey, None]] = field(default_factory=dict)
    steps: list[NestedStep] = field(default_factory=list)
    taken: dict[LevelKey, None] = field(default_factory=dict)
    reads: dict[int, dict[LevelKey, None]] = field(default_factory=dict)

    def add(self, keys: Iterable[LevelKey]) -> None:
        """Values that are there from here on."""
        for key in keys:
            self.have[key] = None
            self.of.setdefault(key[0], {})[key] = None


class _Nesting:
    def __init__(
        self, theory: Theory, machines: TurnSteps, batches: MicroBatches, inner: Program, outer: Program
    ) -> None:
        self.graph, self.machines, self.outer = theory.graph, machines, outer
        self.rows = inner_rows(inner)
        moves = (s for s in inner.steps if isinstance(s, Communicate))
        self.moves = {s.tensor: s for s in moves if s.kind != "rebalance"}
        constants = [(c.tensor, *(REPLICATE,) * 3) for c in theory.graph.constants]
        self.constants = dict.fromkeys(constants)
        phases: tuple[Phase, ...] = ("before", "in", "after")
        self.parts = {phase: _Part(phase) for phase in phases}
        self.before, self.turn, self.after = (self.parts[phase] for phase in phases)
        for part in self.parts.values():
            part.add(self.constants)
        self.summed, self.sums = batches.summed, dict[LevelKey, None]()
        self.leaving: dict[LevelKey, None] = {}
        self.order: list[Phase] = []

    def run(self, inside_bytes: float) -> TurnSteps:
        graph, stored = self.graph, self.machines.stored
        given = [i for i in graph.instructions if i.is_source]
        self.before.add((t, REPLICATE, stored.get(t, REPLICATE), REPLICATE) for i in given for t in i.outputs)
        results = self._results()
        self._note_reads([key for keys in results for key in keys])
        steps = list(self.machines.together(self.parts))
        for phase, step in steps:
            if isinstance(step, Both):
                self._both(self.parts[phase], step)
            else:
                self._across(self.parts[phase], step)
        for key in (key for keys in results for key in keys):
            self._reach(self.after, key)
        self._bucket(inside_bytes)
        loss, outputs, buffers, gradients = results
        return TurnSteps(
            before=tuple(self.before.steps),
            turn=tuple(self.turn.steps),
            after=tuple(self.after.steps),
            order=tuple(self.order),
            stored=stored,
            read=tuple(self.turn.taken),
            leaving=tuple(self.leaving),
            carried=tuple(self.after.taken),
            loss=loss[0] if loss else None,
            outputs=outputs,
            buffers=buffers,
            gradients=gradients,
        )

    def _results(self) -> tuple[tuple[LevelKey, ...], ...]:
        """The loss, the outputs, the buffers and the gradients."""
        outer, rows = self.outer, shard(0)
        whole = REPLICATE, REPLICATE, REPLICATE
        return (
            () if outer.loss is None else ((outer.loss.tensor, *whole),),
            tuple(
                (r.tensor, REPLICATE, rows, rows) if r.form == rows else (r.tensor, *whole)
                for r in outer.outputs
            ),
            tuple((r.tensor, *whole) for r in outer.buffers),
            tuple((r.tensor, REPLICATE, r.form, REPLICATE) for r in outer.gradients),
        )

    def _note_reads(self, results: Iterable[LevelKey]) -> None:
        def note(part: _Part, key: LevelKey) -> None:
            for each in {part.phase: part, "before": self.before}.values():
                each.reads.setdefault(key[0], {})[key] = None

        for phase, step in self.machines.together(self.parts):
            if isinstance(step, Both):
                for key in reads_of(self.graph, self._nested(step)):
                    note(self.parts[phase], key)
        for key in results:
            note(self.after, key)

    def _nested(self, step: Both) -> Both:
        return Both(step.instruction, step.inner, self.rows[step.instruction], turn=step.outer)

    def _both(self, part: _Part, step: Both) -> None:
        both = self._nested(step)
        for key in reads_of(self.graph, both):
            self._reach(part, key)
        self._append(part, both)
        for output in written_by(self.graph, both):
            tensor, time, outer, inner = output
            if tensor < 0:
                continue
            self._made(part, (output,))
            move = self.moves.get(tensor)
            if move is not None and move.source == inner:
                for key in part.reads.get(tensor, ()):
                    direct = time in (key[1], REPLICATE) and outer in (key[2], REPLICATE)
                    if direct and provider(part.have, key) is None:
                        self._reach(part, key)

    def _across(self, part: _Part, step: NestedStep) -> None:
        """A collective of the machines, or those of a bucket that have not run yet. What a turn has in another
        form already is not communicated."""
        moves: list[Across] = []
        for member in within(step):
            time, of = member.outer, self._of(part, member.tensor)
            if any(key[1] == time and key[2] == member.target for key in of):
                continue
            collected = [key for key in of if key[1] == time and key[2] == member.source]
            if not collected:
                raise self._missing((member.tensor, time, member.source, REPLICATE))
            source = next((key for key in collected if key[3] == REPLICATE), collected[0])
            self._take(part, source)
            handed = self._handed_out(part, member)
            one = Across(
                member.tensor, member.kind, member.source, member.target, source[3], handed, time=time
            )
            moves.append(one)
            self._made(part, (target for _, target in carried(one)))
        if moves:
            self._append(part, moves[0] if len(moves) == 1 else Together(tuple(moves)))

    def _handed_out(self, part: _Part, step: InsideCollective) -> int:
        """What accelerators get of a collective between machines: slices, if all of them read the same."""
        reads = part.reads.get(step.tensor, ())
        wanted = {key[3] for key in reads if key[2] == step.target or step.target == REPLICATE}
        moved = any(
            (same_dim(key[2], key[3]) and key[2] != step.target)
            or (same_dim(key[1], key[3]) and key[1] != step.outer)
            for key in reads
        )
        (handed,) = wanted if len(wanted) == 1 and not moved else (REPLICATE,)
        return handed if is_sharded(handed) else REPLICATE

    def _append(self, part: _Part, step: NestedStep) -> None:
        part.steps.append(step)
        self.order.append(part.phase)

    def _made(self, part: _Part, keys: Iterable[LevelKey]) -> None:
        """Values of a part; those that are summed over the loop are there after it."""
        made = list(keys)
        part.add(made)
        if part is self.turn:
            sums = (key for key in made if key[0] in self.summed and key[1] == PARTIAL)
            self.sums.update(((key[0], REPLICATE, *key[2:]), None) for key in sums)

    def _of(self, part: _Part, tensor: int) -> list[LevelKey]:
        """The values of a tensor that a part may read, in the order in which they were made."""
        of = dict(part.of.get(tensor, {}))
        if part is self.after and tensor in self.summed:
            of |= {key: None for key in self.sums if key[0] == tensor}
        if part is not self.before:
            of |= self.before.of.get(tensor, {})
        return list(of)

    def _take(self, part: _Part, key: LevelKey) -> bool:
        """Let a value that is there, or is derived from one, be there in a part; whether it is."""
        if provider(part.have, key) is not None:
            return True
        base = provider(self.sums, key) if part is self.after else None
        if base is not None:
            self.leaving[(base[0], PARTIAL, *base[2:])] = None
        elif part is self.before or (base := provider(self.before.have, key)) is None:
            return False
        else:
            part.taken[base] = None
        part.add((base,))
        return True

    def _reach(self, part: _Part, key: LevelKey) -> None:
        """Have a value there, by collectives where it cannot be derived."""
        if self._take(part, key):
            return None
        tensor, time, outer, inner = key
        sources = [source for source in self._of(part, tensor) if source[1] in (time, REPLICATE)]
        for source in sources:
            in_time = source[1] != time  # is sliced in time, if the dim is whole then on all levels
            if source[2] not in (outer, REPLICATE) or (in_time and same_dim(time, source[2])):
                continue
            moved = (in_time and same_dim(time, inner)) or (source[2] != outer and same_dim(outer, inner))
            target = REPLICATE if moved or inner == PARTIAL else inner
            if target == source[3]:
                continue
            kind, planned = default_kind(source[3], target), self.moves.get(tensor)
            if planned is not None and planned.source == source[3]:
                fits = planned.target == REPLICATE or (planned.target == inner and not moved)
                kind, target = (planned.kind, planned.target) if fits else (kind, target)
            return self._communicate(
                part,
                source,
                InsideCollective(tensor, source[2], kind, source[3], target, time=source[1]),
                key,
            )
        for source in sources:
            in_time = source[1] != time
            target = REPLICATE if outer == PARTIAL or (in_time and same_dim(time, outer)) else outer
            if is_before_cut(source[2]):
                target = after_cut(source[2])
            if target == source[2]:
                continue
            moved = (in_time and same_dim(time, inner)) or (target != outer and same_dim(outer, inner))
            handed = inner if is_sharded(inner) and not moved else REPLICATE
            kind = default_kind(source[2], target)
            step = Across(tensor, kind, source[2], target, source[3], handed, time=source[1])
            return self._communicate(part, source, step, key)
        raise self._missing(key)

    def _communicate(
        self, part: _Part, source: LevelKey, step: InsideCollective | Across, wanted: LevelKey
    ) -> None:
        """Turn a value, on the way to another one: before the loop, if the loop only reads it."""
        of_before = part is self.turn and (source not in part.have or source in part.taken)
        own = self.before if of_before else part
        self._take(own, source)
        self._append(own, step)
        self._made(own, (target for _, target in carried(step)))
        self._reach(part, wanted)

    def _bucket(self, inside_bytes: float) -> None:
        """Let collectives inside share buckets. Before the loop they stay where the first turn waits for them, as
        do in the loop those of what is summed over it."""
        for part, apart in ((self.turn, self.summed), (self.after, frozenset[int]())):
            entries = bucketed_inside(self.graph, part.steps, inside_bytes, apart)
            of_part = iter(entries)
            self.order = [p for p in self.order if p != part.phase or next(of_part) is not None]
            part.steps = [step for step in entries if step is not None]

    def _missing(self, key: LevelKey) -> PlanError:
        time, outer, inner = map(placement_text, key[1:])
        return PlanError(
            f"the program reads {self.graph.tensors[key[0]].name} | {time} in time, {outer} on machines, {inner} "
            "inside, before it is produced; compile the plan again"
        )
