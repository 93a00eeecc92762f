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

A search that is like an earlier one starts from its prices (:mod:`hetspmd.search.earlier_prices`). Another one
first tries prices that are the same wherever programs exceed the memory, scaled until a program just fits. Cutting
planes are then for the bound, and decide where nothing fits at those. A quick search has no cutting planes: it
ends where nothing fits at either prices, which is no proof that nothing does. Where what fits is faster than any
other program that is known, prices are tilted and scaled further.

No search at prices is exact: each may miss the best program there by a thousandth of a step's seconds
(:data:`hetspmd.search.relaxation.TOLERANCE`), by which its bound is lower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetspmd.cluster.machines import device_word
from hetspmd.cost.model import Array, CostModel
from hetspmd.errors import MemoryLimitError, SearchError
from hetspmd.program.lengths import Lengths
from hetspmd.search.earlier_prices import EarlierPrices, Known, PricedAt
from hetspmd.search.memory_lines import Line, dearest_prices
from hetspmd.search.memory_prices import MemoryPrices, Place
from hetspmd.search.price_scaling import Bracket
from hetspmd.search.relaxation import ENOUGH, NARROW, OUTWEIGHED, Relaxation
from hetspmd.search.search import Limits, Searcher, SearchResult
from hetspmd.search.space import Space

SEARCHES = 40
"""At most so many searches at prices."""

BOUNDING = 4
"""The same where a program fits at uniform prices: they are for the bound."""

TILT = 0.25
"""By which part the price of a tensor at the end of the graph is higher than at its beginning, when tilted."""

SCALINGS = 12
"""At most so many searches at tilted prices (:mod:`hetspmd.search.price_scaling`)."""

ESTIMATED_SCALINGS = 6
"""The same with estimates, from the prices at which the best program was found, if any, and in a quick search for a
program that is faster than what is known."""

RESTARTS = 4
"""How often memory that has no price gets one while prices are scaled."""

WIDE = 1e-2
"""A gap above this part of the cost, or no program that fits, is worth the searches with estimates."""

FAIR = 3e-2
"""The same where a program has been found at uniform prices."""

NEAR_SCALINGS, NEAR, FAR = 7, (1.1, 1.3, 2.0), 16.0
"""At most so many searches at scaled prices of an earlier search, the first steps from them, until one program fits
and one does not, and the factor from which on it is no longer near."""

FEW_SCALINGS = 4
"""At most so many of those in a quick search, which a gap of :data:`NARROW` ends."""

OUTWEIGHING = 3
"""At most so many searches at prices that outweigh all costs, before others."""

UNIFORM = (1.0, 4.0)
"""The first prices, the same everywhere, in costs of the best program per capacity of a device. What is charged is
less than what is held, so that much higher ones lead away from programs that fit."""

TOO_FAR = 0.2
"""A program that lacks more than this part of a device's memory at the first of these prices is too far from one
that fits."""


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
    memory_prices: MemoryPrices | None = None,
    known: Known | None = None,
    quick: bool = False,
) -> SearchResult:
    """The best program found that fits every device at ``lengths``; ``start``, the best without regard to memory,
    if that fits. ``memory_prices``: those of the searcher, where they have been made. ``known``: the prices of
    earlier searches, to which those of this one are added.
    ``quick``: none is searched further where a few searches have found none that fits, or one that takes longer
    than what is known.

    Its ``lower_bound`` is certified for all programs that fit, its ``stop_reason`` is "memory" unless the bound
    meets the cost. Raises MemoryLimitError if no program found fits.
    """
    memory_prices = memory_prices or MemoryPrices(searcher, model.batches)
    prices = _Lagrangian(searcher, model, lengths, limits, within, capacities(model), memory_prices)
    if prices.take(start):
        return start
    prices.raise_bound(start.lower_bound)
    prices.folded = known is not None and searcher.folds
    prices.worth = 0.0 if known is None else known.worth
    if known is None:
        prices.run()
    else:
        prices.run_from(known, quick=quick)
    if prices.best is None:
        raise _does_not_fit(prices.lines, model)
    best, bound = prices.best, min(prices.bound, prices.best.cost)
    gap = (best.cost - bound) / best.cost if best.cost > 0 else 0.0
    return replace(best, lower_bound=bound, gap=gap, stop_reason="optimal" if gap == 0 else "memory")


class _Lagrangian(Relaxation):
    """The search for prices."""

    def run(self) -> None:
        """Cutting planes, then tilted scaling where they leave a gap."""
        first = self.lines[0]
        try:
            if self._cutting_planes(first.result.cost) and not self.close():
                if self.best is None and self.estimates_fail:
                    return
                settled = self._tilted(estimated=False) or self.estimates_fail
                if not (settled or self.close(WIDE) or self.narrow(NARROW)):
                    self._tilted(estimated=True)
        except SearchError:
            pass

    def run_from(self, known: Known, *, quick: bool = False) -> None:
        """The same, beginning near earlier prices, or at uniform ones where there are none; its own are known then.
        ``quick``: only if a program fits there."""
        earlier, ranks = known.prices, known.ranks
        end = len(self.searcher.space.theory.graph.instructions)
        self.raise_bound(self.lines[0].result.lower_bound)
        over = quick
        try:
            if quick:
                self._quickly(earlier, ranks)
            elif earlier.fitting is None or earlier.bounding is None:
                hopeless = bool(earlier.exceeded) and self._hopeless(earlier.exceeded_in(end))
                over = hopeless or self._from_uniform_prices()
                over = over or (not earlier.exceeded and self._hopeless([]))
            else:
                if earlier.exceeded or earlier.found_on != ranks:
                    over = self._hopeless(earlier.exceeded_in(end))
                if not over:
                    self._at_prices(earlier.bounding.on(ranks, end))
                    prices = earlier.fitting.on(ranks, end)
                    over = self._near(prices, earlier.fitting) or self._at_uniform_prices()
                    over = over or self._hopeless(sorted({i for i, _ in prices}))
        except SearchError:
            pass
        if not over:
            self.run()
        if self.folded and not quick:
            self._unfolded(over or earlier.fitting is not None)
        if self.best is None:
            earlier.exceeded = tuple(sorted({i for i, _ in self.tried[0]})), end
            return
        earlier.bounding, earlier.exceeded = known.priced(self.top, end), None
        if self.won is not None:
            at, tilt, estimated = self.won
            earlier.fitting = known.priced(at, end, tilt, estimated=estimated)
            earlier.found_on = known.ranks

    def _unfolded(self, over: bool) -> None:
        """Search among all programs: for a bound and, where that is far and such searches are not hard, at the
        prices of the best program so far for one whose alike layers differ. Where none has been found, search as
        before, unless all lacked much or it is ``over``."""
        self.unfold()
        if self.best is None:
            if not over and not self.lacks_much():
                self.run()
            return
        try:
            self.search(self.top)
            if not (self.won is None or self.searcher.hard or self.close(WIDE)):
                self.search(*self.won)
        except SearchError:
            pass

    def _quickly(self, earlier: EarlierPrices, ranks: Sequence[int]) -> None:
        """A few searches near earlier prices, and at uniform ones."""
        end = len(self.searcher.space.theory.graph.instructions)
        near = False
        if earlier.fitting is not None and earlier.bounding is not None:
            self._at_prices(earlier.bounding.on(ranks, end))
            near = self._near(earlier.fitting.on(ranks, end), earlier.fitting, quick=True)
        if (near or self._at_uniform_prices(quick=True)) and not (self.close(FAIR) or self.narrow(NARROW)):
            assert self.best is not None
            if self.best.cost < self.worth:
                self._tilted(estimated=False, most=ESTIMATED_SCALINGS)

    def _at_prices(self, prices: dict[Place, float]) -> None:
        """Search at these prices, if there are any: without, the best program is known."""
        if prices:
            self.search(prices)

    def _from_uniform_prices(self) -> bool:
        """Search at uniform prices and, if a program fits there, for a bound and better ones. Whether one does."""
        fits = self._at_uniform_prices()
        if fits and not self.close():
            self._cutting_planes(self.lines[0].result.cost, BOUNDING)
            for estimated in (False, True):
                if self.close(FAIR):
                    break
                self._tilted(estimated=estimated)
        return fits

    def _hopeless(self, places: Sequence[int]) -> bool:
        """Whether the programs that hold least lack much: at prices that outweigh all costs, wherever an earlier
        search or one of these programs exceeds the memory."""
        price = OUTWEIGHED**2 * self.lines[0].result.cost
        at = {(i, j): price / float(c) for i in places for j, c in enumerate(self.capacity) if np.isfinite(c)}
        for _ in range(OUTWEIGHING):
            more = self.exceeded(at)
            at.update({(i, j): price / float(self.capacity[j]) for i, j in more})
            if self.search(at, TILT, estimated=True):
                return False
            if not self.exceeded(at):
                self.estimates_fail = True
                return self.lacks_much()
        return False

    def _at_uniform_prices(self, *, quick: bool = False) -> bool:
        """Whether a program fits at prices that are the same wherever one of the programs exceeds the memory; if
        one does, they are scaled until one just fits."""
        places: list[Place] = []
        for times in UNIFORM:
            places += self.exceeded(places)
            price = times * self.lines[0].result.cost
            at = {(i, j): price / float(self.capacity[j]) for i, j in places}
            if self.search(at):
                end = len(self.searcher.space.theory.graph.instructions)
                return self._near(at, PricedAt({}, end), self.lines[-1].result, quick=quick)
            if self.part() > TOO_FAR:
                return False
        return False

    def _near(
        self,
        prices: dict[Place, float],
        like: PricedAt,
        fitting: SearchResult | None = None,
        *,
        quick: bool = False,
    ) -> bool:
        """Scale the prices of an earlier search until a program just fits; whether one does. ``fitting``: what fits
        at these prices, if it is known."""
        bracket = Bracket(NEAR, cheapest=self.without_prices(prices), tolerance=self.tolerance)
        if fitting is not None:
            bracket.take(fitting, fits=True)
        restarts = 0
        enough, most = (NARROW, FEW_SCALINGS) if quick else (ENOUGH, NEAR_SCALINGS)
        for _ in range(most if prices else 0):
            at = {p: bracket.factor * price for p, price in prices.items()}
            fits = self.search(at, like.tilt, like.estimated)
            if not fits and restarts < RESTARTS and (more := self.more_places(prices)):
                prices.update(more)
                bracket.restart()
                restarts += 1
                continue
            bracket.take(self.lines[-1].result, fits=fits, lacking=self.part())
            if self.close() or self.narrow(enough) or bracket.over:
                return bracket.most is not None
            if bracket.most is None and bracket.factor > FAR:
                break
        return bracket.most is not None

    def _cutting_planes(self, cost: float, most: int = SEARCHES) -> bool:
        """Search at the prices that maximise the least of the lines, at most so often. Whether a program may fit;
        ``cost``: that of the best program without regard to memory."""
        dearest = self.searcher.dearest(self.model, self.lengths)
        places: list[Place] = []
        for line in self.lines[:-1]:
            places += line.exceeded(self.capacity, places)
        box = 2.0 * cost
        before: dict[Place, float] | None = None
        for _ in range(most):
            places += self.exceeded(places)
            at = dearest_prices(self.lines, places, self.capacity, box)
            if at == before:
                if self.best is not None or box > 1e4 * cost or self.settled_at(at):
                    break
                box *= 64.0
                continue
            before = at
            self.search(at)
            if self.among > dearest:
                return False
            if self.close():
                break
        return True

    def _tilted(self, *, estimated: bool, most: int = SCALINGS) -> bool:
        """Scale the prices at which L is highest, tilted, until a program just fits, at most so often. With
        estimates, places that a program exceeds are priced like the others. Whether no scale between gives another
        program, and memory that has no price is not what the cheaper ones lack."""
        prices = dict(self.won[0] if estimated and self.won is not None else self.top)
        bracket = Bracket(cheapest=self.without_prices(prices), tolerance=self.tolerance)
        restarts = 0
        most = ESTIMATED_SCALINGS if estimated and self.won is not None else most
        for _ in range(most if prices else 0):
            factor = bracket.factor
            fits = self.search({p: factor * price for p, price in prices.items()}, TILT, estimated)
            if not fits and estimated and restarts < RESTARTS and (more := self.more_places(prices)):
                # At other prices the same scale may do.
                prices.update(more)
                bracket.restart()
                restarts += 1
                continue
            if not fits and bracket.most is None and self.settled_at(prices, factor):
                return False
            bracket.take(self.lines[-1].result, fits=fits, lacking=self.part())
            if self.close() or self.narrow() or bracket.over:
                return bracket.over and self.lacks_much()
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
