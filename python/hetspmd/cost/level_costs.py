"""What the accelerators of machines add to a step across machines: seconds and bytes.

The cost model of virtual devices (:mod:`hetspmd.cluster.machines`) has a machine compute as fast as its k
accelerators together, and counts the sums of gradients inside. What it leaves out is added here, for the slowest
machine of each step and as if nothing overlapped it. For a machine's part of E bytes, inside latency L and
bandwidth b:

    all-reduce inside                   2 L + 2 (k - 1) / k E / b
    reduce-scatter, all-gather inside   L + (k - 1) / k E / b          to and from the first, in slices
    all-to-all inside                   L + E / k / b
    to and from the first, whole        L + E / b                      a reduce, a broadcast

of gradients only the latencies; a bucket inside has one latency, as has what is whole of one between machines.
Where the inner row divides nothing, the seconds in which one accelerator runs what the machine was supposed to
run, less those, are added too.

Bytes are counted by liveness over the order of execution on the first accelerator of each machine, which has
the largest part of what is divided: parameters, buffers and inputs always, gradients to the end, other values
until they are last read, and while a collective between machines is on its way what the first accelerator
collects for it, its result and its padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.collective_buffers import NOTHING, Carried, HeldBytes
from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cluster.devices import Machine
from hetspmd.cluster.machines import accelerator
from hetspmd.cost.memory import OPTIMIZER_BYTES, TEMPORARIES
from hetspmd.cost.model import CostModel
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded
from hetspmd.program.lengths import Lengths
from hetspmd.program.level_layout import LevelLayout, RankPlace
from hetspmd.program.levels import (
    Across,
    Both,
    InsideCollective,
    Key,
    Nested,
    NestedStep,
    Together,
    between,
    provider,
    reads_of,
    within,
    written_by,
)
from hetspmd.trace.graph import ITEM_SIZES

__all__ = ["inside_bytes", "inside_seconds"]


def inside_seconds(costs: CostModel, lengths: Lengths, nested: Nested, layout: LevelLayout) -> float:
    """Seconds that the accelerators add to a step that ``costs`` predicts. ``costs.cluster`` has the active
    machines."""
    devices = costs.cluster.devices
    each = Cluster(tuple(map(accelerator, devices)), costs.cluster.network)
    alone = CostModel(costs.theory, each)
    found = 0.0
    for step in (*nested.forward, *nested.backward):
        if layout.is_nothing(step):
            continue
        if not isinstance(step, Both):
            times = [
                0.0 if device.machine is None else _seconds(layout, step, machine, device.machine)
                for machine, device in enumerate(devices)
            ]
            found += max(times)
        elif step.inner.factor is None:
            row = costs.row_index(step.instruction, step.outer)
            whole = np.array(alone.row_seconds(step.instruction, row, lengths))
            part = np.array(costs.row_seconds(step.instruction, row, lengths))
            found += float(max(whole.max() - part.max(), 0.0))
    return found


def _seconds(
    layout: LevelLayout, step: InsideCollective | Across | Together, machine: int, of: Machine
) -> float:
    latency, bandwidth, k = of.inside.latency, of.inside.bandwidth, of.accelerators

    def moved(tensor: int, outer: Placement) -> float:
        if tensor in layout.theory.deferred:
            return 0.0
        return _bytes(layout, (tensor, outer, REPLICATE), machine) / bandwidth

    if inside := within(step):
        # Shards are even: M is 1 / k, and an exchange sends no more than one.
        terms = KINDS[step.kind].formula(k)
        whole = sum(moved(m.tensor, m.outer) for m in inside)
        latencies = terms.latency + terms.per_shard * k
        return (
            latencies * latency
            + (terms.per_byte + terms.per_largest / k) * whole
            + terms.per_exchange * whole / k
        )
    members = between(step)
    cut = sum(is_sharded(m.collected) for m in members) + sum(is_sharded(m.handed_out) for m in members)
    whole_parts = (
        any(m.collected == PARTIAL for m in members),
        any(m.handed_out == REPLICATE for m in members),
    )
    found = (cut + sum(whole_parts)) * latency
    for m in members:
        if m.collected != REPLICATE:
            found += moved(m.tensor, m.source) * (1 if m.collected == PARTIAL else (k - 1) / k)
        found += moved(m.tensor, m.target) * ((k - 1) / k if is_sharded(m.handed_out) else 1)
    return found


def _bytes(layout: LevelLayout, key: Key, machine: int) -> int:
    """Of a value on the first accelerator of a machine."""
    meta = layout.graph.tensors[key[0]]
    return prod(layout.shape(key, RankPlace(machine, 0))) * ITEM_SIZES[meta.dtype]


@dataclass
class _Held:
    """A value's memory: bytes per machine, and from which step to which it is held."""

    nbytes: list[int]
    first: int
    last: int


def inside_bytes(
    layout: LevelLayout, nested: Nested, *, optimizer_bytes: int = OPTIMIZER_BYTES
) -> tuple[int, ...]:
    """Peak bytes of the first accelerator of each machine of ``layout``."""
    return _Memory(layout, nested).peaks(optimizer_bytes)


class _Memory:
    def __init__(self, layout: LevelLayout, nested: Nested) -> None:
        self.layout, self.nested, self.graph = layout, nested, layout.graph
        self.steps: tuple[NestedStep, ...] = (*nested.forward, *nested.backward)
        self.end = len(self.steps)
        self.machines = range(len(layout.accelerators))
        self.held: list[_Held] = []
        self.value: dict[Key, _Held] = {}
        self.flight: dict[Key, tuple[int, list[int]]] = {}

    def add(self, key: Key, first: int, last: int) -> None:
        """A value with memory of its own."""
        made = _Held([_bytes(self.layout, key, machine) for machine in self.machines], first, last)
        self.held.append(made)
        self.value[key] = made

    def read(self, key: Key, at: int) -> _Held | None:
        """A value is read, itself or by a slice."""
        base = provider(self.value, key)
        if base is None:
            return None
        found = self.value[base]
        found.last = max(found.last, at)
        if base in self.flight:
            first, nbytes = self.flight.pop(base)
            self.held.append(_Held(nbytes, first, at))
        return found

    def peaks(self, optimizer_bytes: int) -> tuple[int, ...]:
        graph, nested = self.graph, self.nested
        for tensor, form in nested.stored.items():
            self.add((tensor, form, REPLICATE), 0, self.end)
        for constant in graph.constants:
            self.add((constant.tensor, REPLICATE, REPLICATE), 0, self.end)
        if graph.tangent is not None:
            self.add((graph.tangent, REPLICATE, REPLICATE), 0, self.end)
        boundary = len(nested.forward)
        compact = [key for key, copied in nested.saved if copied]
        for at, step in enumerate(self.steps):
            if at == boundary:
                self._copy(compact, boundary)
            self._step(at, step)
        if boundary == self.end:
            self._copy(compact, boundary)
        left = (*((nested.loss,) if nested.loss else ()), *nested.outputs, *nested.buffers, *nested.gradients)
        for key in left:
            self.read(key, self.end)
        change = np.zeros((self.end + 2, len(self.machines)), dtype=np.int64)
        for one in self.held:
            change[one.first] += one.nbytes
            change[one.last + 1] -= one.nbytes
        most = change.cumsum(axis=0).max(axis=0)
        last = change[: self.end + 1].sum(axis=0)
        trained = [p.tensor for p in graph.parameters if p.gradient is not None]
        numbers = [
            [
                prod(self.layout.shape((t, nested.stored[t], REPLICATE), RankPlace(m, 0)))
                for m in self.machines
            ]
            for t in trained
        ]
        state = np.sum(numbers, axis=0) * optimizer_bytes if trained else 0
        sizes = [ITEM_SIZES[graph.tensors[t].dtype] for t in trained]
        rows = [np.array(n) * size * TEMPORARIES for n, size in zip(numbers, sizes, strict=True)]
        updating = np.max(rows, axis=0) if rows and optimizer_bytes else 0
        return tuple(int(b) for b in np.maximum(most, last + updating) + state)

    def _copy(self, keys: Sequence[Key], at: int) -> None:
        """Slices that cross to the backward as copies; what they are cut from does not live on for them."""
        for key in keys:
            self.add(key, at - 1 if at else 0, at)

    def _step(self, at: int, step: NestedStep) -> None:
        if isinstance(step, Both):
            self._both(at, step)
        for inside in within(step):
            self.read((inside.tensor, inside.outer, inside.source), at)
            self.add((inside.tensor, inside.outer, inside.target), at, at)
        for move in between(step):
            target = (move.tensor, move.target, move.handed_out)
            held = self.read((move.tensor, move.source, move.collected), at)
            if held is not None and self.layout.is_nothing(move):
                self.value[target] = held
                continue
            self.add(target, at, at)
            self.flight[target] = (at, self._for_all(move))

    def _both(self, at: int, step: Both) -> None:
        bases = [self.read(key, at) for key in reads_of(self.graph, step)]
        alias = self.layout.theory.rules[step.instruction].alias
        for key in written_by(self.graph, step):
            if key[0] < 0:
                continue
            base = bases[0] if alias and bases else None
            if base is None:
                self.add(key, at, at)
            else:
                self.value[key] = base

    def _for_all(self, step: Across) -> list[int]:
        """What the first accelerators hold for a collective: the collected part, the whole result and its
        padding."""
        layout = self.layout
        sharded = step.source if is_sharded(step.source) else step.target
        held = self._padding(step, sharded)
        found = []
        for machine in self.machines:
            size = _bytes(layout, (step.tensor, step.target, REPLICATE), machine)
            if step.collected != REPLICATE:
                size += _bytes(layout, (step.tensor, step.source, REPLICATE), machine)
            size += held.whole
            if held.sharded:
                part = _bytes(layout, (step.tensor, sharded, REPLICATE), machine)
                size += held.sharded * part // layout.graph.tensors[step.tensor].nbytes
            found.append(size)
        return found

    def _padding(self, step: Across, sharded: Placement) -> HeldBytes:
        """What the kind of a collective has on the first accelerators besides; ``sharded``: the placement of the
        shards that it sends or gives."""
        buffers, nbytes = KINDS[step.kind].buffers, self.graph.tensors[step.tensor].nbytes
        if buffers is None:
            return NOTHING
        largest = nbytes
        if is_sharded(sharded):
            extents = self.layout.outer.extents(step.tensor, sharded)
            largest = nbytes * max(extents) // max(sum(extents), 1)
        return buffers(Carried(len(self.machines), nbytes, largest)).machine
