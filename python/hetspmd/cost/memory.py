"""Bytes that a program holds on each device, by liveness over its order (design 6).

Parameters, buffers and inputs are held during the whole step, gradients from where they are produced to the end,
any other tensor from its step to the last that reads it (a view holds what it looks at), and the optimizer's state
always. Buffers that a collective needs for its own use are not counted.

At a step, device j holds ``whole + sum over axes of its share of the axis times cut``: :class:`MemoryProfile` keeps
both parts, so that the largest share that fits is known too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetspmd.balance.lengths import Lengths
from hetspmd.cost.model import Array, Index
from hetspmd.forms import IDENTITY, Form, is_sharded, sharded_dim
from hetspmd.rules.theory import Theory
from hetspmd.synth.program import Communicate, Program

__all__ = ["OPTIMIZER_BYTES", "Holdings", "MemoryProfile", "memory_bytes", "memory_profile"]

OPTIMIZER_BYTES = 8
"""Bytes of optimizer state per parameter element: two float32 moments of Adam."""


@dataclass(frozen=True)
class MemoryProfile:
    """What is held while each step of a program runs, and after the last.

    held         bytes, shape (steps + 1, devices)
    whole        bytes of tensors that every device holds whole, shape (steps + 1)
    cut          bytes, over all devices, of tensors that are sharded, by segment, shape (steps + 1, segments)
    instruction  of the reference graph that runs at each step, or ran last, shape (steps + 1)
    """

    held: Index
    whole: Index
    cut: Index
    instruction: Index

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes that each device holds."""
        return tuple(int(b) for b in self.held.max(axis=0))

    def lacking(self, capacity: Array) -> Array:
        """Bytes that each device lacks, 0 where the program fits."""
        lacking: Array = np.maximum(np.array(self.peaks, dtype=float) - capacity, 0.0)
        return lacking

    def peak_instruction(self, device: int) -> int:
        """The instruction during which a device holds the most."""
        return int(self.instruction[int(self.held[:, device].argmax())])

    def during(self, instruction: int) -> Index:
        """The most bytes that each device holds while an instruction runs or, after it, until the next does."""
        most: Index = self.held[self.instruction == instruction].max(axis=0)
        return most

    def largest_shares(self, capacity: Array) -> Array:
        """The largest sharding ratio with which each device's capacity is kept, if it has the same share of
        every axis; below 0 if even what is whole does not fit."""
        room = capacity[None, :] - self.whole[:, None]
        cut = self.cut.sum(axis=1)[:, None]
        shares = np.where(cut > 0, room / np.maximum(cut, 1), np.where(room >= 0, np.inf, -1.0))
        found: Array = shares.min(axis=0)
        return found


def memory_bytes(
    theory: Theory, program: Program, lengths: Lengths, *, optimizer_bytes: int = OPTIMIZER_BYTES
) -> tuple[int, ...]:
    """Peak bytes per device; ``optimizer_bytes`` per local element of each parameter that has a gradient."""
    return memory_profile(theory, program, lengths, optimizer_bytes=optimizer_bytes).peaks


def memory_profile(
    theory: Theory, program: Program, lengths: Lengths, *, optimizer_bytes: int = OPTIMIZER_BYTES
) -> MemoryProfile:
    """The profile of a program at integer lengths. For several lengths keep its :class:`Holdings`."""
    return Holdings(theory, program, optimizer_bytes=optimizer_bytes).at(lengths)


class Holdings:
    """What a program holds from when to when, whatever the lengths.

    Raises ValueError for a dim that no axis shards.
    """

    def __init__(self, theory: Theory, program: Program, *, optimizer_bytes: int = OPTIMIZER_BYTES) -> None:
        self.theory = theory
        graph = theory.graph
        steps = len(program.steps)
        held: dict[tuple[int, Form], int] = {}  # (tensor, form) -> value
        sizes: list[tuple[int, Form]] = []  # of the value's own storage
        storage: list[int] = []  # value -> the value whose storage it shares
        born: list[int] = []
        last: list[int] = []

        def read(tensor: int, form: Form, at: int) -> int | None:
            value = held.get((tensor, form), held.get((tensor, IDENTITY)))
            if value is not None:
                last[storage[value]] = max(last[storage[value]], at)
            return value

        def add(tensor: int, form: Form, at: int, until: int, base: int | None = None) -> None:
            if (tensor, form) in held:
                return
            held[tensor, form] = len(sizes)
            storage.append(len(sizes) if base is None else storage[base])
            sizes.append((tensor, form))
            born.append(at)
            last.append(until)

        trained = {p.tensor for p in graph.parameters if p.gradient is not None}
        optimized: list[tuple[int, Form]] = []
        self.instruction: Index = np.zeros(steps + 1, dtype=np.int64)
        running = 0
        for at, step in enumerate(program.steps):
            if isinstance(step, Communicate):
                read(step.tensor, step.source, at)
                add(step.tensor, step.target, at, at)
            else:
                running = step.instruction
                instruction = graph.instructions[running]
                bases = [read(t, f, at) for t, f in zip(instruction.inputs, step.row.pre, strict=True)]
                rule = theory.rules.get(running)
                base = bases[0] if rule is not None and rule.alias and bases else None
                for tensor, form in zip(instruction.outputs, step.row.post, strict=True):
                    if tensor < 0:
                        continue
                    if instruction.is_source:
                        add(tensor, form, 0, steps)
                        if tensor in trained:
                            optimized.append((tensor, form))
                    else:
                        add(tensor, form, at, at, base)
            self.instruction[at] = running
        self.instruction[steps] = running
        results = (*program.gradients, *program.outputs, *program.buffers)
        for result in results if program.loss is None else (program.loss, *results):
            read(result.tensor, result.form, steps)

        own = [v for v in range(len(sizes)) if storage[v] == v]
        amounts = [graph.tensors[sizes[v][0]].nbytes for v in own]
        amounts += [graph.tensors[t].numel * optimizer_bytes for t, _ in optimized]
        forms = [sizes[v] for v in own] + optimized
        self._axis: Index = np.array([_axis(theory, t, f) for t, f in forms], dtype=np.int64)
        self._amount: Index = np.array(amounts, dtype=np.int64)
        self._first: Index = np.array([born[v] for v in own] + [0] * len(optimized), dtype=np.int64)
        ends = [last[v] + 1 for v in own] + [steps + 1] * len(optimized)
        self._end: Index = np.array(ends, dtype=np.int64)

    def at(self, lengths: Lengths) -> MemoryProfile:
        """The profile at integer lengths."""
        axes = self.theory.axes.axes
        ones = np.ones((1, lengths.world), dtype=np.int64)
        units = np.concatenate([np.array(lengths.units, dtype=np.int64).reshape(-1, lengths.world), ones])
        of = np.array([*(max(a.units, 1) for a in axes), 1], dtype=np.int64)
        local = units[self._axis] * (self._amount // of[self._axis])[:, None]
        # The segment of each amount's axis; beyond the last, what is whole.
        segment = np.array([*(a.segment for a in axes), self.theory.axes.segments], dtype=np.int64)
        parts = np.zeros((len(self._amount), self.theory.axes.segments + 1), dtype=np.int64)
        parts[np.arange(len(parts)), segment[self._axis]] = self._amount
        over = self._over_time(parts)
        return MemoryProfile(self._over_time(local), over[:, -1], over[:, :-1], self.instruction)

    def _over_time(self, held: Index) -> Index:
        steps = len(self.instruction)
        change = np.zeros((steps + 1, *held.shape[1:]), dtype=np.int64)
        np.add.at(change, self._first, held)
        np.subtract.at(change, self._end, held)
        found: Index = change.cumsum(axis=0)[:steps]
        return found


def _axis(theory: Theory, tensor: int, form: Form) -> int:
    """Id of the axis along which a form is sharded; the number of axes for one that is whole."""
    if not is_sharded(form):
        return len(theory.axes.axes)
    axis = theory.axes.sharded(tensor, form)
    if axis is None:
        name = theory.graph.tensors[tensor].name
        raise ValueError(f"dim {sharded_dim(form)} of {name} has no logical axis and is never sharded")
    return axis.id
