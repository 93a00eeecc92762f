"""The best program that fits every device's memory: Lagrangian prices of bytes (design 6).

    minimise  cost(x)   subject to   held_ij(x) <= capacity_j   at every instruction i and device j

is relaxed with prices ``p_ij >= 0`` in seconds per byte:

    L(p) = min over x of  cost(x) + sum_ij p_ij (held_ij(x) - capacity_j)   <=   the constrained optimum.

:class:`Ledger` turns prices into costs of values. What it charges is never more than what is held: at
instruction i a tensor is charged that has been produced and is still to be read, in the cheapest form that
the program has of it; of tensors that share storage one. A parameter is charged with its optimizer state at
every instruction, and what was gathered for the forward and is read again in the backward from the one to
the other. So a search at any prices gives a certified bound. Whether a program fits is decided by its whole
profile (:mod:`hetspmd.cost.memory`), transients and all.

The prices follow from the programs found so far by Kelley's cutting planes (1960): L is below the line
``cost(x) + sum p (held(x) - capacity)`` of each program x, and the next prices maximise the least of these
lines within a box that grows until some program fits. Instructions are taken in as programs exceed the
capacity there.

Equal layers change their minds at the same price, all at once, so that the best program, in which some do
and others do not, is found at no price. So at the end the prices at which L is highest are tilted, a little
higher for each layer than for the one before, and scaled until a program just fits. What is charged is less
than what is held where collectives are: if that leaves much of a gap, what a communicated tensor adds is
estimated and priced too. What is found so has no part in the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import highspy
import numpy as np

from hetspmd.balance.lengths import Lengths
from hetspmd.cost.memory import OPTIMIZER_BYTES, MemoryProfile, memory_profile
from hetspmd.cost.model import Array, CostModel, Index
from hetspmd.errors import MemoryLimitError, SearchError
from hetspmd.forms import is_sharded
from hetspmd.rules.theory import Theory
from hetspmd.synth.pricing import Prices
from hetspmd.synth.search import Found, Limits, Progress, Searcher
from hetspmd.synth.space import Space

__all__ = ["Ledger", "capacities", "search_that_fits"]

SEARCHES = 40
"""At most so many searches at prices."""

CLOSE = 1e-3
"""A program this near to the bound, as a part of its cost, ends the search for prices."""

TILT = 0.25
"""By which part the price of a tensor at the end of the graph is higher than at its beginning, when tilted."""

SCALINGS = 12
"""At most so many searches at tilted prices, doubled or halved until one program fits and one does not, then
between the two."""

WIDE = 1e-2
"""A gap above this part of the cost, or no program that fits, is worth the searches with estimates."""

Place = tuple[int, int]
"""An instruction and a device whose memory has a price there."""


def capacities(model: CostModel) -> Array:
    """Bytes of each device of the model's cluster; infinite where the cluster does not say."""
    return np.array([d.memory for d in model.cluster.devices], dtype=float)


class Ledger:
    """Which tensors are held at an instruction whatever the program, and what they cost at given prices."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        space, pricing = searcher.space, searcher.pricing
        theory = self.theory = space.theory
        graph = theory.graph
        end = len(graph.instructions)
        self.born = np.full(len(graph.tensors), end + 1, dtype=np.int64)
        self.last = np.full(len(graph.tensors), -1, dtype=np.int64)
        self.root = np.arange(len(graph.tensors))
        for instruction in graph.instructions:
            for t in instruction.inputs:
                self.last[t] = instruction.id
            rule = theory.rules.get(instruction.id)
            for t in instruction.outputs:
                if t < 0:
                    continue
                self.born[t] = 0 if instruction.is_source else instruction.id
                if instruction.is_source:
                    self.last[t] = end
                elif rule is not None and rule.alias and instruction.inputs:
                    self.root[t] = self.root[instruction.inputs[0]]
        results = [graph.loss, *(o.tensor for o in graph.outputs), *(b.updated for b in graph.buffers)]
        results += [p.gradient for p in graph.parameters]
        for result in results:
            if result is not None:
                self.last[result] = end
        self.last = np.where([graph_source(theory, t) for t in range(len(graph.tensors))], end, self.last)
        # Where in the graph a tensor belongs, from 0 to 1: a source to its first reader.
        belongs = [min(graph.consumers.get(t, (0,))) if b == 0 else b for t, b in enumerate(self.born)]
        self.position = np.array(belongs, dtype=float) / (end + 1)
        nbytes = np.array([t.nbytes for t in graph.tensors], dtype=float)
        self.nbytes = nbytes
        trained = np.zeros(len(graph.tensors))
        for p in graph.parameters:
            if p.gradient is not None:
                trained[p.tensor] = graph.tensors[p.tensor].numel * OPTIMIZER_BYTES
        entries = [(t, f) for t in pricing.tensors for f in space.forms[t]]
        self.entry_tensor: Index = np.array([t for t, _ in entries], dtype=np.int64)
        self.entry_axis: Index = np.array([axis_of(theory, t, f) for t, f in entries], dtype=np.int64)
        self.entry_bytes = (nbytes + trained)[self.entry_tensor]
        pairs = [(t, *pair[:2]) for t in pricing.tensors for pair in space.pairs[t]]
        self.pair_tensor: Index = np.array([t for t, _, _ in pairs], dtype=np.int64)
        self.pair_axes = tuple(
            np.array([axis_of(theory, pair[0], pair[k]) for pair in pairs], dtype=np.int64) for k in (1, 2)
        )
        readers = {t: graph.consumers.get(t, (end,)) for t in range(len(graph.tensors))}
        again = {t: i for i, t in graph.second_reads.items()}
        sources = self.born == 0
        self.copied = np.where(sources, [readers[t][0] for t in readers], self.born)
        """The instruction at which a communicated copy of a tensor may begin, and the last that reads it."""
        lasts = [max((r for r in rs if r != again.get(t)), default=end) for t, rs in readers.items()]
        self.copied_until = np.where(sources, lasts, self.last)
        self._charged: dict[int, Index] = {}

    def charged(self, instruction: int) -> Index:
        """The tensors charged at an instruction, one for each storage."""
        found = self._charged.get(instruction)
        if found is None:
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
            found = self._charged[instruction] = np.array(sorted(best.values()), dtype=np.int64)
        return found

    def prices(
        self, model: CostModel, lengths: Lengths, at: dict[Place, float], tilt: float = 0.0,
        *, estimated: bool = False,
    ) -> Prices:  # fmt: skip
        """The prices of holding tensors, in seconds, at ``at`` seconds per byte; tilted by ``tilt``, and
        ``estimated``: with what communicated tensors add."""
        slant = 1.0 + tilt * self.position
        shares = model.shares(lengths)
        keep = np.zeros(len(self.entry_tensor))
        per_axis: dict[int, Array] = {}
        for (instruction, device), price in sorted(at.items()):
            if instruction not in per_axis:
                per_axis[instruction] = np.zeros(len(shares))
            per_axis[instruction] += price * shares[:, device]
        for instruction, weight in per_axis.items():
            here = np.zeros(len(self.theory.graph.tensors))
            here[self.charged(instruction)] = 1.0
            keep += here[self.entry_tensor] * self.entry_bytes * weight[self.entry_axis]
        moved = self._moved(per_axis) * slant[self.pair_tensor] if estimated else None
        # A lone device gathers nothing: what the forward has read of a parameter is the parameter.
        kept = self._kept(per_axis, slant) if lengths.world > 1 else {}
        return Prices(keep * slant[self.entry_tensor], kept, moved)

    def _moved(self, per_axis: dict[int, Array]) -> Array:
        """Of a communicated tensor, what it holds more than the cheaper of its two forms: both while it is
        communicated, the new one until it is last read, and of a source both until then."""
        t, (old_axis, new_axis) = self.pair_tensor, self.pair_axes
        found = np.zeros(len(t))
        for instruction, weight in per_axis.items():
            here = np.zeros(len(self.theory.graph.tensors))
            here[self.charged(instruction)] = 1.0
            old, new = self.nbytes[t] * weight[old_axis], self.nbytes[t] * weight[new_axis]
            both = (self.born[t] == instruction) | (self.born[t] == 0)
            held = new + np.where(both, old, 0.0) - here[t] * np.minimum(old, new)
            live = (self.copied[t] <= instruction) & (instruction <= self.copied_until[t])
            found += np.where(live, np.maximum(held, 0.0), 0.0)
        return found

    def _kept(self, per_axis: dict[int, Array], slant: Array) -> dict[int, Array]:
        """Of what the forward has communicated of a parameter and the backward reads again, from the last reader
        there to the second reading."""
        theory, space = self.theory, self.searcher.space
        graph = theory.graph
        found: dict[int, Array] = {}
        for i, parameter in graph.second_reads.items():
            forward = max(r for r in graph.consumers[parameter] if r != i)
            weights = [w for at, w in per_axis.items() if forward < at <= i]
            if not weights:
                continue
            weight = np.sum(weights, axis=0)
            axes = [axis_of(theory, parameter, theory.rows[i][k].pre[0]) for k in space.rows[i]]
            found[i] = self.nbytes[parameter] * weight[axes] * slant[parameter]
        return found


def graph_source(theory: Theory, tensor: int) -> bool:
    """Whether a tensor is a parameter, a buffer, an input or a constant."""
    producer = theory.graph.producers.get(tensor)
    return producer is not None and theory.graph.instructions[producer].is_source


def axis_of(theory: Theory, tensor: int, form: int) -> int:
    """Id of the axis along which a form is sharded; the number of axes for one that is whole or has none."""
    axis = theory.axes.sharded(tensor, form) if is_sharded(form) else None
    return len(theory.axes.axes) if axis is None else axis.id


@dataclass(frozen=True)
class _Line:
    """A program found, with its profile: its line bounds L from above."""

    found: Found
    profile: MemoryProfile


def search_that_fits(
    searcher: Searcher, model: CostModel, lengths: Lengths, limits: Limits, start: Found, *,
    within: Space | None = None, progress: Progress | None = None, reserve: Array | None = None,
) -> Found:  # fmt: skip
    """The best program found that fits every device at ``lengths``; ``start``, the best without regard to memory,
    if that fits. ``reserve``: bytes of each device that are left free.

    Its ``lower_bound`` is certified for all programs that fit, its ``stop_reason`` is "memory" unless the bound
    meets the cost. Raises MemoryLimitError if no program found fits.
    """
    capacity = capacities(model) - (0.0 if reserve is None else reserve)
    first = _Line(start, memory_profile(searcher.space.theory, start.program, lengths))
    if not first.profile.lacking(capacity).any():
        return start
    prices = _Lagrangian(searcher, model, lengths, limits, within, progress, capacity, [first])
    prices.run()
    if prices.best is None:
        raise _does_not_fit(prices.lines, model, capacity)
    best, bound = prices.best, min(prices.bound, prices.best.cost)
    gap = (best.cost - bound) / best.cost if best.cost > 0 else 0.0
    return replace(best, lower_bound=bound, gap=gap, stop_reason="optimal" if gap == 0 else "memory")


@dataclass
class _Lagrangian:
    """The search for prices: programs found so far, the best that fits, the certified bound."""

    searcher: Searcher
    model: CostModel
    lengths: Lengths
    limits: Limits
    within: Space | None
    progress: Progress | None
    capacity: Array
    lines: list[_Line]
    best: Found | None = None
    bound: float = -np.inf
    highest: float = -np.inf
    top: dict[Place, float] = field(default_factory=dict)
    """The prices tried at which L is highest."""

    def run(self) -> None:
        """Cutting planes, then tilted bisection where they leave a gap."""
        self.ledger = Ledger(self.searcher)
        first = self.lines[0].found
        self.bound = first.lower_bound
        places: list[Place] = []
        box = 2.0 * first.cost
        before: dict[Place, float] | None = None
        try:
            for _ in range(SEARCHES):
                places += _exceeded(self.lines[-1].profile, self.capacity, places)
                at = _master(self.lines, places, self.capacity, box)
                if at == before:
                    if self.best is not None or box > 1e4 * first.cost:
                        break
                    box *= 64.0
                    continue
                before = at
                self._search(at)
                if self._close():
                    return
            self._tilted(estimated=False)
            if not self._close(WIDE):
                self._tilted(estimated=True)
        except SearchError:
            return

    def _search(self, at: dict[Place, float], tilt: float = 0.0, estimated: bool = False) -> bool:
        """Search at prices; whether the program fits."""
        found = self.searcher.search(
            self.model, self.lengths, self.limits, within=self.within, start=self.lines[-1].found,
            prices=self.ledger.prices(self.model, self.lengths, at, tilt, estimated=estimated),
            progress=self.progress,
        )  # fmt: skip
        if tilt == 0.0:
            paid = float(sum(price * self.capacity[j] for (_, j), price in at.items()))
            value = found.lower_bound - paid
            if value >= self.highest:
                self.highest, self.top = value, at
            self.bound = max(self.bound, value)
        line = _Line(found, memory_profile(self.searcher.space.theory, found.program, self.lengths))
        self.lines.append(line)
        fits = not line.profile.lacking(self.capacity).any()
        if fits and (self.best is None or found.cost < self.best.cost):
            self.best = found
        return fits

    def _close(self, gap: float = CLOSE) -> bool:
        return self.best is not None and self.best.cost - self.bound <= gap * self.best.cost

    def _tilted(self, *, estimated: bool) -> None:
        """Scale the prices at which L is highest, tilted, until a program just fits. With estimates, places that a
        program exceeds are priced like the others."""
        prices = dict(self.top)
        least, most = 0.0, math.inf
        scale = 1.0
        for _ in range(SCALINGS if prices else 0):
            if self._search({p: scale * price for p, price in prices.items()}, TILT, estimated):
                most = scale
            else:
                least = scale
                mean = sum(prices.values()) / len(prices)
                more = _exceeded(self.lines[-1].profile, self.capacity, [*prices]) if estimated else []
                prices.update(dict.fromkeys(more, mean))
            if self._close() or most - least <= CLOSE * least:
                return
            scale = least * 2.0 if math.isinf(most) else most / 2.0 if least == 0.0 else (least + most) / 2.0


def _exceeded(profile: MemoryProfile, capacity: Array, known: list[Place]) -> list[Place]:
    """Where a program exceeds the capacity most, per device, if that has no price yet."""
    found = [(profile.peak_instruction(j), j) for j in np.flatnonzero(profile.lacking(capacity) > 0).tolist()]
    return [place for place in found if place not in known]


def _master(lines: list[_Line], places: list[Place], capacity: Array, box: float) -> dict[Place, float]:
    """The prices that maximise the least of the lines; each at most ``box`` seconds per capacity."""
    scale = np.array([capacity[j] for _, j in places])
    unit = lines[0].found.cost or 1.0
    highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy is untyped
    for option, setting in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        highs.setOptionValue(option, setting)
    count = len(places)
    # Columns: price times capacity per place, in units of the first program's cost; then the least line.
    lower, upper = np.zeros(count + 1), np.full(count + 1, box / unit)
    lower[count], upper[count] = -highspy.kHighsInf, highspy.kHighsInf
    highs.addVars(count + 1, lower, upper)
    highs.changeColCost(count, -1.0)
    # Among equal maxima the cheapest prices.
    for column in range(count):
        highs.changeColCost(column, 1e-9)
    for line in lines:
        slopes = [
            (float(line.profile.during(i)[j]) - capacity[j]) / s
            for (i, j), s in zip(places, scale, strict=True)
        ]
        index = np.arange(count + 1, dtype=np.int32)
        values = np.array([*(-s for s in slopes), 1.0])
        highs.addRow(-highspy.kHighsInf, line.found.cost / unit, count + 1, index, values)
    highs.run()
    values = np.array(highs.getSolution().col_value)[:count]
    return {
        place: float(v) * unit / float(s)
        for place, v, s in zip(places, values, scale, strict=True)
        if v > 1e-12
    }


def _does_not_fit(lines: list[_Line], model: CostModel, capacity: Array) -> MemoryLimitError:
    """The error that names the devices that lack memory for the program that comes nearest."""
    nearest = min(lines, key=lambda line: float(line.profile.lacking(capacity).sum()))
    lacking = nearest.profile.lacking(capacity)
    return MemoryLimitError(
        {j: (int(lacking[j]), int(capacity[j])) for j in np.flatnonzero(lacking).tolist()},
        [d.name for d in model.cluster.devices],
    )
