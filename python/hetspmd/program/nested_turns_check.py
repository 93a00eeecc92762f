"""The independent proof of a step in micro-batches across machines: of the steps that each accelerator runs.

The program of the machines, that of the accelerators inside and the loop are proved each by itself, from the
triples (:mod:`hetspmd.program.checker`, :mod:`hetspmd.program.micro_batch_check`). What is proved here is that the
steps of the three levels together do what they say. It shares no code with :mod:`hetspmd.program.nested_turns`,
which makes them. It walks the steps in the order in which a rank of one turn would run them, and keeps of each part
the values ``e | time, machines, inside`` that are proved. It demands that

- an instruction runs by its row of each level, in the part that the loop says, and once in it;
- what a step reads is proved: itself, or a slice or mask of what is whole on a level and not divided along that dim
  below it;
- a collective turns one form into another on its level alone, by a kind that does;
- a turn reads of what is before the loop what it is given, and what is after the loop reads what it is given, and
  sums over the loop that the loop leaves as sums;
- every result is there in the form in which it is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.errors import ProofError
from hetspmd.placement import (
    PARTIAL,
    REPLICATE,
    after_cut,
    is_before_cut,
    is_sharded,
    placement_text,
    shard,
    sharded_dim,
)
from hetspmd.program.level_layout import LevelKey
from hetspmd.program.levels import Across, Both, InsideCollective, NestedStep, Together
from hetspmd.program.program import Compute, Program
from hetspmd.program.time_split import Loop, Phase
from hetspmd.program.turn_steps import TurnSteps
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory


def check_nested_turns(theory: Theory, loop: Loop, outer: Program, inner: Program, steps: TurnSteps) -> int:
    """Prove the steps, of programs and a loop that are proved; the number of values proved. Raises ProofError where
    the proof breaks."""
    proof = _Proof(theory, loop, outer, inner, steps)
    queues = {"before": list(steps.before), "in": list(steps.turn), "after": list(steps.after)}
    for phase in steps.order:
        if phase not in queues or not queues[phase]:
            raise ProofError(f"the order has more steps {phase!r} than there are")
        proof.step(phase, queues[phase].pop(0))
    if any(queues.values()):
        raise ProofError("the order leaves out steps")
    proof.conclude()
    return sum(len(keys) for of in proof.proved.values() for keys in of.values())


class _Proof:
    def __init__(self, theory: Theory, loop: Loop, outer: Program, inner: Program, steps: TurnSteps) -> None:
        self.theory, self.graph, self.loop, self.steps, self.outer = theory, theory.graph, loop, steps, outer
        self.rows: tuple[Mapping[int, Triple], Mapping[int, Triple]] = (_rows(outer), _rows(inner))
        self.proved: dict[Phase, dict[int, set[LevelKey]]] = {"before": {}, "in": {}, "after": {}}
        for phase in tuple(self.proved):
            self._prove(phase, ((c.tensor, REPLICATE, REPLICATE, REPLICATE) for c in theory.graph.constants))
        for instruction, row in self.rows[0].items():
            if theory.graph.instructions[instruction].is_source:
                (tensor,) = theory.graph.instructions[instruction].outputs
                form = steps.stored.get(tensor, REPLICATE)
                if form != row.post[0]:
                    raise ProofError(f"{self._name(tensor)} is given otherwise than the program says")
                self._prove("before", [(tensor, REPLICATE, form, REPLICATE)])
        self.ran: set[tuple[Phase, int]] = set()
        self.sums = {r.tensor for r in loop.leaving if r.form == PARTIAL}
        self.given: dict[Phase, dict[int, list[LevelKey]]] = {
            "before": {},
            "in": _by_tensor(steps.read),
            "after": _by_tensor(steps.carried),
        }
        self.left = _by_tensor(steps.leaving)

    def _prove(self, phase: Phase, keys: Iterable[LevelKey]) -> None:
        for key in keys:
            self.proved[phase].setdefault(key[0], set()).add(key)

    def step(self, phase: Phase, step: NestedStep) -> None:
        """One step of a part."""
        if isinstance(step, Both):
            self._compute(phase, step)
            return
        members = step.members if isinstance(step, Together) else (step,)
        if len({member.kind for member in members}) != 1 or len({type(member) for member in members}) != 1:
            raise ProofError("a bucket has collectives of several kinds")
        made = [self._communicate(phase, member) for member in members]
        self._prove(phase, made)

    def _compute(self, phase: Phase, step: Both) -> None:
        node, said = self.graph.instructions[step.instruction], self.loop.phases[step.instruction]
        where = f"instruction {step.instruction} ({node.name})"
        if phase != said and (phase, said) != ("in", "before"):
            raise ProofError(f"{where} runs {phase!r} of the loop, which says {said!r}")
        if (phase, step.instruction) in self.ran:
            raise ProofError(f"{where} runs twice")
        self.ran.add((phase, step.instruction))
        wanted = self.loop.rows[step.instruction], *(rows.get(step.instruction) for rows in self.rows)
        if (step.turn, step.outer, step.inner) != wanted or step.turn is None or step.in_time:
            raise ProofError(f"{where} runs by other rows than the programs and the loop say")
        rows = step.turn, step.outer, step.inner
        for key in zip(node.inputs, *(row.pre for row in rows), strict=True):
            self._demand(phase, key, where)
        posts = tuple(map(after_cut, step.turn.post)), step.outer.post, tuple(map(after_cut, step.inner.post))
        self._prove(phase, (key for key in zip(node.outputs, *posts, strict=True) if key[0] >= 0))

    def _communicate(self, phase: Phase, step: InsideCollective | Across) -> LevelKey:
        """What a collective gives."""
        where = f"{step.kind} of {self._name(step.tensor)}"
        if step.time is None:
            raise ProofError(f"{where}: it does not say what the tensor is in time")
        if phase != "in" and step.time != REPLICATE:
            raise ProofError(f"{where}: outside of the loop nothing is divided in time")
        kind = KINDS[step.kind]
        if (kind.source, kind.target) != (_end(step.source), _end(step.target)):
            raise ProofError(
                f"{where}: it cannot turn {placement_text(step.source)} into {placement_text(step.target)}"
            )
        for form in (step.source, step.target):
            if is_sharded(form) and self.theory.axes.sharded(step.tensor, form) is None:
                raise ProofError(f"{where}: {placement_text(form)} lies on no logical axis")
        if isinstance(step, InsideCollective):
            if step.kind == "rebalance":
                raise ProofError(f"{where}: inside a machine lengths are even")
            self._demand(phase, (step.tensor, step.time, step.outer, step.source), where)
            return step.tensor, step.time, step.outer, step.target
        if step.handed_out == PARTIAL or is_before_cut(step.handed_out):
            raise ProofError(f"{where}: accelerators are handed out the whole, or slices of it")
        self._demand(phase, (step.tensor, step.time, step.source, step.collected), where)
        return step.tensor, step.time, step.target, step.handed_out

    def _demand(self, phase: Phase, key: LevelKey, where: str) -> None:
        own = self.proved[phase].get(key[0], ())
        if not any(_gives(have[1:], key[1:]) for have in (*own, *self._handed_on(phase, key[0]))):
            raise ProofError(f"{where}: needs {self._text(key)}, which is not proved")

    def _handed_on(self, phase: Phase, tensor: int) -> list[LevelKey]:
        """The values of a tensor that a part is given of those before it."""
        before, turn = (self.proved[part].get(tensor, ()) for part in ("before", "in"))
        known = [key for key in self.given[phase].get(tensor, ()) if key in before]
        if phase == "after" and tensor in self.sums:
            left = (key for key in self.left.get(tensor, ()) if key in turn and key[1] == PARTIAL)
            known += [(tensor, REPLICATE, *key[2:]) for key in left]
        return known

    def conclude(self) -> None:
        """Every result is there as it is left."""
        steps, outer, whole = self.steps, self.outer, (REPLICATE, REPLICATE, REPLICATE)
        rows = (REPLICATE, shard(0), shard(0))
        wanted = [
            ("the loss", [steps.loss] if steps.loss else [], [outer.loss] if outer.loss else [], whole),
            ("the outputs", steps.outputs, outer.outputs, None),
            ("the buffers", steps.buffers, outer.buffers, whole),
            ("the gradients", steps.gradients, outer.gradients, None),
        ]
        for name, found, results, form in wanted:
            if len(found) != len(results):
                raise ProofError(f"the step leaves {len(found)} of {name}, the program {len(results)}")
            for key, result in zip(found, results, strict=True):
                own = form or ((REPLICATE, result.form, REPLICATE) if name == "the gradients" else whole)
                if name == "the outputs" and result.form == rows[1]:
                    own = rows
                if key != (result.tensor, *own):
                    raise ProofError(f"{name}: {self._text(key)} is left for {self._name(result.tensor)}")
                self._demand("after", key, "at the end")

    def _name(self, tensor: int) -> str:
        return self.graph.tensors[tensor].name

    def _text(self, key: LevelKey) -> str:
        time, machines, inside = map(placement_text, key[1:])
        return f"{self._name(key[0])} | {time} in time, {machines} on machines, {inside} inside"


def _rows(program: Program) -> dict[int, Triple]:
    return {step.instruction: step.row for step in program.steps if isinstance(step, Compute)}


def _by_tensor(keys: Iterable[LevelKey]) -> dict[int, list[LevelKey]]:
    of: dict[int, list[LevelKey]] = {}
    for key in keys:
        of.setdefault(key[0], []).append(key)
    return of


def _end(form: int) -> str:
    if form in (REPLICATE, PARTIAL):
        return "partial" if form == PARTIAL else "replicated"
    return "before_cut" if is_before_cut(form) else "shard"


def _gives(have: LevelKey, want: LevelKey) -> bool:
    """Whether a value in these forms is one in those, or one is sliced or masked from it: from the outermost level
    on, each slice is of what the levels above leave, so that nothing below may be divided along its dim already."""
    for level, (own, wanted) in enumerate(zip(have, want, strict=True)):
        if own == wanted:
            continue
        if own != REPLICATE:
            return False
        if is_sharded(wanted):
            below = (form for form in have[level + 1 :] if is_sharded(form))
            if any(sharded_dim(form) == sharded_dim(wanted) for form in below):
                return False
    return True
