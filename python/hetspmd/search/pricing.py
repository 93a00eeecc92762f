"""Costs of a search space at given lengths, as the core takes them: whole numbers in three arrays.

    rows   seconds of a triple on the device that takes longest
    moves  seconds of the cheaper collective for a pair of forms
    keep   the price of holding a tensor in a form (:class:`Prices`; 0 where memory is no constraint)

Many moves cost the same (a layer's are those of the next), so that a collective's seconds are asked of the cost
model once for each distinct number of bytes, kind and axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cost.model import Array, CostModel, Index
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded, shard, sharded_dim
from hetspmd.program.lengths import Lengths
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import Communicate
from hetspmd.search.space import Space

Costs = npt.NDArray[np.int64]

PICOSECONDS = 1e12
"""Of a second; the unit of costs in the core, but for graphs that take days."""

_LARGEST_TOTAL = 2.0**56
"""The core adds costs in 64-bit integers, with room to spare for its bounds."""


@dataclass(frozen=True)
class Prices:
    """Prices of memory, in seconds.

    ``keep``: of holding a tensor in a form, in the order of :attr:`Pricing.tensors` and ``space.forms``.
    ``second_reads[i][k]``: of taking, by row ``space.rows[i][k]`` of the second reading i of a parameter, what was
    communicated for the forward. ``moved``: of what is held beside that where a tensor is communicated, in the
    order of ``Pricing.move_start``; an estimate, with which a search gives no bound.
    """

    keep: Array
    second_reads: dict[int, Array]
    moved: Array | None = None


@dataclass(frozen=True)
class Priced:
    """The arrays for the core, in units of which ``per_second`` make a second. ``seconds`` are the costs of
    ``rows`` and ``moves`` without prices of memory and without weights, in the same units; ``best`` is the place in
    :attr:`Pricing.flat` of the collective that is meant by each pair of forms."""

    rows: Costs
    moves: Costs
    keep: Costs
    best: Index
    seconds: tuple[Costs, Costs]
    per_second: float


class Pricing:
    """A space's rows and moves by what determines their cost. Places in the core's arrays: ``row_start[i]`` of
    the rows of instruction i, ``move_start[n]`` of the moves of the n-th tensor that has a producer."""

    def __init__(self, space: Space) -> None:
        self.space = space
        theory = space.theory
        graph = theory.graph
        self.tensors = tuple(sorted(graph.producers))
        offset = np.concatenate([[0], np.cumsum([len(rows) for rows in theory.rows])])
        again = graph.second_reads
        row: list[int] = []
        start: list[int] = []
        for i, indices in enumerate(space.rows):
            start.append(len(row))
            places = [int(offset[i]) + k for k in indices]
            row += [p for p in places for _ in range(2)] if i in again else places
        self.row: Index = np.array(row, dtype=np.int64)
        """Place of each row of the core among all rows of the theory."""
        self.row_start: Index = np.array([*start, len(row)], dtype=np.int64)
        self._moves()
        self.keep_start = np.concatenate([[0], np.cumsum([len(space.forms[t]) for t in self.tensors])])
        self.overlappable = self._overlappable()
        self._last: tuple[tuple[CostModel, Lengths, float], Priced] | None = None
        self._timed: tuple[MicroBatches, Array] | None = None
        counts = [len(space.moves[t]) for t in self.tensors]
        self._flat_tensor: Index = np.repeat(np.arange(len(self.tensors)), counts)
        self._flat_cut: Index = np.array([is_sharded(source) for source, _, _ in self.flat], dtype=np.int64)

    def _moves(self) -> None:
        """Distinct collectives, which of them each move of a tensor is, and where pairs of forms begin.

        Alike moves have the same kind, bytes (with what is made of them in a bucket), axes and order in memory.
        """
        space, theory = self.space, self.space.theory
        metas = theory.graph.tensors
        kinds = {kind: n for n, kind in enumerate(KINDS)}
        sizes: dict[tuple[int, str | None], int] = {}
        size: list[int] = []
        alike: dict[int, list[int]] = {}  # equal tensors share their moves
        for n, t in enumerate(self.tensors):
            meta = metas[t]
            size.append(
                sizes.setdefault((meta.nbytes, meta.dtype if t in theory.deferred else None), len(sizes))
            )
            alike.setdefault(id(space.moves[t]), []).append(n)
        self.flat = tuple(chain.from_iterable(space.moves[t] for t in self.tensors))
        starts = np.cumsum([0, *(len(space.moves[t]) for t in self.tensors)])
        self.move_start: Index = np.cumsum([0, *(len(space.pairs[t]) for t in self.tensors)])
        self.pair_of: Index = np.zeros(len(self.flat), dtype=np.int64)
        code = np.zeros(len(self.flat), dtype=np.int64)
        for places in alike.values():
            first = self.tensors[places[0]]
            moves = space.moves[first]
            if not moves:
                continue
            pair = {both[:2]: k for k, both in enumerate(space.pairs[first])}
            forms = sorted({form for move in moves for form in move[:2]})
            axis = np.array([[self._axis(self.tensors[n], form) for form in forms] for n in places])
            rows = np.array(places)[:, None]
            at = starts[rows] + np.arange(len(moves))
            self.pair_of[at] = self.move_start[rows] + np.array([pair[move[:2]] for move in moves])
            codes = np.array(size)[rows] * len(kinds) + np.array([kinds[move[2]] for move in moves])
            for ends in ([move[0] for move in moves], [move[1] for move in moves]):
                codes = codes * (2 * len(theory.axes.axes) + 1) + axis[:, np.searchsorted(forms, ends)]
            code[at] = codes
        _, firsts, which = np.unique(code, return_index=True, return_inverse=True)
        self.which: Index = which.reshape(-1)
        tensors = np.searchsorted(starts, firsts, side="right") - 1
        self.examples = tuple(
            (self.tensors[n], self.flat[k]) for n, k in zip(tensors.tolist(), firsts.tolist(), strict=True)
        )

    def _axis(self, tensor: int, form: Placement) -> int:
        """A number of the axis that a form shards and of whether its slices lie in memory as they are sent, 0 where
        there is none."""
        axis = self.space.theory.axes.sharded(tensor, form) if is_sharded(form) else None
        return 0 if axis is None else 2 * axis.id + 1 + (sharded_dim(form) > 0)

    def _overlappable(self) -> npt.NDArray[np.bool_]:
        """Per pair of forms: of a parameter, of its second reading or of a gradient, which other work can hide."""
        graph = self.space.theory.graph
        tensors = {p.tensor for p in graph.parameters}
        tensors |= {graph.instructions[i].outputs[0] for i in graph.second_reads}
        tensors |= {g for _, g in self.space.ties}
        hidden = np.zeros(int(self.move_start[-1]), dtype=bool)
        for n, t in enumerate(self.tensors):
            if t in tensors:
                hidden[self.move_start[n] : self.move_start[n + 1]] = True
        return hidden

    def at(
        self, model: CostModel, lengths: Lengths, prices: Prices | None = None, overlap: float = 1.0
    ) -> Priced:
        """The costs at ``lengths``. ``overlap`` scales those of communication that other work can hide, but for
        what the devices copy themselves. They are kept until other ones are asked for: many searches within a
        part of the space follow each other at the same lengths."""
        asked = (model, lengths, overlap)
        if prices is not None:
            return self._priced(model, lengths, prices, overlap)
        if self._last is None or self._last[0][0] is not model or self._last[0] != asked:
            self._last = asked, self._priced(model, lengths, None, overlap)
        return self._last[1]

    def _priced(self, model: CostModel, lengths: Lengths, prices: Prices | None, overlap: float) -> Priced:
        rows = np.concatenate(model.row_costs(lengths))[self.row] if len(self.row) else np.zeros(0)
        times = self._times(model)
        single = (
            model.moves_costs(self.examples, lengths)[self.which] * times if self.examples else np.zeros(0)
        )
        count = int(self.move_start[-1])
        moves = np.full(count, np.inf)
        np.minimum.at(moves, self.pair_of, single)
        # The first of the cheapest collectives for a pair.
        best = np.full(count, len(single), dtype=np.int64)
        cheapest = np.flatnonzero(single == moves[self.pair_of])
        np.minimum.at(best, self.pair_of[cheapest], cheapest)
        weighted = moves
        if overlap != 1:
            copies = (model.moves_copies(self.examples)[self.which] * times)[best] if self.examples else moves
            weighted = np.where(self.overlappable, (moves - copies) * overlap + copies, moves)
        keep, second_reads = np.zeros(int(self.keep_start[-1])), np.zeros(len(rows))
        if prices is not None:
            keep = prices.keep
            for i, extra in prices.second_reads.items():
                second_reads[self.row_start[i] + 1 : self.row_start[i + 1] : 2] = extra
            if prices.moved is not None:
                weighted = weighted + prices.moved
        per_second = self._unit(rows + second_reads, weighted, keep)

        def whole(seconds: Array) -> Costs:
            costs: Costs = np.rint(seconds * per_second).astype(np.int64)
            return costs

        def less(seconds: Array) -> Costs:  # prices are rounded down, so that bounds stay bounds
            costs: Costs = np.floor(seconds * per_second).astype(np.int64)
            return costs

        return Priced(
            whole(rows) + less(second_reads),
            whole(weighted),
            less(keep),
            best,
            (whole(rows), whole(moves)),
            per_second,
        )

    def _times(self, model: CostModel) -> Array:
        """How often each move runs on all of its bytes (:meth:`CostModel.times`)."""
        if model.batches is None:
            return np.ones(len(self.flat))
        if self._timed is None or self._timed[0] is not model.batches:
            whole, cut = (
                [model.times(Communicate(t, "all_gather", source, REPLICATE)) for t in self.tensors]
                for source in (PARTIAL, shard(0))
            )
            of_tensor = np.array([whole, cut], dtype=float).reshape(2, -1)
            self._timed = model.batches, of_tensor[self._flat_cut, self._flat_tensor]
        return self._timed[1]

    def _unit(self, rows: Array, moves: Array, keep: Array) -> float:
        """How many units of cost make a second: picoseconds, or coarser where a program with the dearest value
        of every instruction would not fit in 64 bits (a device of a few FLOP/s)."""
        dearest = 0.0
        for costs, starts in (
            (rows, self.row_start),
            (moves, self.move_start),
            (keep, self.keep_start),
        ):
            filled = np.flatnonzero(np.diff(starts))
            if len(filled):
                dearest += float(np.maximum.reduceat(costs, starts[filled]).sum())
        return min(PICOSECONDS, _LARGEST_TOTAL / dearest) if dearest > 0 else PICOSECONDS
