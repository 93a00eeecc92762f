"""Liveness along an order of steps: where each value is made and last read, and whose storage it has."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.placement import PARTIAL, REPLICATE
from hetspmd.program.buckets import Bucket, members
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.program.values import Key, reads, writes
from hetspmd.rules.theory import Theory

__all__ = ["Liveness", "Sum", "Transit"]

_RESHAPE = "aten._unsafe_view.default"
"""What the trace makes of a reshape that cannot be a view, and of a product's result. Of an expanded tensor, which
has more bytes than its storage, it is a copy."""


@dataclass(frozen=True, slots=True)
class Transit:
    """A collective, started at step ``start`` (``shared``: in a bucket), whose result is first read at ``wait``."""

    start: int
    step: Communicate
    shared: bool
    wait: int


@dataclass(frozen=True, slots=True)
class Sum:
    """A collective of step ``at`` that sums the value ``source`` into the value ``result``; ``late``: in the
    backward."""

    step: Communicate
    source: int
    result: int
    at: int
    late: bool


class Liveness:
    """What the steps hold, in the order in which they are told by :meth:`communicate` and :meth:`compute`.

    Values are numbered as they are made. Value v holds ``sizes[v]`` (a tensor in a form) from step ``born[v]`` to
    ``last[v]``, in the storage of value ``storage[v]``, which is v itself or what v is a view of; ``side[v]`` says
    whether the backward makes it. ``slices``: what the backward reads of whole tensors, of which copies are made.
    ``alone``: on a lone device, where a collective delivers what it was given.
    """

    def __init__(self, theory: Theory, slices: Container[Key], *, alone: bool) -> None:
        self._theory, self._slices, self._alone = theory, slices, alone
        self.sizes: list[Key] = []
        self.storage: list[int] = []
        self.born: list[int] = []
        self.last: list[int] = []
        self.side: list[bool] = []
        self.sums: list[Sum] = []
        self.transits: list[Transit] = []
        self.optimized: list[Key] = []
        self._values: dict[Key, int] = {}
        self._sliced: dict[Key, int] = {}  # where a slice is first cut from what is whole
        self._started: dict[int, tuple[int, Communicate, bool]] = {}  # value -> where its collective starts
        self._ready: dict[int, int] = {}  # value -> where its collective is waited for
        self._trained = {p.tensor for p in theory.graph.parameters if p.gradient is not None}
        self._late = False

    def communicate(self, step: Communicate | Bucket, at: int, *, late: bool) -> None:
        """A collective, or several as one, starts at step ``at``; ``late``: in the backward."""
        self._late = late
        for move in members(step):
            source = self._read((move.tensor, move.source), at, late=late)
            target = move.tensor, move.target
            if target not in self._values:
                result = len(self.sizes)
                self._started[result] = at, move, isinstance(step, Bucket)
                if source is not None and move is step and move.source == PARTIAL:
                    self.sums.append(Sum(move, source, result, at, late))
            self._add(target, at, at, source if self._alone else None)

    def compute(self, step: Compute, at: int, steps: int, *, late: bool) -> None:
        """An instruction runs at step ``at`` of ``steps``; what a source makes is there from the beginning to the
        end."""
        self._late = late
        graph = self._theory.graph
        instruction = graph.instructions[step.instruction]
        bases = [self._read(key, at, late=late) for key in reads(graph, step)]
        rule = self._theory.rules.get(step.instruction)
        base = bases[0] if rule is not None and rule.alias and bases else None
        if base is not None and instruction.op == _RESHAPE:
            shown = graph.tensors[self.sizes[self.storage[base]][0]].nbytes
            base = None if graph.tensors[instruction.outputs[0]].nbytes > shown else base
        for key in writes(graph, step):
            if instruction.is_source:
                self._add(key, 0, steps)
                if key[0] in self._trained:
                    self.optimized.append(key)
            else:
                self._add(key, at, at, base)

    def leave(self, program: Program, steps: int) -> None:
        """What the program leaves behind is held to the end, and so is what no step waits for."""
        for result in (program.loss, *program.outputs, *program.buffers):
            if result is not None:
                self._read((result.tensor, result.form), steps, late=False)
        for result in program.gradients:
            self._read((result.tensor, result.form), steps, late=True)
        self.transits += [Transit(*started, steps) for started in self._started.values()]

    def give_memory(self) -> set[int]:
        """The ids of collectives that work in the memory of what they sum, since nothing reads it afterwards. A
        whole sum that is made there is one step younger."""
        tensors, spare = self._theory.graph.tensors, set[int]()
        for each in self.sums if not self._alone else ():
            base = self.storage[each.source]
            whole = self.sizes[base][1] == PARTIAL and tensors[self.sizes[base][0]].nbytes
            free = self.last[base] == each.at and self.side[base] == each.late
            if free and whole == tensors[each.step.tensor].nbytes and KINDS[each.step.kind].in_place:
                spare.add(id(each.step))
                if KINDS[each.step.kind].target == "replicated":
                    self.born[each.result] = each.at + 1
        return spare

    def _read(self, key: Key, at: int, *, late: bool) -> int | None:
        whole = self._values.get((key[0], REPLICATE))
        value = self._values.get(key, whole)
        if value is None:
            return None
        if value == whole and late and key in self._slices:
            self._add(key, self._sliced.get(key, self._ready.get(value, self.born[value])), at)
            value = self._values[key]
        self._sliced.setdefault(key, at)
        owner = self.storage[value]
        self.last[owner] = max(self.last[owner], at)
        if value in self._started:
            self.transits.append(Transit(*self._started.pop(value), at))
            self._ready[value] = at
        return value

    def _add(self, key: Key, at: int, until: int, base: int | None = None) -> None:
        if key in self._values:
            return
        self._values[key] = len(self.sizes)
        self.storage.append(len(self.sizes) if base is None else self.storage[base])
        self.side.append(self._late)
        self.sizes.append(key)
        self.born.append(at)
        self.last.append(until)
