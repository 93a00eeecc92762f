"""The independent proof of a step in micro-batches, from the triples alone.

It shares no code with :mod:`hetspmd.program.micro_batches`. It walks the instructions in the order in which they
run (those before the loop, those in it, those after it), and keeps of each tensor where it is proved to be: whole
before the loop, in a placement in time in the loop, whole after it. It demands that

- the triple of each instruction is in the theory, and one outside of the loop runs the op whole;
- a triple in the loop divides an axis that micro-batches divide, or works on summands;
- what an instruction reads is there. In the loop, what is whole is sliced, or is the first micro-batch's summand;
- what is read after the loop, and every result of the step, is whole, or leaves the loop as the loop says.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetspmd.errors import ProofError
from hetspmd.placement import (
    PARTIAL,
    REPLICATE,
    Placement,
    after_cut,
    is_before_cut,
    is_sharded,
    placement_text,
    sharded_dim,
)
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.program.time_split import Loop
from hetspmd.rules.theory import Theory


def check_loop(theory: Theory, loop: Loop) -> int:
    """Prove the step; the number of properties proved. Raises ProofError where the proof breaks."""
    count = len(theory.graph.instructions)
    if len(loop.phases) != count or len(loop.rows) != count:
        raise ProofError(
            f"a loop of {len(loop.phases)} phases and {len(loop.rows)} triples for {count} instructions"
        )
    proof = _Proof(theory, loop)
    for phase, run in (("before", proof.before), ("in", proof.inside), ("after", proof.after)):
        for instruction in range(count):
            if loop.phases[instruction] == phase:
                run(instruction)
        if phase == "in":
            proof.leave()
    unknown = set(loop.phases) - {"before", "in", "after"}
    if unknown:
        raise ProofError(f"there is no phase {min(unknown)!r}")
    proof.conclude()
    return len(proof.whole) + len(proof.in_time) + len(proof.later)


def check_repeated(theory: Theory, loop: Loop, repeated: Iterable[int]) -> None:
    """Prove that the collectives of ``repeated`` tensors may run in the loop as well as outside of it.

    Of a sum over the loop this is so because both are sums: each micro-batch's summand is reduced before it is
    added. Of what is there before the loop it is so if whatever reads it gives the same in every micro-batch, or is
    a part of the loop: then what is made before the loop may be made in it. Raises ProofError for any other tensor.
    """
    graph = theory.graph
    results = {
        graph.loss,
        *(o.tensor for o in graph.outputs),
        *graph.updates,
        *(p.gradient for p in graph.parameters),
    }
    sums = {r.tensor for r in loop.leaving if r.form == PARTIAL}
    stack = list(dict.fromkeys(repeated))
    seen: set[int] = set()
    while stack:
        tensor = stack.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        if tensor not in graph.producers:
            raise ProofError(
                f"tensor {tensor} has no producer, and its collectives are said to run in the loop"
            )
        if tensor in sums:
            continue
        where = f"a collective of {graph.tensors[tensor].name} is said to run in the loop"
        if loop.phases[graph.producers[tensor]] != "before" or tensor in results:
            raise ProofError(f"{where}, and it is no sum over the loop, nor there before the loop alone")
        for reader in graph.consumers.get(tensor, ()):
            rule, name = theory.rules.get(reader), graph.instructions[reader].name
            if loop.phases[reader] == "after":
                raise ProofError(f"{where}, and {name} reads it after the loop")
            if loop.phases[reader] == "before":
                if rule is not None and rule.random:
                    raise ProofError(f"{where}, and {name} would draw other numbers in each micro-batch")
                stack += [t for t in graph.instructions[reader].outputs if t >= 0]


def check_own_turns(theory: Theory, batches: MicroBatches, program: Program, world: int) -> None:
    """Prove that each of ``world`` devices may run the loop in turns of its own, if the loop says so: no step in it
    is a collective, which all devices have to run equally often. Raises ProofError otherwise."""
    turns = batches.own_turns
    if not turns:
        return
    if len(turns) != world or min(turns) < 1 or max(turns) != batches.count:
        raise ProofError(
            f"{batches.count} micro-batches of {world} devices cannot be turns of their own {list(turns)}"
        )
    before = {t for i, p in enumerate(batches.loop.phases) if p == "before" for t in _made(theory, i)}
    read = {
        (tensor, form)
        for step in program.steps
        if isinstance(step, Compute) and batches.loop.phases[step.instruction] == "in"
        for tensor, form in zip(theory.graph.instructions[step.instruction].inputs, step.row.pre, strict=True)
    }
    sums = {r.tensor for r in batches.loop.leaving if r.form == PARTIAL}
    for step in program.steps:
        if not isinstance(step, Communicate) or step.tensor not in theory.graph.producers:
            continue
        name = theory.graph.tensors[step.tensor].name
        inside = batches.loop.phases[theory.graph.producers[step.tensor]] == "in"
        again = step.tensor in batches.repeated and (step.tensor in before or step.tensor in sums)
        if again or (inside and (step.tensor not in sums or (step.tensor, step.target) in read)):
            raise ProofError(
                f"a collective of {name} is in the loop, which devices run in turns of their own"
            )


def _made(theory: Theory, instruction: int) -> list[int]:
    return [t for t in theory.graph.instructions[instruction].outputs if t >= 0]


class _Proof:
    def __init__(self, theory: Theory, loop: Loop) -> None:
        self.theory, self.graph, self.loop = theory, theory.graph, loop
        self.whole = {c.tensor for c in theory.graph.constants}
        self.in_time: dict[int, int] = {}
        self.later: set[int] = set()

    def before(self, instruction: int) -> None:
        where = self._whole_row(instruction)
        for tensor in self.graph.instructions[instruction].inputs:
            if tensor not in self.whole:
                raise ProofError(
                    f"{where} runs before the loop and reads {self._name(tensor)}, which is not there"
                )
        self.whole.update(self._outputs(instruction))

    def inside(self, instruction: int) -> None:
        node, row = self.graph.instructions[instruction], self.loop.rows[instruction]
        where = self._in_theory(instruction)
        axes = {
            a
            for r, a in zip(self.theory.rows[instruction], self.theory.row_axes[instruction], strict=True)
            if r == row
        }
        if node.is_source:
            raise ProofError(f"{where} is a source, which is read before the loop")
        if not axes & self.loop.axes and PARTIAL not in row.pre:
            raise ProofError(f"{where} runs in the loop by {row}, which divides no samples")
        if not axes & self.loop.axes and row.factor is not None:
            raise ProofError(f"{where} divides an axis in the loop that micro-batches do not divide")
        for tensor, placement in zip(node.inputs, row.pre, strict=True):
            if tensor not in self.whole and (
                placement == REPLICATE or self.in_time.get(tensor, REPLICATE) != placement
            ):
                raise ProofError(
                    f"{where} needs {self._name(tensor)} | {placement_text(placement)} in time, which is not proved"
                )
        for tensor, placement in zip(node.outputs, self._in_time(instruction), strict=True):
            if tensor >= 0:
                if placement == REPLICATE:
                    raise ProofError(f"{where} leaves {self._name(tensor)} whole in each turn of the loop")
                self.in_time[tensor] = placement

    def _in_time(self, instruction: int) -> tuple[Placement, ...]:
        """What the triple in time leaves. Of a copy at a cut it is what its readers need if both are divided alike
        in time: along axes of the samples that have as many units."""
        node, post = self.graph.instructions[instruction], self.loop.rows[instruction].post
        for tensor, placement in zip(node.outputs, post, strict=True):
            if is_before_cut(placement):
                before = self.theory.axes.sharded(tensor, placement)
                after = self.theory.axes.sharded(tensor, after_cut(placement))
                if before is None or after is None or before.units != after.units:
                    raise ProofError(f"{self._name(tensor)} has other units than what it is a copy of")
                if not {before.id, after.id} <= self.loop.axes:
                    raise ProofError(f"{self._name(tensor)} is divided in time, and its original is not")
        return tuple(map(after_cut, post))

    def leave(self) -> None:
        for result in self.loop.leaving:
            if self.in_time.get(result.tensor) != result.form:
                raise ProofError(
                    f"{self._name(result.tensor)} | {placement_text(result.form)} leaves the loop, and is not in it"
                )
            if is_sharded(result.form):
                axis = self.theory.axes.axis(result.tensor, sharded_dim(result.form))
                if axis is None or axis.id not in self.loop.axes:
                    raise ProofError(
                        f"{self._name(result.tensor)} leaves the loop in rows of no axis of the samples"
                    )
            self.later.add(result.tensor)

    def after(self, instruction: int) -> None:
        where = self._whole_row(instruction)
        for tensor in self.graph.instructions[instruction].inputs:
            if tensor not in self.whole and tensor not in self.later:
                raise ProofError(
                    f"{where} runs after the loop and reads {self._name(tensor)}, which is not there"
                )
        self.later.update(self._outputs(instruction))

    def conclude(self) -> None:
        graph = self.graph
        results = [graph.loss, *(o.tensor for o in graph.outputs), *graph.updates]
        results += [p.gradient for p in graph.parameters]
        for tensor in results:
            if tensor is not None and tensor not in self.whole and tensor not in self.later:
                raise ProofError(f"at the end {self._name(tensor)} is not there whole")

    def _in_theory(self, instruction: int) -> str:
        node, row = self.graph.instructions[instruction], self.loop.rows[instruction]
        if row not in self.theory.rows[instruction]:
            raise ProofError(f"{node.name}: the triple {row} is not in the theory")
        return f"instruction {instruction} ({node.name})"

    def _whole_row(self, instruction: int) -> str:
        where, row = self._in_theory(instruction), self.loop.rows[instruction]
        if row.factor is not None or any(p != REPLICATE for p in (*row.pre, *row.post)):
            raise ProofError(f"{where} runs outside of the loop by {row}, which is not the whole op")
        return where

    def _outputs(self, instruction: int) -> list[int]:
        return [t for t in self.graph.instructions[instruction].outputs if t >= 0]

    def _name(self, tensor: int) -> str:
        return self.graph.tensors[tensor].name
