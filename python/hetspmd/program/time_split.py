"""What of a step can be divided along its samples: the triple in time of each instruction, and its phase.

See :mod:`hetspmd.program.micro_batches` for what they mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hetspmd.errors import MicroBatchError
from hetspmd.placement import PARTIAL, REPLICATE, Placement, after_cut, is_sharded
from hetspmd.program.program import Result
from hetspmd.rules.nested import runs_whole
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import PARAMETER, TANGENT, Graph, Instruction

Phase = Literal["before", "in", "after"]


@dataclass(frozen=True)
class Loop:
    """When each instruction of a step runs, and by which triple.

    Attributes:
        phases: The phase of each instruction.
        rows: The triple in time of each instruction; one that runs whole outside of the loop.
        axes: The logical axes that micro-batches divide: those of the samples.
        leaving: What the loop leaves to what comes after it, and to the step's results, in its placement in time:
            ``partial`` is summed over the micro-batches, ``shard(d)`` joined along dim d.
    """

    phases: tuple[Phase, ...]
    rows: tuple[Triple, ...]
    axes: frozenset[int]
    leaving: tuple[Result, ...]


def split_in_time(theory: Theory) -> Loop:
    """The loop over micro-batches of a step, made once for a theory.

    It divides dim 0 of all inputs where that can be. Else some inputs have another dim there (positions, a mask
    over pairs of tokens), and one kind of dim 0 after the other is left whole, or is divided alone.

    Raises MicroBatchError, which names the op and the module's line, where the step cannot be split exactly.
    """
    kept: list[Loop] = vars(theory).setdefault("_in_time", [])
    if not kept:
        kept.append(_split(theory))
    return kept[0]


def _split(theory: Theory) -> Loop:
    first: MicroBatchError | None = None
    for axes in _choices(theory):
        splitting = _Splitting(theory, axes)
        try:
            loop = splitting.run()
        except MicroBatchError as error:
            first = first or error
            continue
        if first is None or splitting.trains:
            return loop
    assert first is not None
    raise first


def _choices(theory: Theory) -> list[frozenset[int]]:
    """Sets of axes to divide, in the order in which they are tried: all those of dim 0, all but one kind, one kind.
    The kind that most bytes of the inputs have is left out last, and is the first to be divided alone."""
    graph, kinds, nbytes = theory.graph, dict[int, set[int]](), Counter[int]()
    for axis in theory.axes.axes:
        if axis.id in theory.batch_axes:
            kinds.setdefault(axis.group, set()).add(axis.id)
    for each in graph.inputs:
        axes = [theory.axes.axis(each.tensor, dim) for dim in range(len(graph.tensors[each.tensor].shape))]
        nbytes.update({a.group: graph.tensors[each.tensor].nbytes for a in axes if a is not None})
    order = sorted(kinds, key=lambda group: (nbytes[group], group))
    sets = [theory.batch_axes]
    if len(order) > 2:
        sets += [theory.batch_axes - kinds[group] for group in order]
    if len(order) > 1:
        sets += [frozenset(kinds[group]) for group in reversed(order)]
    return sets


_AFTER: Final = -1
"""The placement in time of a tensor that is there after the loop alone."""


class _Splitting:
    """Walks the graph once. What depends on inputs alone may be moved before the loop when it is needed whole."""

    def __init__(self, theory: Theory, axes: frozenset[int]) -> None:
        self.theory, self.graph = theory, theory.graph
        self.axes = axes
        self.phases: dict[int, Phase] = {}
        self.rows: dict[int, Triple] = {}
        self.placements: dict[int, Placement] = {c.tensor: REPLICATE for c in theory.graph.constants}
        """Of each tensor the placement in time: REPLICATE where it is there before the loop."""
        self.sampled = {i.tensor for i in theory.graph.inputs}
        """The tensors that depend on inputs."""
        self.trained: set[int] = set()
        """The tensors that depend on parameters or on the tangent."""

    def run(self) -> Loop:
        for instruction in self.graph.instructions:
            self._note(instruction)
            if instruction.is_source:
                self._run_whole(instruction, "before")
            else:
                self._place(instruction)
        order = range(len(self.graph.instructions))
        return Loop(
            phases=tuple(self.phases[i] for i in order),
            rows=tuple(self.rows[i] for i in order),
            axes=self.axes,
            leaving=tuple(Result(t, self.placements[t]) for t in self._leaving()),
        )

    @property
    def trains(self) -> bool:
        """Whether the loop computes anything of the parameters."""
        return any(
            self.phases[i.id] == "in" and not self.trained.isdisjoint(i.outputs)
            for i in self.graph.instructions
        )

    def _note(self, instruction: Instruction) -> None:
        outputs = [t for t in instruction.outputs if t >= 0]
        if instruction.op in (PARAMETER, TANGENT) or not self.trained.isdisjoint(instruction.inputs):
            self.trained.update(outputs)
        if not self.sampled.isdisjoint(instruction.inputs):
            self.sampled.update(outputs)

    def _place(self, instruction: Instruction) -> None:
        inputs = instruction.inputs
        row = self._row_in_loop(instruction)
        if row is not None:
            for tensor, placement in zip(inputs, row.pre, strict=True):
                if not self._has(tensor, placement):
                    self._move_before(tensor)
            self.phases[instruction.id], self.rows[instruction.id] = "in", row
            self._leave(instruction, in_time(row))
        elif all(self._can_be_before(t) for t in inputs):
            for tensor in inputs:
                self._move_before(tensor)
            self._run_whole(instruction, "before")
        elif all(self.placements[t] in (REPLICATE, PARTIAL, _AFTER) for t in inputs):
            self._run_whole(instruction, "after")
        else:
            raise MicroBatchError(self._obstacle(instruction))

    def _row_in_loop(self, instruction: Instruction) -> Triple | None:
        """The triple by which the instruction runs once for each micro-batch, None if it has to run otherwise: of
        those that are possible the one for which the least has to be there whole."""
        if not self._per_sample(instruction):
            return None
        possible = [row for row, _ in self._divided(instruction) if self._missing(instruction, row) is None]
        return min(possible, key=lambda row: self._bytes_whole(instruction, row), default=None)

    def _per_sample(self, instruction: Instruction) -> bool:
        """Whether the instruction works on samples: it depends on inputs, reads what the loop computes, or its
        results have rows of the batch."""
        return (
            not self.sampled.isdisjoint(instruction.inputs)
            or any(self.placements[t] not in (REPLICATE, _AFTER) for t in instruction.inputs)
            or any(
                row.factor is not None and any(map(is_sharded, row.post))
                for row, _ in self._divided(instruction)
            )
        )

    def _divided(self, instruction: Instruction) -> Iterator[tuple[Triple, int | None]]:
        """The triples that divide the samples or work on summands, with their logical axes."""
        pairs = zip(self.theory.rows[instruction.id], self.theory.row_axes[instruction.id], strict=True)
        for row, axis in pairs:
            if axis in self.axes if axis is not None else PARTIAL in row.pre and row.factor is None:
                yield row, axis

    def _missing(self, instruction: Instruction, row: Triple) -> int | None:
        """The position of the first input that cannot be had as ``row`` needs it, None if all can. Of a sum of
        summands alone at least one comes from the loop."""
        summands = [t for t, p in zip(instruction.inputs, row.pre, strict=True) if p == PARTIAL]
        if summands and row.factor is None and all(self.placements[t] != PARTIAL for t in summands):
            return row.pre.index(PARTIAL)
        for position, (tensor, placement) in enumerate(zip(instruction.inputs, row.pre, strict=True)):
            if not self._has(tensor, placement) and not self._can_be_before(tensor):
                return position
        return None

    def _bytes_whole(self, instruction: Instruction, row: Triple) -> int:
        """The bytes of samples that ``row`` needs whole."""
        return sum(
            self.graph.tensors[tensor].nbytes
            for tensor, placement in zip(instruction.inputs, row.pre, strict=True)
            if tensor in self.sampled and (placement == REPLICATE or not self._has(tensor, placement))
        )

    def _has(self, tensor: int, placement: Placement) -> bool:
        """Whether a tensor is there in a placement in the loop: what is whole is sliced, or the first summand."""
        return self.placements[tensor] in (REPLICATE, placement)

    def _can_be_before(self, tensor: int) -> bool:
        return self.placements[tensor] == REPLICATE or tensor not in self.trained

    def _move_before(self, tensor: int) -> None:
        """Let a tensor be computed whole before the loop, with all that it depends on."""
        if self.placements[tensor] == REPLICATE:
            return
        instruction = self.graph.producer(tensor)
        for needed in instruction.inputs:
            self._move_before(needed)
        self._run_whole(instruction, "before")

    def _run_whole(self, instruction: Instruction, phase: Phase) -> None:
        whole = next(row for row in self.theory.rows[instruction.id] if runs_whole(row))
        self.phases[instruction.id], self.rows[instruction.id] = phase, whole
        self._leave(instruction, [REPLICATE if phase == "before" else _AFTER] * len(instruction.outputs))

    def _leave(self, instruction: Instruction, placements: Sequence[Placement]) -> None:
        for tensor, placement in zip(instruction.outputs, placements, strict=True):
            if tensor >= 0:
                self.placements[tensor] = placement

    def _leaving(self) -> list[int]:
        """What the loop computes and what comes after it reads, or is a result of the step."""
        read = {t for i in self.graph.instructions if self.phases[i.id] == "after" for t in i.inputs}
        return sorted(
            t for t in read | results_of(self.graph) if self.placements[t] not in (REPLICATE, _AFTER)
        )

    def _obstacle(self, instruction: Instruction) -> str:
        """Why the step cannot be split at an instruction."""
        where = f"{instruction.op} in {instruction.source or 'the model'}"
        along = [row for row, axis in self._divided(instruction) if axis is not None]
        if not along:
            return f"{where} has no triple along the samples: it needs the whole batch at once{INSTEAD}"
        positions = [p for row in along if (p := self._missing(instruction, row)) is not None]
        tensor = self.graph.tensors[instruction.inputs[max(positions, default=0)]]
        maker = self.graph.producer(tensor.id)
        return (
            f"{where} needs {tensor.name} of the whole batch ({maker.op} in {maker.source or 'the model'}), which "
            f"is known only when all micro-batches have run{INSTEAD}"
        )


def in_time(row: Triple) -> tuple[Placement, ...]:
    """What a triple in time leaves: segments divide devices, so that a copy at a cut lies in time as what it is a
    copy of."""
    return tuple(map(after_cut, row.post))


def results_of(graph: Graph) -> set[int]:
    """The tensors that a step leaves: its loss, outputs, gradients and what it writes."""
    results = {graph.loss, *(o.tensor for o in graph.outputs), *(p.gradient for p in graph.parameters)}
    return {t for t in results if t is not None} | set(graph.updates)


INSTEAD: Final = "; the step cannot be computed in micro-batches: use one micro-batch"
"""The end of a refusal."""
