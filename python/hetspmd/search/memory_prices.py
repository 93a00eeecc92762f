"""What holding tensors costs at given prices of bytes, as costs of values.

What :class:`MemoryPrices` charges is never more than what is held: at instruction i a tensor is charged that has
been produced and is still to be read, in the cheapest form that the program has of it, a whole one that no
more of the forward reads in the smallest slice that the backward may have saved
(:mod:`hetspmd.program.saved_tensors`); of tensors that share storage one. A parameter is charged with its
optimizer state at every instruction, and what was gathered for the forward and is read again in the backward from
the one to the other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import reduce

import numpy as np

from hetspmd.cost.liveness import aliases
from hetspmd.cost.loop_memory import AxisPlaces
from hetspmd.cost.memory import OPTIMIZER_BYTES
from hetspmd.cost.model import Array, CostModel, Index
from hetspmd.placement import REPLICATE, is_sharded
from hetspmd.program.lengths import Lengths
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.rules.theory import Theory
from hetspmd.search.pricing import Prices
from hetspmd.search.search import Searcher

Place = tuple[int, int]
"""An instruction and a device whose memory has a price there."""


class MemoryPrices:
    """Which tensors are held at an instruction whatever the program, and what they cost at given prices."""

    def __init__(self, searcher: Searcher, batches: MicroBatches | None = None) -> None:
        self.searcher = searcher
        self.places = AxisPlaces(searcher.space.theory, batches)
        space, pricing = searcher.space, searcher.pricing
        theory = self.theory = space.theory
        graph, views = theory.graph, aliases(theory)
        end = len(graph.instructions)
        self.born = np.full(len(graph.tensors), end + 1, dtype=np.int64)
        self.last = np.full(len(graph.tensors), -1, dtype=np.int64)
        self.root = np.arange(len(graph.tensors))
        for instruction in graph.instructions:
            for t in instruction.inputs:
                self.last[t] = instruction.id
            for t in instruction.outputs:
                if t < 0:
                    continue
                self.born[t] = 0 if instruction.is_source else instruction.id
                if instruction.is_source:
                    self.last[t] = end
                elif instruction.id in views and instruction.inputs:
                    self.root[t] = self.root[instruction.inputs[0]]
        results = [graph.loss, *(o.tensor for o in graph.outputs), *graph.updates]
        results += [p.gradient for p in graph.parameters]
        for result in results:
            if result is not None:
                self.last[result] = end
        self.last = np.where([graph_source(theory, t) for t in range(len(graph.tensors))], end, self.last)
        # Where in the graph a tensor belongs, from 0 to 1: a source to its first reader.
        belongs = [min(graph.consumers.get(t, (0,))) if b == 0 else b for t, b in enumerate(self.born)]
        self.position = np.array(belongs, dtype=float) / (end + 1)
        trained = np.zeros(len(graph.tensors))
        for p in graph.parameters:
            if p.gradient is not None:
                trained[p.tensor] = graph.tensors[p.tensor].numel * OPTIMIZER_BYTES
        entries = [(t, f) for t in pricing.tensors for f in space.forms[t]]
        self.entry_tensor: Index = np.array([t for t, _ in entries], dtype=np.int64)
        self.entry_axis: Index = np.array([self._axis(t, f) for t, f in entries], dtype=np.int64)
        self._trained = trained
        self._count()
        self.entry_slices, self.entry_until = self._sliced(entries)
        pairs = [(t, *pair[:2]) for t in pricing.tensors for pair in space.pairs[t]]
        self.pair_tensor: Index = np.array([t for t, _, _ in pairs], dtype=np.int64)
        self.pair_axes = tuple(
            np.array([self._axis(pair[0], pair[k]) for pair in pairs], dtype=np.int64) for k in (1, 2)
        )
        readers = {t: graph.consumers.get(t, (end,)) for t in range(len(graph.tensors))}
        again = {t: i for i, t in graph.second_reads.items()}
        sources = self.born == 0
        self.copied = np.where(sources, [readers[t][0] for t in readers], self.born)
        """The instruction at which a communicated copy of a tensor may begin, and the last that reads it."""
        lasts = [max((r for r in rs if r != again.get(t)), default=end) for t, rs in readers.items()]
        self.copied_until = np.where(sources, lasts, self.last)

    def _count(self) -> None:
        """Bytes of each tensor, of the largest micro-batch where it is divided in time."""
        tensors, places = self.theory.graph.tensors, self.places
        self.nbytes = np.array([places.at(t.id, places.whole)[1] for t in tensors], dtype=float)
        self.entry_bytes = (self.nbytes + self._trained)[self.entry_tensor]
        self._charged: dict[int, Index] = {}
        self._entries: dict[int, tuple[Index, Index]] = {}

    def dividing(self, batches: MicroBatches | None) -> MemoryPrices:
        """The same for a step in another number of micro-batches, of the same loop."""
        other = copy.copy(self)
        other.places = AxisPlaces(self.theory, batches)
        other._count()
        return other

    def _axis(self, tensor: int, form: int) -> int:
        """The axis along which a form divides a tensor, as the places number them; one that has none is whole."""
        axis = self.theory.axes.sharded(tensor, form) if is_sharded(form) else None
        return self.places.at(tensor, self.places.whole if axis is None else axis.id)[0]

    def _sliced(self, entries: Sequence[tuple[int, int]]) -> tuple[Index, Index]:
        """Per entry, the axes along which backward may have saved slices of it, padded with its own; and the last
        instruction before that, the end of the graph for one that is always held as it is."""
        graph, axes = self.theory.graph, self.theory.axes
        needed = {t for t in (graph.loss, *(o.tensor for o in graph.outputs)) if t is not None}
        needed |= set(graph.updates)
        until = np.full(len(graph.tensors), -1, dtype=np.int64)
        forward: set[int] = set()
        for instruction in reversed(graph.instructions):
            if needed.isdisjoint(instruction.outputs):
                continue
            forward.update(t for t in instruction.outputs if t >= 0)
            needed.update(instruction.inputs)
            until[list(instruction.inputs)] = np.maximum(until[list(instruction.inputs)], instruction.id)
        slice_axes: list[list[int]] = []
        before: list[int] = []
        for (t, form), own in zip(entries, self.entry_axis.tolist(), strict=True):
            dims = range(len(graph.tensors[t].shape)) if form == REPLICATE else ()
            cuts = [self.places.at(t, a.id)[0] for d in dims if (a := axes.axis(t, d)) is not None]
            cuts = cuts if t in forward and self.born[t] > 0 else []
            slice_axes.append([own, *cuts])
            before.append(int(until[t]) if cuts else len(graph.instructions))
        most = max(map(len, slice_axes), default=1)
        padded = [[*cuts, *cuts[:1] * (most - len(cuts))] for cuts in slice_axes]
        return np.array(padded, dtype=np.int64).reshape(-1, most), np.array(before, dtype=np.int64)

    def charged(self, instruction: int) -> Index:
        """The tensors charged at an instruction, one for each storage."""
        tensors = self._charged.get(instruction)
        if tensors is None:
            live = np.flatnonzero((self.born <= instruction) & (self.last >= instruction))
            best: dict[int, int] = {}
            for t in map(int, live):
                root = int(self.root[t])
                # Never more than the storage: a view may show more elements than there are.
                if self.nbytes[t] > self.nbytes[root]:
                    continue
                if root not in best or (self.nbytes[t], -t) > (self.nbytes[best[root]], -best[root]):
                    best[root] = t
            for root in best:
                if self.born[root] == 0 and self.last[root] == len(self.theory.graph.instructions):
                    best[root] = root  # a source is held in any case
            tensors = self._charged[instruction] = np.array(sorted(best.values()), dtype=np.int64)
        return tensors

    def _charged_entries(self, instruction: int) -> tuple[Index, Index]:
        """The entries of what is charged at an instruction: as they are, and as the smallest slice."""
        known = self._entries.get(instruction)
        if known is None:
            here = np.zeros(len(self.theory.graph.tensors), dtype=bool)
            here[self.charged(instruction)] = True
            entries, sliced = here[self.entry_tensor], self.entry_until < instruction
            known = np.flatnonzero(entries & ~sliced), np.flatnonzero(entries & sliced)
            self._entries[instruction] = known
        return known

    def prices(
        self,
        model: CostModel,
        lengths: Lengths,
        at: dict[Place, float],
        tilt: float = 0.0,
        *,
        estimated: bool = False,
    ) -> Prices:
        """The prices of holding tensors, in seconds, at ``at`` seconds per byte; tilted by ``tilt``, and
        ``estimated``: with what communicated tensors add."""
        slant = 1.0 + tilt * self.position
        units, of = self.places.units(lengths)
        shares = units / of[:, None]
        keep = np.zeros(len(self.entry_tensor))
        per_axis: dict[int, Array] = {}
        for (instruction, device), price in sorted(at.items()):
            if instruction not in per_axis:
                per_axis[instruction] = np.zeros(len(shares))
            per_axis[instruction] += price * shares[:, device]
        for instruction, weight in per_axis.items():
            as_it_is, sliced = self._charged_entries(instruction)
            keep[as_it_is] += self.entry_bytes[as_it_is] * weight[self.entry_axis[as_it_is]]
            least = reduce(np.minimum, weight[self.entry_slices[sliced].T])
            keep[sliced] += self.entry_bytes[sliced] * least
        moved = self._moved(per_axis) * slant[self.pair_tensor] if estimated else None
        # A lone device gathers nothing: what the forward has read of a parameter is the parameter.
        second_reads = self._second_reads(per_axis, slant) if lengths.world > 1 else {}
        return Prices(keep * slant[self.entry_tensor], second_reads, moved)

    def _moved(self, per_axis: dict[int, Array]) -> Array:
        """Of a communicated tensor, what it holds more than the cheaper of its two forms: both while it is
        communicated, the new one until it is last read, and of a source both until then."""
        t, (old_axis, new_axis) = self.pair_tensor, self.pair_axes
        prices = np.zeros(len(t))
        for instruction, weight in per_axis.items():
            here = np.zeros(len(self.theory.graph.tensors))
            here[self.charged(instruction)] = 1.0
            old, new = self.nbytes[t] * weight[old_axis], self.nbytes[t] * weight[new_axis]
            both = (self.born[t] == instruction) | (self.born[t] == 0)
            held = new + np.where(both, old, 0.0) - here[t] * np.minimum(old, new)
            live = (self.copied[t] <= instruction) & (instruction <= self.copied_until[t])
            prices += np.where(live, np.maximum(held, 0.0), 0.0)
        return prices

    def _second_reads(self, per_axis: dict[int, Array], slant: Array) -> dict[int, Array]:
        """Of what the forward has communicated of a parameter and the backward reads again, from the last reader
        there to the second reading."""
        theory, space = self.theory, self.searcher.space
        graph = theory.graph
        prices: dict[int, Array] = {}
        for i, parameter in graph.second_reads.items():
            forward = max(r for r in graph.consumers[parameter] if r != i)
            weights = [w for at, w in per_axis.items() if forward < at <= i]
            if not weights:
                continue
            weight = np.sum(weights, axis=0)
            axes = [self._axis(parameter, theory.rows[i][k].pre[0]) for k in space.rows[i]]
            prices[i] = self.nbytes[parameter] * weight[axes] * slant[parameter]
        return prices


def graph_source(theory: Theory, tensor: int) -> bool:
    """Whether a tensor is a parameter, a buffer, an input or a constant."""
    producer = theory.graph.producers.get(tensor)
    return producer is not None and theory.graph.instructions[producer].is_source
