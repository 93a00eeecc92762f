"""What the ranks of a program do before, in and after the loop over micro-batches.

A program divides the work over devices, and a loop (:mod:`hetspmd.program.micro_batches`) over time: two levels, of
which time is the outer one. Each computation has a row in time and one on the devices, each collective stands where
its tensor is:

- of what is there before the loop: once, before it (a parameter that is gathered), or in the loop, where the plan
  says so (:mod:`hetspmd.program.loop_steps`);
- of rows of a micro-batch, and of summands that the loop reads on: in the loop;
- of summands in time that leave the loop (gradients): once, after it, where they are summed over the micro-batches,
  or in the loop, where the plan says so: then what leaves the loop is summed in shards.

What is divided on the devices before the loop, along the samples, is gathered before it where the loop reads rows:
a device's rows of the batch are others than its rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from hetspmd.cluster.collective_kinds import kinds_between
from hetspmd.errors import PlanError
from hetspmd.placement import REPLICATE, Placement, is_sharded
from hetspmd.program.level_layout import LevelKey
from hetspmd.program.levels import (
    Both,
    InsideCollective,
    Key,
    NestedStep,
    Together,
    provider,
    reads_of,
    within,
    written_by,
)
from hetspmd.program.loop_steps import loop_order, step_phases
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.program.schedule import Places, Schedule
from hetspmd.program.stored import given_forms
from hetspmd.program.time_split import Phase
from hetspmd.rules.theory import Theory


@dataclass(frozen=True)
class TurnSteps:
    """The steps of each part of a step, and the values that pass between them. These are ``(tensor, form in time,
    form on the devices)`` or, across machines, ``(tensor, form in time, form on machines, form inside)``.

    Attributes:
        before: Once.
        turn: For each micro-batch.
        after: Once.
        order: Of all these steps, in the order of the schedule, the phase: what is before the loop runs together
            with the first micro-batch, what is after it together with the last one.
        stored: The placement of each parameter, buffer and input on the devices.
        read: What the loop reads of what is there before it.
        leaving: What each micro-batch leaves: to be summed, or joined, over all of them.
        carried: What is there before the loop and read after it, or a result.
        loss: The loss; None without one.
        outputs: The outputs, in the graph's order.
        buffers: The updated buffers, and behind them the updated parameters.
        gradients: The gradients, in the order of the parameters that have one.
    """

    before: tuple[NestedStep, ...]
    turn: tuple[NestedStep, ...]
    after: tuple[NestedStep, ...]
    order: tuple[Phase, ...]
    stored: dict[int, Placement]
    read: tuple[LevelKey, ...]
    leaving: tuple[LevelKey, ...]
    carried: tuple[LevelKey, ...]
    loss: LevelKey | None
    outputs: tuple[LevelKey, ...]
    buffers: tuple[LevelKey, ...]
    gradients: tuple[LevelKey, ...]

    def together(self, phases: Collection[Phase]) -> Iterator[tuple[Phase, NestedStep]]:
        """The steps of these phases, each with its own, in the order of the schedule."""
        steps = {"before": iter(self.before), "in": iter(self.turn), "after": iter(self.after)}
        for phase in self.order:
            step = next(steps[phase])
            if phase in phases:
                yield phase, step


def turn_steps(theory: Theory, program: Program, schedule: Schedule, batches: MicroBatches) -> TurnSteps:
    """The steps of a program in micro-batches, in the order of its schedule.

    Raises PlanError if one reads what the others do not leave.
    """
    return _Writing(theory, program, schedule, batches).run()


@dataclass
class _Part:
    """The steps of a part while they are written, and the values that are there."""

    have: dict[Key, None] = field(default_factory=dict)
    steps: list[NestedStep] = field(default_factory=list)
    taken: dict[Key, None] = field(default_factory=dict)
    """What is taken of the part before."""


class _Writing:
    def __init__(self, theory: Theory, program: Program, schedule: Schedule, batches: MicroBatches) -> None:
        self.batches, loop = batches, batches.loop
        self.theory, self.graph, self.program, self.loop = theory, theory.graph, program, loop
        self.phases = step_phases(self.graph, batches, program)
        self.order = loop_order(self.graph, program, schedule, batches)
        self.stored = given_forms(self.graph, program)
        self.constants = {(c.tensor, REPLICATE, REPLICATE): None for c in self.graph.constants}
        self.before, self.turn, self.after = (_Part(dict(self.constants)) for _ in range(3))
        self.appended: list[Phase] = []
        self.leaving: dict[Key, None] = {}
        self.in_time = {r.tensor: r.form for r in loop.leaving}

    def run(self) -> TurnSteps:
        for places in self.order:
            step = self.program.steps[places[0]]
            if isinstance(step, Compute):
                self._compute(step, self.phases[places[0]])
            else:
                self._communicate(places)
        program = self.program
        return TurnSteps(
            before=tuple(self.before.steps),
            turn=tuple(self.turn.steps),
            after=tuple(self.after.steps),
            order=self._order(),
            stored=self.stored,
            loss=None if program.loss is None else self._result(program.loss.tensor, program.loss.form),
            outputs=tuple(self._result(r.tensor, r.form) for r in program.outputs),
            buffers=tuple(self._result(r.tensor, r.form) for r in program.buffers),
            gradients=tuple(self._result(r.tensor, r.form) for r in program.gradients),
            read=tuple(self.turn.taken),
            leaving=tuple(self.leaving),
            carried=tuple(self.after.taken),
        )

    def _order(self) -> tuple[Phase, ...]:
        """Where devices have turns of their own, what is before the loop comes first, with what is gathered for it
        where the loop reads it (:func:`hetspmd.program.loop_steps.loop_order`)."""
        if not self.batches.own_turns:
            return tuple(self.appended)
        before = [phase for phase in self.appended if phase == "before"]
        return (*before, *(phase for phase in self.appended if phase != "before"))

    def _compute(self, step: Compute, phase: Phase) -> None:
        instruction = self.graph.instructions[step.instruction]
        if instruction.is_source:
            (tensor,) = instruction.outputs
            self.before.have[(tensor, REPLICATE, self.stored[tensor])] = None
            return
        row = self.loop.rows[step.instruction]
        self._append(self._part(phase), Both(step.instruction, row, step.row, in_time=True))

    def _communicate(self, places: Places) -> None:
        """A collective, or several that share a bucket, as far as they are in the same part."""
        parts: dict[Phase, list[InsideCollective]] = {}
        for place in places:
            step = self.program.steps[place]
            assert isinstance(step, Communicate)
            phase = self.phases[place]
            time = self.batches.placements[step.tensor] if phase == "in" else REPLICATE
            one = InsideCollective(step.tensor, time, step.kind, step.source, step.target)
            parts.setdefault(phase, []).append(one)
        for phase, members in parts.items():
            self._append(self._part(phase), members[0] if len(members) == 1 else Together(tuple(members)))

    def _append(self, part: _Part, step: NestedStep) -> None:
        for tensor, time, inner in reads_of(self.graph, step):
            self._need(part, (tensor, time, inner))
        part.steps.append(step)
        self.appended.append("before" if part is self.before else "in" if part is self.turn else "after")
        if isinstance(step, Both):
            made = written_by(self.graph, step)
            part.have.update(((tensor, time, inner), None) for tensor, time, inner in made if tensor >= 0)
        else:
            part.have.update(((one.tensor, one.outer, one.target), None) for one in within(step))

    def _part(self, phase: Phase) -> _Part:
        return {"before": self.before, "in": self.turn, "after": self.after}[phase]

    def _need(self, part: _Part, key: Key) -> None:
        """Let a value be there in a part: one of its own, or one of an earlier part that is handed on."""
        if provider(part.have, key) is not None:
            return
        if part is self.turn:
            self._take(part, self._gathered(key))
        elif part is self.after:
            tensor, _, inner = key
            time = self.in_time.get(tensor)
            base = None if time is None else provider(self.turn.have, (tensor, time, inner))
            if base is not None:
                self.leaving[base] = None
                part.have[(tensor, REPLICATE, base[2])] = None
            else:
                self._take(part, key)
        else:
            raise self._absent(key)

    def _take(self, part: _Part, key: Key) -> None:
        base = provider(self.before.have, key)
        if base is None:
            raise self._absent(key)
        part.have[base] = None
        if base not in self.constants:
            part.taken[base] = None

    def _gathered(self, key: Key) -> Key:
        """A value that the loop reads of what is there before it; one that is divided on the devices in another way
        is gathered first."""
        if provider(self.before.have, key) is not None:
            return key
        tensor = key[0]
        whole = (tensor, REPLICATE, REPLICATE)
        for _, _, inner in [k for k in self.before.have if k[0] == tensor and is_sharded(k[2])]:
            kind = kinds_between("shard", "replicated")[0]
            self._append(self.before, InsideCollective(tensor, REPLICATE, kind, inner, REPLICATE))
            return whole
        return key

    def _result(self, tensor: int, form: Placement) -> Key:
        """Where a result is: after the loop, or, of one that is joined, in each micro-batch."""
        time = self.in_time.get(tensor)
        if time is not None and is_sharded(time):
            base = provider(self.turn.have, (tensor, time, form))
            if base is None:
                raise self._absent((tensor, time, form))
            self.leaving[base] = None
            return base
        key = (tensor, REPLICATE, form)
        self._need(self.after, key)
        return key

    def _absent(self, key: Key) -> PlanError:
        name = self.graph.tensors[key[0]].name
        return PlanError(f"a step in micro-batches reads {name}, which is not there in that placement")
