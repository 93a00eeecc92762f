"""The best program that fits every device's memory: Lagrangian prices of bytes.

    minimise  cost(x)   subject to   held_ij(x) <= capacity_j   at every instruction i and device j

is relaxed with prices ``p_ij >= 0`` in seconds per byte:

    L(p) = min over x of  cost(x) + sum_ij p_ij (held_ij(x) - capacity_j)   <=   the constrained optimum.

What a program is charged at given prices is never more than what it holds (:mod:`hetspmd.search.memory_prices`),
so a search at any prices gives a certified bound. Whether a program fits is decided by its whole profile
(:mod:`hetspmd.cost.memory`), transients and all.

The prices follow from the programs found so far by Kelley's cutting planes (1960): L is below the line
``cost(x) + sum p (held(x) - capacity)`` of each program x, and the next prices maximise the least of these
lines within a box that grows until some program fits. Instructions are taken in as programs exceed the
capacity there. If L is above what any program costs, none fits at these lengths, and the search ends.

Equal layers change their minds at the same price, all at once, so that the best program, in which some do
and others do not, is found at no price. So at the end the prices at which L is highest are tilted, a little
higher for each layer than for the one before, and scaled until a program just fits. What is charged is less
than what is held where collectives are: if that leaves much of a gap, what a communicated tensor adds is
estimated and priced too. What is found so has no part in the bound. At the scale ``s`` a program costs
``cost + s charge``, a line in s; the next scale after one that gave a program that is too large and one that gave
one that fits is that at which the two cost the same. If nothing is cheaper there, no scale between gives another.

Where prices outweigh all costs and a higher price gives the same program, no higher one gives another.
Programs of one search are lines of the next, at other lengths and capacities (:class:`Known`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import highspy
import numpy as np

from hetspmd.cluster.machines import device_word
from hetspmd.cost.memory import Holdings, MemoryProfile
from hetspmd.cost.model import Array, CostModel
from hetspmd.errors import MemoryLimitError, SearchError
from hetspmd.program.lengths import Lengths
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.schedule import make_schedule
from hetspmd.search.highs import quiet_highs
from hetspmd.search.memory_prices import MemoryPrices, Place
from hetspmd.search.search import Limits, Searcher, SearchResult
from hetspmd.search.space import Space

SEARCHES = 40
"""At most so many searches at prices."""

CLOSE = 1e-3
"""A program this near to the bound, as a part of its cost, ends the search for prices."""

TILT = 0.25
"""By which part the price of a tensor at the end of the graph is higher than at its beginning, when tilted."""

SCALINGS = 12
"""At most so many searches at tilted prices, at scales that grow until a program fits, then between one that fits
and one that does not."""

FURTHER = 2.0
"""Times the scale after one at which no program fits."""

WIDE = 1e-2
"""A gap above this part of the cost, or no program that fits, is worth the searches with estimates."""

OUTWEIGHED = 20.0
"""Prices of so many times a program's cost outweigh it."""

KNOWN = 6
"""So many programs of earlier searches are lines of the next."""


def capacities(model: CostModel) -> Array:
    """Bytes of each device of the model's cluster; infinite where the cluster does not say."""
    return np.array([d.memory for d in model.cluster.devices], dtype=float)


class Known:
    """What the searches within one space have found so far, for the next ones: the prices' own tables, and the
    programs that were the best, with what they hold at any lengths."""

    def __init__(self, searcher: Searcher, batches: MicroBatches | None = None) -> None:
        self.searcher, self.batches = searcher, batches
        self._programs: dict[object, tuple[SearchResult, Holdings]] = {}

    @cached_property
    def prices(self) -> MemoryPrices:
        """What holding tensors costs."""
        return MemoryPrices(self.searcher, self.batches)

    def holdings(self, result: SearchResult) -> Holdings:
        """What a program holds, in its own order."""
        known = self._programs.get((result.rows, result.moves))
        if known is not None:
            return known[1]
        theory = self.searcher.space.theory
        schedule = make_schedule(theory, result.program)
        return Holdings(theory, result.program, schedule, batches=self.batches)

    def keep(self, result: SearchResult, holdings: Holdings) -> None:
        """Keep a program, the newest last."""
        self._programs.pop((result.rows, result.moves), None)
        self._programs[result.rows, result.moves] = result, holdings
        while len(self._programs) > KNOWN:
            del self._programs[next(iter(self._programs))]

    def at(self, model: CostModel, lengths: Lengths) -> list[tuple[SearchResult, Holdings]]:
        """The programs that are kept, at their costs at these lengths."""
        results = [result for result, _ in self._programs.values()]
        costs = self.searcher.costs(results, model, lengths)
        return [
            (replace(result, cost=cost), holdings)
            for cost, (result, holdings) in zip(costs, self._programs.values(), strict=True)
        ]


@dataclass(frozen=True)
class _Line:
    """A program found, with its profile: its line bounds L from above."""

    result: SearchResult
    holdings: Holdings
    profile: MemoryProfile
    lacking: Array
    """Bytes of each device."""

    def same(self, other: _Line) -> bool:
        """Whether both are of one program."""
        one, two = self.result, other.result
        return one.rows == two.rows and one.moves == two.moves


def search_that_fits(
    searcher: Searcher,
    model: CostModel,
    lengths: Lengths,
    limits: Limits,
    start: SearchResult,
    *,
    within: Space | None = None,
    reserve: Array | None = None,
    known: Known | None = None,
) -> SearchResult:
    """The best program found that fits every device at ``lengths``; ``start``, the best without regard to memory,
    if that fits. ``reserve``: bytes of each device that are left free. ``known``: what searches of the same space
    have found, to which this one adds.

    Its ``lower_bound`` is certified for all programs that fit, its ``stop_reason`` is "memory" unless the bound
    meets the cost. Raises MemoryLimitError if no program found fits.
    """
    capacity = capacities(model) - (0.0 if reserve is None else reserve)
    known = known or Known(searcher, model.batches)
    prices = _Lagrangian(searcher, model, lengths, limits, within, capacity, known)
    if prices.take(start):
        return start
    prices.run()
    if prices.best is None:
        raise _does_not_fit(prices.lines, model)
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
    capacity: Array
    known: Known
    lines: list[_Line] = field(default_factory=list)
    best: SearchResult | None = None
    bound: float = -np.inf
    highest: float = -np.inf
    top: dict[Place, float] = field(default_factory=dict)
    """The prices tried at which L is highest."""

    def run(self) -> None:
        """Cutting planes, then tilted scaling where they leave a gap."""
        first = self.lines[0]
        self.bound = first.result.lower_bound
        try:
            if self._cutting_planes(first.result.cost) and not self._close():
                self._tilted(estimated=False)
                if not self._close(WIDE):
                    self._tilted(estimated=True)
        except SearchError:
            pass
        for line in self.lines[1:] if self.within is None else ():
            if line.result is self.best or line is self.lines[-1]:
                self.known.keep(line.result, line.holdings)

    def _cutting_planes(self, cost: float) -> bool:
        """Search at the prices that maximise the least of the lines. Whether a program may fit; ``cost``: that of
        the best program without regard to memory."""
        dearest = self.searcher.dearest(self.model, self.lengths)
        places: list[Place] = []
        box = 2.0 * cost
        before: dict[Place, float] | None = None
        seen = 0
        for number in range(SEARCHES):
            if number == 1:
                self._recall()
            for line in self.lines[seen:]:
                places += _exceeded(line.profile, self.capacity, places)
            seen = len(self.lines)
            at = _master(self.lines, places, self.capacity, box)
            if at == before:
                if self.best is not None or box > 1e4 * cost or self._settled_at(at):
                    break
                box *= 64.0
                continue
            before = at
            self._search(at)
            if self.bound > dearest:
                return False
            if self._close():
                break
        return True

    def _recall(self) -> None:
        """Take in what earlier searches have found, behind the program of the highest prices, which holds least."""
        own = self.lines[-1]
        known = self.known.at(self.model, self.lengths) if self.within is None else []
        for result, holdings in known:
            self._take(result, holdings)
        if known:
            self.lines.append(own)

    def _settled_at(self, prices: dict[Place, float], scale: float = 1.0) -> bool:
        """Whether prices outweigh all costs, and the last two searches have found the same program."""
        if len(self.lines) < 3 or not self.lines[-1].same(self.lines[-2]):
            return False
        paid = scale * sum(price * self.capacity[j] for (_, j), price in prices.items())
        return bool(paid > OUTWEIGHED * self.lines[-1].result.cost)

    def _search(self, at: dict[Place, float], tilt: float = 0.0, estimated: bool = False) -> SearchResult:
        """Search at prices; the program."""
        result = self.searcher.search(
            self.model,
            self.lengths,
            self.limits,
            within=self.within,
            start=self.lines[-1].result,
            prices=self.known.prices.prices(self.model, self.lengths, at, tilt, estimated=estimated),
        )
        if tilt == 0.0:
            paid = float(sum(price * self.capacity[j] for (_, j), price in at.items()))
            value = result.lower_bound - paid
            if value >= self.highest:
                self.highest, self.top = value, at
            self.bound = max(self.bound, value)
        self.take(result)
        return result

    def take(self, result: SearchResult) -> bool:
        """Keep a program; whether it fits."""
        return self._take(result, self.known.holdings(result))

    def _take(self, result: SearchResult, holdings: Holdings) -> bool:
        profile = holdings.at(self.lengths)
        lacking = profile.lacking(self.capacity)
        self.lines.append(_Line(result, holdings, profile, lacking))
        fits = not lacking.any()
        if fits and (self.best is None or result.cost < self.best.cost):
            self.best = result
        return fits

    def _close(self, gap: float = CLOSE) -> bool:
        return self.best is not None and self.best.cost - self.bound <= gap * self.best.cost

    def _tilted(self, *, estimated: bool) -> None:
        """Scale the prices at which L is highest, tilted, until a program just fits. With estimates, places that a
        program exceeds are priced like the others."""
        prices = dict(self.top)
        least = _At(0.0)
        most = _At(math.inf)
        scale = 1.0
        for _ in range(SCALINGS if prices else 0):
            result = self._search({p: scale * price for p, price in prices.items()}, TILT, estimated)
            here = _At(scale, result.cost, (result.lower_bound - result.cost) / scale)
            line = self.lines[-1]
            if least.cheapest_between(most, here):
                return
            more: list[Place] = []
            if line.lacking.any():
                more = _exceeded(line.profile, self.capacity, [*prices]) if estimated else []
                if not more and math.isinf(most.scale) and self._settled_at(prices, scale):
                    return
                least = here
            else:
                most = here
            if more:
                # Charges at other prices say nothing of those at the new ones.
                prices.update(dict.fromkeys(more, sum(prices.values()) / len(prices)))
                least, most = _At(0.0), _At(most.scale)
                continue
            if self._close() or most.scale - least.scale <= CLOSE * least.scale:
                return
            scale = least.next(most)


@dataclass(frozen=True)
class _At:
    """What a search at a scale of the prices has found: a program of ``cost``, which is charged ``charge`` seconds at
    the scale of one; None where that is not known."""

    scale: float
    cost: float | None = None
    charge: float | None = None

    def crossing(self, most: _At) -> float | None:
        """The scale at which the programs here and at ``most`` cost the same."""
        if self.cost is None or self.charge is None or most.cost is None or most.charge is None:
            return None
        less = self.charge - most.charge
        at = (most.cost - self.cost) / less if less > 0 else -1.0
        return at if self.scale < at < most.scale else None

    def next(self, most: _At) -> float:
        """The scale to try after this one, at which the program is too large, and ``most``, where it fits."""
        if math.isinf(most.scale):
            return self.scale * FURTHER
        if self.scale == 0.0:
            return most.scale / 2.0
        at = self.crossing(most)
        return (self.scale + most.scale) / 2.0 if at is None else at

    def cheapest_between(self, most: _At, here: _At) -> bool:
        """Whether nothing is cheaper ``here``, where the programs of both scales cost the same, than they are."""
        at = self.crossing(most)
        if at != here.scale or self.cost is None or self.charge is None:
            return False
        both = self.cost + at * self.charge
        assert here.cost is not None
        assert here.charge is not None
        return here.cost + at * here.charge >= both - 1e-9 * abs(both)


def _exceeded(profile: MemoryProfile, capacity: Array, priced: list[Place]) -> list[Place]:
    """Where a program exceeds the capacity most, per device, if that has no price yet."""
    places = [
        (profile.peak_instruction(j), j) for j in np.flatnonzero(profile.lacking(capacity) > 0).tolist()
    ]
    return [place for place in places if place not in priced]


def _master(lines: list[_Line], places: list[Place], capacity: Array, box: float) -> dict[Place, float]:
    """The prices that maximise the least of the lines; each at most ``box`` seconds per capacity."""
    scale = np.array([capacity[j] for _, j in places])
    unit = lines[0].result.cost or 1.0
    highs = quiet_highs(threads=1, random_seed=0)
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
        highs.addRow(-highspy.kHighsInf, line.result.cost / unit, count + 1, index, values)
    highs.run()
    values = np.array(highs.getSolution().col_value)[:count]
    return {
        place: float(v) * unit / float(s)
        for place, v, s in zip(places, values, scale, strict=True)
        if v > 1e-12
    }


def _does_not_fit(lines: list[_Line], model: CostModel) -> MemoryLimitError:
    """The error that names the devices that lack memory for the program that comes nearest."""
    lacking = min(lines, key=lambda line: float(line.lacking.sum())).lacking
    capacity = capacities(model)
    return MemoryLimitError(
        {j: (int(lacking[j]), int(capacity[j])) for j in np.flatnonzero(lacking).tolist()},
        [d.name for d in model.cluster.devices],
        device_word(model.cluster),
    )
