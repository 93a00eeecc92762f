"""Bytes that a program holds on each device, by liveness over an order of its steps.

The order is the one that is executed (:mod:`hetspmd.program.schedule`), or the program's own, in which the search
thinks. In either, parameters, buffers and inputs are held during the whole step, gradients from where they are
produced to the end, any other tensor from its step to the last that reads it (a view holds what it looks at), and
the optimizer's state always. Of a whole tensor of which the backward reads no more than slices, copies of these
are held from the forward on (:mod:`hetspmd.program.saved_tensors`). Until it has completed, a collective holds
buffers besides, as those of :mod:`hetspmd.dist.collectives` do: at least while it is started, and as long as the
simulation of the step (:mod:`hetspmd.cost.simulator`) says where it is asked. How many bytes these are, more than
the result, is said by the record of its kind (:mod:`hetspmd.cluster.collective_kinds`).

Where one device holds the whole axis, padded kinds are grouped, and an all-to-all from and to it is nothing.

What is summed and read by nothing afterwards gives its memory to a collective that works in place, such as an
all-reduce, or a reduce-scatter of equal shards along dim 0 (:mod:`hetspmd.lower.reuse`): it and the sum, or the
copy that is summed, are then one.

On a lone device a collective is nothing. After the backward the optimizer updates one parameter after the other,
with two temporaries of its size, and one that is left of the parameter before (AdamW's loop in torch; its fused
version needs none, its ``foreach`` version, which torch prefers on GPUs, those of all parameters at once).

At a step, device j holds ``whole + sum over axes of its share of the axis times cut``: :class:`MemoryProfile` keeps
both parts, so that the largest share that fits is known too (at the same number of its turns).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np

from hetspmd.cluster.collective_buffers import Buffers, Carried, over_time
from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cost.arrivals import awaited, due
from hetspmd.cost.liveness import Liveness, Transit
from hetspmd.cost.loop_memory import AxisPlaces, HeldValue, axis_of, held_in_turns, loop_of
from hetspmd.cost.model import Array, Index
from hetspmd.cost.turn_memory import EACH, InTurns, Turns, kinds_of
from hetspmd.placement import is_sharded, sharded_dim
from hetspmd.program.lengths import Lengths
from hetspmd.program.levels import FlatKey
from hetspmd.program.loop_steps import loop_order, loop_steps
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import Compute, Program
from hetspmd.program.schedule import Places, Schedule, make_schedule, scheduled
from hetspmd.rules.theory import Theory

OPTIMIZER_BYTES = 8
"""Bytes of optimizer state per parameter element: two float32 moments of Adam."""

TEMPORARIES = 2
"""Tensors of a parameter's size that the optimizer needs while it updates it, beside one of the size of the
parameter before, which its loop lets go of when it has another."""


@dataclass(frozen=True)
class MemoryProfile:
    """What is held while each step of a program runs, after the last, and while each parameter is updated:
    ``moments`` in all.

    by_kind      bytes, shape (moments, kinds); devices of one kind have as much of everything
    kind         of each device, shape (devices)
    whole        bytes of tensors that every device holds whole, shape (moments)
    cut          bytes, over all devices, of tensors that are sharded, by segment, shape (moments, segments)
    in_turn      the same of those of which a device holds the rows of a turn, of a micro-batch
    times        how many micro-batches' rows each device has in a turn, shape (devices)
    instruction  of the reference graph that runs at each moment, or ran last, shape (moments)
    apart        moments of turns that a device does not have, shape (moments, devices); None where it has all
    """

    by_kind: Index
    kind: Index
    whole: Index
    cut: Index
    in_turn: Index
    times: Array
    instruction: Index
    apart: Index | None = None

    @cached_property
    def held(self) -> Index:
        """Bytes that each device holds, shape (moments, devices)."""
        held: Index = self.by_kind[:, self.kind]
        return held

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes that each device holds."""
        return tuple(self.by_kind.max(axis=0)[self.kind].tolist())

    def lacking(self, capacity: Array) -> Array:
        """Bytes that each device lacks, 0 where the program fits."""
        lacking: Array = np.maximum(np.array(self.peaks, dtype=float) - capacity, 0.0)
        return lacking

    def peak_instruction(self, device: int) -> int:
        """The instruction during which a device holds the most."""
        return int(self.instruction[int(self.by_kind[:, self.kind[device]].argmax())])

    def during(self, instruction: int) -> Index:
        """The most bytes that each device holds while an instruction runs or, after it, until the next does."""
        most: Index = self.by_kind[self.instruction == instruction].max(axis=0)[self.kind]
        return most

    def largest_shares(self, capacity: Array) -> Array:
        """The largest sharding ratio with which each device's capacity is kept, if it has the same share of
        every axis; below 0 if even what is whole does not fit."""
        room = capacity[None, :] - self.whole[:, None]
        cut = self.cut.sum(axis=1)[:, None] + self.in_turn.sum(axis=1)[:, None] * self.times
        shares = np.where(cut > 0, room / np.maximum(cut, 1), np.where(room >= 0, np.inf, -1.0))
        if self.apart is not None:
            shares[self.apart] = np.inf
        largest: Array = shares.min(axis=0)
        return largest


def each_its_own(profiles: Sequence[MemoryProfile]) -> MemoryProfile:
    """The profile of devices of which each holds what it does in its own; what all hold is the least of them."""
    first = profiles[0]
    return replace(
        first,
        by_kind=np.stack([p.by_kind[:, p.kind[device]] for device, p in enumerate(profiles)], axis=1),
        kind=np.arange(len(profiles)),
        whole=np.min([profile.whole for profile in profiles], axis=0),
        cut=np.min([profile.cut for profile in profiles], axis=0),
    )


def memory_profile(
    theory: Theory,
    program: Program,
    lengths: Lengths,
    *,
    optimizer_bytes: int = OPTIMIZER_BYTES,
    batches: MicroBatches | None = None,
) -> MemoryProfile:
    """The profile of a program that has no schedule yet, in its own order, at integer lengths. Which of its steps
    are the backward's, and what these read of the forward, is as a schedule without buckets would have it."""
    schedule = make_schedule(theory, program)
    return Holdings(theory, program, schedule, optimizer_bytes=optimizer_bytes, batches=batches).at(lengths)


class Holdings:
    """What a program holds from when to when, whatever the lengths.

    ``executed``: in the order of its schedule, with buckets and without steps that no result needs; else in its
    own. ``batches``: in micro-batches. Raises ValueError for a dim that no axis shards.
    """

    def __init__(
        self,
        theory: Theory,
        program: Program,
        schedule: Schedule,
        *,
        optimizer_bytes: int = OPTIMIZER_BYTES,
        alone: bool = False,
        executed: bool = False,
        batches: MicroBatches | None = None,
    ) -> None:
        self.theory = theory
        self._batches, self._places = batches, AxisPlaces(theory, batches)
        self._program, self._schedule, self._optimizer_bytes = program, schedule, optimizer_bytes
        self._alone, self._executed = alone, executed
        order: Sequence[Places] = [(place,) for place in range(len(program.steps))]
        if executed:
            order = (*schedule.forward, *schedule.backward)
            if batches is not None:
                order = loop_order(theory.graph, program, schedule, batches)
        self._backward = len(schedule.forward) if executed and batches is None else 0
        self._moment = {place: at for at, places in enumerate(order) for place in places}
        instructions, live = self._followed(order)
        # Collectives, by id, that work in the memory of what they are given.
        self._spare = live.give_memory()
        self._tell(live, instructions, optimizer_bytes)

    def _followed(self, order: Sequence[Places]) -> tuple[list[int], Liveness]:
        """The instruction that runs or ran last at each step of the order, and what the steps hold."""
        program, schedule = self._program, self._schedule
        slices = {s.key for s in schedule.saved if s.how == "slice"}
        live = Liveness(self.theory, slices, alone=self._alone)
        backward = {place for places in schedule.backward for place in places}
        steps = program.steps
        live.follow(
            [
                (
                    steps[places[0]] if len(places) == 1 else scheduled(program, places),
                    places[0] in backward,
                    False,
                )
                for places in order
            ],
            len(order),
        )
        instructions: list[int] = []
        running = 0
        for places in order:
            step = steps[places[0]]
            if isinstance(step, Compute):
                running = step.instruction
            instructions.append(running)
        results = (*([program.loss] if program.loss else []), *program.outputs, *program.buffers)
        live.leave(
            [(r.tensor, r.form) for r in results],
            [(r.tensor, r.form) for r in program.gradients],
            len(order),
        )
        return instructions, live

    def _tell(self, live: Liveness, instructions: list[int], optimizer_bytes: int) -> None:
        """What is held from which moment to which. Behind the steps stand the optimizer's: what it keeps, and a
        moment for each parameter with its temporaries."""
        graph, steps = self.theory.graph, len(instructions)
        order = {p.tensor: place for place, p in enumerate(graph.parameters)}
        updates = sorted(live.optimized, key=lambda key: order[key[0]]) if optimizer_bytes else []
        moments = steps + 1 + len(updates)
        after = [instructions[-1] if instructions else 0] * (moments - steps)
        own = [v for v, storage in enumerate(live.storage) if storage == v]
        first, end = list(live.born), [last + 1 if last < steps else moments for last in live.last]
        roles, more = [EACH] * len(own), list[HeldValue]()
        self._turns = Turns(("only",), (0, steps), steps, moments)
        self._transits = [(transit, EACH) for transit in live.transits]
        if self._batches is not None and (loop := loop_of(self._batches, instructions)) is not None:
            looped = loop_steps(graph, self._batches, self._program).values
            if self._executed:
                # All devices run the loop; which turns each has is asked for at their lengths.
                kinds = kinds_of(self._batches.own_turns or (self._batches.count,))
                self._turns = Turns(kinds, loop, steps, moments)
                in_turns = InTurns(self._batches, live, own, loop, looped)
                roles, more = in_turns.roles, in_turns.more
                self._transits = list(in_turns.transits(live.transits))
            else:
                more = held_in_turns(self._batches, live, (own, first, end), loop, looped)
        self.instruction = self._turns.of_each(np.array(instructions + after, dtype=np.int64))
        of = self._places.of_keys([cast(FlatKey, live.sizes[v]) for v in own])
        held = [(*self._places.of(s.key[0], s.key[1], joined=s.joined), s.first, s.end) for s in more]
        axes = [axis_of(self.theory, tensor, form) for tensor, form in updates]
        for axis, (tensor, _) in zip(axes, updates, strict=True):
            held.append((axis, graph.tensors[tensor].numel * optimizer_bytes, 0, moments))
        for at, (axis, (tensor, _)) in enumerate(zip(axes, updates, strict=True), steps + 1):
            held.append((axis, graph.tensors[tensor].nbytes * TEMPORARIES, at, at + 1))
            if at + 1 < moments:
                held.append((axis, graph.tensors[tensor].nbytes, at + 1, at + 2))
        columns = [*zip(*held, strict=True)] or [()] * 4
        told = ([a for a, _ in of], [n for _, n in of], [first[v] for v in own], [end[v] for v in own])
        self._axis, self._amount, self._first, self._end = (
            np.array([*values, *beside], dtype=np.int64) for values, beside in zip(told, columns, strict=True)
        )
        self._roles = np.array([*roles, *(EACH for _ in held)], dtype=np.int64)

    def at(
        self, lengths: Lengths, completed: Mapping[int, int] | None = None, *, buffers: bool = True
    ) -> MemoryProfile:
        """The profile at integer lengths; ``buffers``: with what collectives hold for themselves.

        completed  the step of the program before which each collective, by its own step, has completed; one that is
                   not there completes where its result is first read. Default: all right after they were started
        """
        if lengths.world == 1 and not self._alone:
            return self._on_one.at(lengths, buffers=buffers)
        completed = self._moments(completed)
        units, of = self._places.units(lengths)
        held = [self._first, self._end, self._axis, self._amount, self._roles]
        if buffers and self._transits and lengths.world > 1:
            more = np.array(list(self._buffers_at(units, of, completed)), dtype=np.int64).reshape(-1, 5)
            held = [np.concatenate([one, more[:, c]]) for c, one in enumerate(held)]
        first, end, axis, amount, roles = held
        turns = (1,) * lengths.world if self._batches is None else self._batches.turns_of(lengths.world)
        apart = self._turns.apart(turns)
        one, kind = _kinds(units, turns)
        local = units[:, one][axis] * (amount // of[axis])[:, None]
        segment = self._places.segments
        segments = self.theory.axes.segments
        parts = np.zeros((len(amount), 2 * segments + 1), dtype=np.int64)
        parts[np.arange(len(parts)), segment[axis]] = amount
        over = self._over_time(first, end, roles, np.concatenate([local, parts], axis=1))
        each, over = over[:, : len(one)], over[:, len(one) :]
        if apart is not None:
            each[apart[:, one]] = 0
        return MemoryProfile(
            each,
            kind,
            over[:, segments],
            over[:, :segments],
            over[:, segments + 1 :],
            np.array(self._places.times(lengths.world)),
            self.instruction,
            apart,
        )

    @cached_property
    def _on_one(self) -> Holdings:
        """The same where nothing is communicated: what a collective delivers is what it was given."""
        return Holdings(
            self.theory,
            self._program,
            self._schedule,
            optimizer_bytes=self._optimizer_bytes,
            alone=True,
            executed=self._executed,
            batches=self._batches,
        )

    def _moments(self, completed: Mapping[int, int] | None) -> dict[int, int] | None:
        """What is said of steps of the program, of their places in the order, as far as ranks see to it
        (:mod:`hetspmd.cost.arrivals`). A collective of a loop that ends in the next turn is on its way to the end
        of its own."""
        if completed is None:
            return None
        at = self._moment
        spans = ((at[s], at[until]) for s, until in completed.items() if s in at and until in at)
        ended = {start: until for start, until in spans if self._batches is None or start < until}
        return due(self._transits, ended, self._backward)

    def awaited(self, lengths: Lengths, completed: Mapping[int, int]) -> dict[FlatKey, tuple[FlatKey, ...]]:
        """By what a collective makes, what those make that are to have completed before it starts, so that none
        holds its buffers for longer than :meth:`at` counts them. ``completed``: as of :meth:`at`."""
        units, of = self._places.units(lengths)
        holding = [
            transit for transit, _, _, buffers in self._carried(units, of) if any(map(any, buffers[:2]))
        ]
        return awaited(self._transits, self._moments(completed) or {}, holding)

    def _carried(self, units: Index, of: Index) -> Iterator[tuple[Transit, int, tuple[int, int], Buffers]]:
        """Collectives, what each is to a loop, the axes of what is sharded and of the result, and what they hold
        for themselves.

        ``units[a, j]`` of ``of[a]`` units of axis a are device j's; the last axis is that of what is whole.
        """
        n = units.shape[1]
        whole, most = of.tolist(), units.max(axis=1).tolist()
        holders = np.count_nonzero(units, axis=1).tolist()
        for transit, role in self._transits:
            step, shared = transit.step, transit.shared
            kind = KINDS[step.kind]
            if kind.buffers is None:
                continue
            sharded = step.source if is_sharded(step.source) else step.target
            axis, size = self._places.of(step.tensor, sharded)
            target = self._places.of(step.tensor, step.target)[0] if kind.sharded_ends == 2 else axis
            if not shared and holders[axis] == 1:
                # One rank holds everything: nothing is padded, and moved to itself.
                kind = KINDS[kind.lone or kind.name]
                if kind.sharded_ends == 2 and np.array_equal(units[axis] > 0, units[target] > 0):
                    continue
            if kind.buffers is None:
                continue
            carried = Carried(
                world=n,
                nbytes=size,
                largest=size // whole[axis] * most[axis],
                several=holders[axis] > 1,
                moved=is_sharded(sharded) and sharded_dim(sharded) != 0,
                bucket=shared,
                spare=id(step) in self._spare,
            )
            yield transit, role, (axis, target), kind.buffers(carried)

    def _buffers_at(
        self, units: Index, of: Index, until: Mapping[int, int] | None
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """(first step, step behind the last, axis, bytes over all devices, what it is to a loop) of what
        collectives hold for themselves. ``until``: the step before which each has completed, by its start."""
        blank = self._places.whole
        for transit, role, (axis, target), buffers in self._carried(units, of):
            start, wait = transit.start, transit.wait
            ended = start + 1 if until is None else min(until.get(start, wait), wait)
            for first, end, held in over_time(buffers, start, wait, ended):
                for place, nbytes in ((blank, held.whole), (axis, held.sharded), (target, held.target)):
                    if nbytes:
                        yield first, end, place, nbytes, role

    def _over_time(self, first: Index, end: Index, roles: Index, held: Index) -> Index:
        moments = len(self.instruction)
        change = np.zeros((moments + 1, *held.shape[1:]), dtype=np.int64)
        for begins, ends in self._turns.held(first, end, roles):
            np.add.at(change, begins, held)
            np.subtract.at(change, ends, held)
        totals: Index = change.cumsum(axis=0)[:moments]
        return totals


def _kinds(units: Index, turns: Sequence[int]) -> tuple[list[int], Index]:
    """The first device of each kind, of those that have as many units of everything and as many ``turns``, and the
    kind of each device."""
    first: dict[tuple[bytes, int], int] = {}
    columns = zip(map(bytes, np.ascontiguousarray(units.T)), turns, strict=True)
    alike = [first.setdefault(column, device) for device, column in enumerate(columns)]
    one = list(first.values())
    return one, np.searchsorted(one, alike)
