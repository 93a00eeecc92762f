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
estimated and priced too. What is found so has no part in the bound.

Where prices outweigh all costs and higher ones give the same program again, still higher ones give no other.

A search that is like an earlier one starts from its prices (:mod:`hetspmd.search.earlier_prices`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetspmd.cluster.machines import device_word
from hetspmd.cost.memory import memory_profile
from hetspmd.cost.model import Array, CostModel
from hetspmd.errors import MemoryLimitError, SearchError
from hetspmd.program.lengths import Lengths
from hetspmd.search.earlier_prices import Known, PricedAt
from hetspmd.search.memory_lines import Line, dearest_prices, exceeded
from hetspmd.search.memory_prices import MemoryPrices, Place
from hetspmd.search.price_scaling import Bracket
from hetspmd.search.search import Limits, Searcher, SearchResult
from hetspmd.search.space import Space

SEARCHES = 40
"""At most so many searches at prices."""

EXPANSIONS = 2000
"""Partial programs that one of them may expand: most need none, and prices are not worth a long search."""

CLOSE = 1e-3
"""A program this near to the bound, as a part of its cost, ends the search for prices."""

TILT = 0.25
"""By which part the price of a tensor at the end of the graph is higher than at its beginning, when tilted."""

SCALINGS = 12
"""At most so many searches at tilted prices (:mod:`hetspmd.search.price_scaling`)."""

RESTARTS = 4
"""How often memory that has no price gets one while prices are scaled."""

WIDE = 1e-2
"""A gap above this part of the cost, or no program that fits, is worth the searches with estimates."""

OUTWEIGHED = 20.0
"""Prices of so many times a program's cost outweigh it."""

ENOUGH, NARROW = 2e-3, 1.5e-2
"""A program that fits, dearer by this part than one that does not, at lower prices: no better one is searched for
at prices between them, or at prices of other kinds. One layer of thirty costs more than the first."""

NEAR_SCALINGS, NEAR, FAR = 7, (1.1, 1.3, 2.0), 16.0
"""At most so many searches at scaled prices of an earlier search, the first steps from them, until one program fits
and one does not, and the factor from which on it is no longer near."""

OUTWEIGHING = 3
"""At most so many searches at prices that outweigh all costs, before others."""

HOPELESS = 0.1
"""Where all programs lack this part of a device's memory, also at prices that outweigh all costs, none fits. Prices
charge less than is held: in a small model one fits though the others lack 6 %."""


def capacities(model: CostModel) -> Array:
    """Bytes of each device of the model's cluster, as they are counted; infinite where the cluster does not say."""
    return model.capacity


def search_that_fits(
    searcher: Searcher,
    model: CostModel,
    lengths: Lengths,
    limits: Limits,
    start: SearchResult,
    *,
    within: Space | None = None,
    reserve: Array | None = None,
    memory_prices: MemoryPrices | None = None,
    known: Known | None = None,
) -> SearchResult:
    """The best program found that fits every device at ``lengths``; ``start``, the best without regard to memory,
    if that fits. ``reserve``: bytes of each device that are left free. ``memory_prices``: those of the searcher,
    where they have been made. ``known``: the prices of earlier searches, to which those of this one are added.

    Its ``lower_bound`` is certified for all programs that fit, its ``stop_reason`` is "memory" unless the bound
    meets the cost. Raises MemoryLimitError if no program found fits.
    """
    capacity = capacities(model) - (0.0 if reserve is None else reserve)
    memory_prices = memory_prices or MemoryPrices(searcher, model.batches)
    prices = _Lagrangian(searcher, model, lengths, limits, within, capacity, memory_prices)
    if prices.take(start):
        return start
    if known is None:
        prices.run()
    else:
        prices.run_from(known)
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
    memory_prices: MemoryPrices
    lines: list[Line] = field(default_factory=list)
    best: SearchResult | None = None
    bound: float = -np.inf
    highest: float = -np.inf
    top: dict[Place, float] = field(default_factory=dict)
    """The prices tried at which L is highest."""
    tried: tuple[dict[Place, float], float, bool] = field(default_factory=lambda: ({}, 0.0, False))
    """The last prices, their tilt, and whether they are estimated too."""
    estimates_fail: bool = False
    """With estimates no program fits at prices that outweigh all costs."""
    won: tuple[dict[Place, float], float, bool] | None = None
    """Those at which the best program was found."""

    def run(self) -> None:
        """Cutting planes, then tilted scaling where they leave a gap."""
        first = self.lines[0]
        self.bound = max(self.bound, first.result.lower_bound)
        try:
            if self._cutting_planes(first.result.cost) and not self._close():
                if self.best is None and self.estimates_fail:
                    return
                settled = self._tilted(estimated=False) or self.estimates_fail
                if not (settled or self._close(WIDE) or self._narrow(NARROW)):
                    self._tilted(estimated=True)
        except SearchError:
            pass

    def run_from(self, known: Known) -> None:
        """The same, beginning near earlier prices; its own are known then."""
        earlier = known.prices
        end = len(self.searcher.space.theory.graph.instructions)
        over = False
        try:
            if earlier.fitting is None or earlier.exceeded or earlier.found_on != known.ranks:
                over = self._hopeless(earlier.exceeded_in(end))
            if not over and earlier.fitting is not None and earlier.bounding is not None:
                self.bound = self.lines[0].result.lower_bound
                self._search(earlier.bounding.on(known.ranks, end))
                prices = earlier.fitting.on(known.ranks, end)
                over = self._near(prices, earlier.fitting) or self._hopeless(sorted({i for i, _ in prices}))
        except SearchError:
            pass
        if not over:
            self.run()
        if self.best is None:
            earlier.exceeded = tuple(sorted({i for i, _ in self.tried[0]})), end
            return
        earlier.bounding, earlier.exceeded = known.priced(self.top, end), None
        if self.won is not None:
            at, tilt, estimated = self.won
            earlier.fitting = known.priced(at, end, tilt, estimated=estimated)
            earlier.found_on = known.ranks

    def _hopeless(self, places: Sequence[int]) -> bool:
        """Whether the programs that hold least lack much: at prices that outweigh all costs, wherever an earlier
        search or one of these programs exceeds the memory."""
        price = OUTWEIGHED**2 * self.lines[0].result.cost
        at = {(i, j): price / float(c) for i in places for j, c in enumerate(self.capacity) if np.isfinite(c)}
        for _ in range(OUTWEIGHING):
            more = exceeded(self.lines[-1].profile, self.capacity, [*at])
            at.update({(i, j): price / float(self.capacity[j]) for i, j in more})
            if self._search(at, TILT, estimated=True):
                return False
            if not exceeded(self.lines[-1].profile, self.capacity, [*at]):
                self.estimates_fail = True
                return self._lacks_much()
        return False

    def _part(self) -> float:
        """The largest part of a device's memory that the last program lacks."""
        return self.lines[-1].part(self.capacity)

    def _lacks_much(self) -> bool:
        """Whether every program so far that does not fit, and is no dearer than one that does, lacks so much memory
        that one that lacks none is not near."""
        dearest = math.inf if self.best is None else self.best.cost
        exceeding = [line for line in self.lines if line.lacking.any() and line.result.cost < dearest]
        return all(line.part(self.capacity) > HOPELESS for line in exceeding)

    def _near(self, prices: dict[Place, float], like: PricedAt) -> bool:
        """Scale the prices of an earlier search until a program just fits; whether one does."""
        bracket = Bracket(NEAR, cheapest=self._without_prices(prices))
        restarts = 0
        for _ in range(NEAR_SCALINGS + RESTARTS if prices else 0):
            at = {p: bracket.factor * price for p, price in prices.items()}
            fits = self._search(at, like.tilt, like.estimated)
            if not fits and restarts < RESTARTS and (more := self._more(prices)):
                prices.update(more)
                bracket.restart()
                restarts += 1
                continue
            bracket.take(self.lines[-1].result, fits=fits, lacking=self._part())
            if self._close() or self._narrow() or bracket.over:
                return bracket.most is not None
            if bracket.most is None and bracket.factor > FAR:
                break
        return bracket.most is not None

    def _cutting_planes(self, cost: float) -> bool:
        """Search at the prices that maximise the least of the lines. Whether a program may fit; ``cost``: that of
        the best program without regard to memory."""
        dearest = self.searcher.dearest(self.model, self.lengths)
        places: list[Place] = []
        for line in self.lines[:-1]:
            places += exceeded(line.profile, self.capacity, places)
        box = 2.0 * cost
        before: dict[Place, float] | None = None
        for _ in range(SEARCHES):
            places += exceeded(self.lines[-1].profile, self.capacity, places)
            at = dearest_prices(self.lines, places, self.capacity, box)
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

    def _settled_at(self, prices: dict[Place, float], scale: float = 1.0) -> bool:
        """Whether prices outweigh all costs and the last two searches have found the same program, or they do so by
        far."""
        times = scale * sum(price * self.capacity[j] for (_, j), price in prices.items())
        times /= self.lines[-1].result.cost
        same = len(self.lines) > 2 and self.lines[-1].same(self.lines[-2])
        return bool(times > OUTWEIGHED if same else times > OUTWEIGHED**2)

    def _search(self, at: dict[Place, float], tilt: float = 0.0, estimated: bool = False) -> bool:
        """Search at prices; whether the program fits."""
        result = self.searcher.search(
            self.model,
            self.lengths,
            replace(self.limits, expansions=min(self.limits.expansions, EXPANSIONS)),
            within=self.within,
            start=self._cheapest(at),
            prices=self.memory_prices.prices(self.model, self.lengths, at, tilt, estimated=estimated),
        )
        self.tried = at, tilt, estimated
        if tilt == 0.0:
            paid = float(sum(price * self.capacity[j] for (_, j), price in at.items()))
            value = result.lower_bound - paid
            if value >= self.highest:
                self.highest, self.top = value, at
            self.bound = max(self.bound, value)
        before = self.best
        fits = self.take(result)
        if self.best is not before:
            self.won = self.tried
        return fits

    def _cheapest(self, at: dict[Place, float]) -> SearchResult:
        """The program found so far that costs least at prices of what it holds: of those that are charged, near the
        one that costs least."""
        return min(self.lines, key=lambda line: line.result.cost + line.paid(at)).result

    def _without_prices(self, at: dict[Place, float]) -> tuple[float, float]:
        """Seconds of the program that costs least, and what all that it holds would cost at prices."""
        return self.lines[0].result.cost, self.lines[0].paid(at)

    def take(self, result: SearchResult) -> bool:
        """Keep a program; whether it fits."""
        theory, batches = self.searcher.space.theory, self.model.batches
        profile = memory_profile(theory, result.program, self.lengths, batches=batches)
        lacking = profile.lacking(self.capacity)
        self.lines.append(Line(result, profile, lacking))
        fits = not lacking.any()
        if fits and (self.best is None or result.cost < self.best.cost):
            self.best = result
        return fits

    def _close(self, gap: float = CLOSE) -> bool:
        return self.best is not None and self.best.cost - self.bound <= gap * self.best.cost

    def _narrow(self, part: float = ENOUGH) -> bool:
        """Whether a program that does not fit is nearly as dear as the best one that does."""
        if self.best is None:
            return False
        cost = self.best.cost
        return any(cost * (1 - part) <= line.result.cost <= cost for line in self.lines if line.lacking.any())

    def _more(self, prices: dict[Place, float]) -> dict[Place, float]:
        """Prices where the last program exceeds the capacity and has none: the mean of the others."""
        more = exceeded(self.lines[-1].profile, self.capacity, [*prices])
        return dict.fromkeys(more, sum(prices.values()) / len(prices))

    def _tilted(self, *, estimated: bool) -> bool:
        """Scale the prices at which L is highest, tilted, until a program just fits. With estimates, places that a
        program exceeds are priced like the others. Whether no scale between gives another program, and memory that
        has no price is not what the cheaper ones lack."""
        prices = dict(self.top)
        bracket = Bracket(cheapest=self._without_prices(prices))
        restarts = 0
        for _ in range(SCALINGS if prices else 0):
            factor = bracket.factor
            fits = self._search({p: factor * price for p, price in prices.items()}, TILT, estimated)
            if not fits and estimated and restarts < RESTARTS and (more := self._more(prices)):
                # At other prices the same scale may do.
                prices.update(more)
                bracket.restart()
                restarts += 1
                continue
            if not fits and bracket.most is None and self._settled_at(prices, factor):
                return False
            bracket.take(self.lines[-1].result, fits=fits, lacking=self._part())
            if self._close() or self._narrow() or bracket.over:
                return bracket.over and self._lacks_much()
        return False


def _does_not_fit(lines: list[Line], model: CostModel) -> MemoryLimitError:
    """The error that names the devices that lack memory for the program that comes nearest."""
    lacking = min(lines, key=lambda line: float(line.lacking.sum())).lacking
    capacity = capacities(model)
    return MemoryLimitError(
        {j: (int(lacking[j]), int(capacity[j])) for j in np.flatnonzero(lacking).tolist()},
        [d.name for d in model.cluster.devices],
        device_word(model.cluster),
    )
