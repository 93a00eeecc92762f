"""Bytes that a program holds on each device, by liveness over its order (design 6).

Parameters, buffers and inputs are held during the whole step, gradients from where they are produced to the end,
any other tensor from its step to the last that reads it (a view holds what it looks at), and the optimizer's state
always. Until it has completed, a collective holds buffers besides, as those of :mod:`hetspmd.run.collectives` do:
at least while it is started, and as long as the simulation of the step (:mod:`hetspmd.cost.overlap`) says where it
is asked. For a tensor of E bytes over n devices, with M the largest share, s a device's share of the source's axis,
t that of the result's, more than the result:

    all_reduce          0
    reduce_scatter      n M E + (M - t) E       what is summed, padded, and a padded result
    grouped_reduce      (1 - t) E               what is summed
    all_gather          (n M - 1) E             padded; while it is cut to size or moved from dim 0, n M E
    grouped_broadcast   0                       while it is moved from dim 0, E
    all_to_all          s E                     what is sent; while the result is put together, (s + t) E

On a lone device a collective is nothing. After the backward the optimizer updates one parameter after the other,
with two temporaries of its size (AdamW's loop in torch; its fused version needs none, its ``foreach`` version,
which torch prefers on GPUs, those of all parameters at once).

At a step, device j holds ``whole + sum over axes of its share of the axis times cut``: :class:`MemoryProfile` keeps
both parts, so that the largest share that fits is known too (at the same M).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

TEMPORARIES = 2
"""Tensors of a parameter's size that the optimizer needs while it updates it."""


@dataclass(frozen=True)
class MemoryProfile:
    """What is held while each step of a program runs, after the last, and while each parameter is updated:
    ``moments`` in all.

    held         bytes, shape (moments, devices)
    whole        bytes of tensors that every device holds whole, shape (moments)
    cut          bytes, over all devices, of tensors that are sharded, by segment, shape (moments, segments)
    instruction  of the reference graph that runs at each moment, or ran last, shape (moments)
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

    def __init__(
        self, theory: Theory, program: Program, *, optimizer_bytes: int = OPTIMIZER_BYTES, alone: bool = False
    ) -> None:  # fmt: skip
        self.theory = theory
        self._program, self._optimizer_bytes, self._alone = program, optimizer_bytes, alone
        self._buffers: list[
            tuple[int, Communicate, int]
        ] = []  # start, collective, where its result is first read
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
                if value in started:
                    self._buffers.append((*started.pop(value), at))
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
        instructions: list[int] = []
        running = 0
        started: dict[int, tuple[int, Communicate]] = {}  # value -> where its collective starts
        for at, step in enumerate(program.steps):
            if isinstance(step, Communicate):
                source = read(step.tensor, step.source, at)
                if (step.tensor, step.target) not in held:
                    started[len(sizes)] = at, step
                add(step.tensor, step.target, at, at, source if alone else None)
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
            instructions.append(running)
        results = (*program.gradients, *program.outputs, *program.buffers)
        for result in results if program.loss is None else (program.loss, *results):
            read(result.tensor, result.form, steps)
        self._buffers += [(at, step, steps) for at, step in started.values()]

        # The optimizer: what it keeps, and a moment for each parameter with its temporaries.
        updates = optimized if optimizer_bytes else []
        moments = steps + 1 + len(updates)
        self.instruction: Index = np.array(instructions + [running] * (moments - steps), dtype=np.int64)
        own = [v for v in range(len(sizes)) if storage[v] == v]
        amounts = [graph.tensors[sizes[v][0]].nbytes for v in own]
        amounts += [graph.tensors[t].numel * optimizer_bytes for t, _ in updates]
        amounts += [graph.tensors[t].nbytes * TEMPORARIES for t, _ in updates]
        forms = [sizes[v] for v in own] + 2 * updates
        self._axis: Index = np.array([_axis(theory, t, f) for t, f in forms], dtype=np.int64)
        self._amount: Index = np.array(amounts, dtype=np.int64)
        at_updates = list(range(steps + 1, moments))
        firsts = [born[v] for v in own] + [0] * len(updates) + at_updates
        self._first: Index = np.array(firsts, dtype=np.int64)
        ends = [last[v] + 1 if last[v] < steps else moments for v in own]
        ends += [moments] * len(updates) + [at + 1 for at in at_updates]
        self._end: Index = np.array(ends, dtype=np.int64)

    def at(self, lengths: Lengths, completed: Mapping[int, int] | None = None) -> MemoryProfile:
        """The profile at integer lengths.

        completed  the step of the program before which each collective, by its own step, has completed; one that is
                   not there completes where its result is first read. Default: all right after they were started
        """
        if lengths.world == 1 and not self._alone:
            return self._on_one.at(lengths)
        axes = self.theory.axes.axes
        ones = np.ones((1, lengths.world), dtype=np.int64)
        units = np.concatenate([np.array(lengths.units, dtype=np.int64).reshape(-1, lengths.world), ones])
        of = np.array([*(max(a.units, 1) for a in axes), 1], dtype=np.int64)
        first, end, axis, amount = self._first, self._end, self._axis, self._amount
        if self._buffers and lengths.world > 1:
            more = np.array(list(self._buffers_at(units, of, completed)), dtype=np.int64).reshape(-1, 4)
            first, end = np.concatenate([first, more[:, 0]]), np.concatenate([end, more[:, 1]])
            axis, amount = np.concatenate([axis, more[:, 2]]), np.concatenate([amount, more[:, 3]])
        local = units[axis] * (amount // of[axis])[:, None]
        # The segment of each amount's axis; beyond the last, what is whole.
        segment = np.array([*(a.segment for a in axes), self.theory.axes.segments], dtype=np.int64)
        parts = np.zeros((len(amount), self.theory.axes.segments + 1), dtype=np.int64)
        parts[np.arange(len(parts)), segment[axis]] = amount
        over = self._over_time(first, end, parts)
        return MemoryProfile(self._over_time(first, end, local), over[:, -1], over[:, :-1], self.instruction)

    @cached_property
    def _on_one(self) -> Holdings:
        """The same where nothing is communicated: what a collective delivers is what it was given."""
        return Holdings(self.theory, self._program, optimizer_bytes=self._optimizer_bytes, alone=True)

    def _buffers_at(
        self, units: Index, of: Index, completed: Mapping[int, int] | None
    ) -> Iterator[tuple[int, int, int, int]]:
        """(first step, step behind the last, axis, bytes over all devices) of what collectives hold for themselves.

        ``units[a, j]`` of ``of[a]`` units of axis a are device j's; the last axis is that of what is whole.
        """
        n, blank = units.shape[1], len(units) - 1
        for start, step, wait in self._buffers:
            size, kind = self.theory.graph.tensors[step.tensor].nbytes, step.kind
            if kind == "all_reduce":
                continue
            sharded = step.source if is_sharded(step.source) else step.target
            axis = _axis(self.theory, step.tensor, sharded)
            largest = size // int(of[axis]) * int(units[axis].max())
            moved = sharded_dim(sharded) != 0
            until = start + 1 if completed is None else min(completed.get(start, wait), wait)
            flight: list[tuple[int, int]] = []
            done: list[tuple[int, int]] = []
            if kind == "reduce_scatter":
                flight = [(blank, (n + 1) * largest), (axis, -size)]
            elif kind == "grouped_reduce":
                flight = [(blank, size), (axis, -size)]
            elif kind == "all_gather":
                flight = [(blank, n * largest - size)]
                done = [(blank, size)] if moved or n * largest > size else []
            elif kind == "grouped_broadcast":
                done = [(blank, size)] if moved else []
            else:
                flight = [(axis, size)]
                done = [(_axis(self.theory, step.tensor, step.target), size)]
            for place, nbytes in flight:
                yield start, max(until, start + 1), place, nbytes
            # Padding is cut off on completion, the rest is put in order where it is waited for.
            last = max(start, (until if kind == "all_gather" and n * largest > size else wait) - 1)
            for place, nbytes in done:
                yield last, last + 1, place, nbytes

    def _over_time(self, first: Index, end: Index, held: Index) -> Index:
        steps = len(self.instruction)
        change = np.zeros((steps + 1, *held.shape[1:]), dtype=np.int64)
        np.add.at(change, first, held)
        np.subtract.at(change, end, held)
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
