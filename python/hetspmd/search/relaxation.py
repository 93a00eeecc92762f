"""The relaxed problem of :mod:`hetspmd.search.memory_limits`: searches at prices of memory, and what they found.

A program fits if it does in the order of the search, where prices apply, and as it is executed
(:mod:`hetspmd.cost.step`), with what collectives hold on their way. What it then holds more counts wherever it
exceeds the memory.

Where a model has many alike layers, the searches are at first among the programs in which runs of them are alike
(:mod:`hetspmd.search.folding`), which take a fraction of the time. Their bounds are of these programs alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from hetspmd.cost.memory import memory_profile
from hetspmd.cost.model import Array, CostModel
from hetspmd.cost.step import StepModel
from hetspmd.program.lengths import Lengths
from hetspmd.search.memory_lines import Line
from hetspmd.search.memory_prices import MemoryPrices, Place
from hetspmd.search.search import Limits, Searcher, SearchResult
from hetspmd.search.space import Space

EXPANSIONS = 2000
"""Partial programs that one of them may expand: most need none, and prices are not worth a long search."""


TOLERANCE = 1e-3
"""By this part of the seconds that a step takes at least, a search at prices may miss the best program. What
is decided by these programs needs no more (:data:`ENOUGH`), and proving the last part takes longest."""


CLOSE = 1e-3
"""A program this near to the bound, as a part of its cost, ends the search for prices."""


ENOUGH, NARROW = 2e-3, 1.5e-2
"""A program that fits, dearer by this part than one that does not, at lower prices: no better one is searched for
at prices between them, or at prices of other kinds. One layer of thirty costs more than the first."""


OUTWEIGHED = 20.0
"""Prices of so many times a program's cost outweigh it."""


HOPELESS = 0.1
"""Where all programs lack this part of a device's memory, also at prices that outweigh all costs, none fits. Prices
charge less than is held: in a small model one fits though the others lack 6 %."""


@dataclass
class Relaxation:
    """The relaxed problem at some lengths: the programs found so far, the best that fits, the certified bound."""

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
    """Of all programs, certified."""
    among: float = -np.inf
    """Of those that are searched among."""
    folded: bool = False
    """These are the programs in which alike layers are alike."""
    highest: float = -np.inf
    top: dict[Place, float] = field(default_factory=dict)
    """The prices tried at which L is highest."""
    tried: tuple[dict[Place, float], float, bool] = field(default_factory=lambda: ({}, 0.0, False))
    """The last prices, their tilt, and whether they are estimated too."""
    worth: float = 0.0
    """A program that fits and takes fewer seconds is worth more searches than a quick search makes."""
    estimates_fail: bool = False
    """With estimates no program fits at prices that outweigh all costs."""
    won: tuple[dict[Place, float], float, bool] | None = None
    """Those at which the best program was found."""

    @property
    def tolerance(self) -> float:
        """Seconds by which a search may miss the best program."""
        return TOLERANCE * self.lines[0].result.cost

    def exceeded(self, priced: Iterable[Place]) -> list[Place]:
        """Where the last program exceeds the capacity and there is no price yet."""
        return self.lines[-1].exceeded(self.capacity, priced)

    def part(self) -> float:
        """The largest part of a device's memory that the last program lacks."""
        return self.lines[-1].part(self.capacity)

    def lacks_much(self) -> bool:
        """Whether every program so far that does not fit, and is no dearer than one that does, lacks so much memory
        that one that lacks none is not near."""
        dearest = math.inf if self.best is None else self.best.cost
        exceeding = [line for line in self.lines if line.lacking.any() and line.result.cost < dearest]
        return all(line.part(self.capacity) > HOPELESS for line in exceeding)

    def settled_at(self, prices: dict[Place, float], scale: float = 1.0) -> bool:
        """Whether prices outweigh all costs and the last two searches have found the same program, or they do so by
        far."""
        times = scale * sum(price * self.capacity[j] for (_, j), price in prices.items())
        times /= self.lines[-1].result.cost
        same = len(self.lines) > 2 and self.lines[-1].same(self.lines[-2])
        return bool(times > OUTWEIGHED if same else times > OUTWEIGHED**2)

    def search(self, at: dict[Place, float], tilt: float = 0.0, estimated: bool = False) -> bool:
        """Search at prices; whether the program fits."""
        result = self.searcher.search(
            self.model,
            self.lengths,
            replace(
                self.limits,
                expansions=min(self.limits.expansions, EXPANSIONS),
                tolerance=self.tolerance,
                brief=self.searcher.hard and not self.folded,
            ),
            within=self.within,
            start=self._cheapest(at),
            prices=self.memory_prices.prices(self.model, self.lengths, at, tilt, estimated=estimated),
            folded=self.folded,
        )
        self.tried = at, tilt, estimated
        if tilt == 0.0:
            paid = float(sum(price * self.capacity[j] for (_, j), price in at.items()))
            value = result.lower_bound - paid
            if value >= self.highest:
                self.highest, self.top = value, at
            self.raise_bound(value)
        before = self.best
        fits = self.take(result)
        if self.best is not before:
            self.won = self.tried
        return fits

    def raise_bound(self, value: float) -> None:
        """No program that is searched among fits for less."""
        self.among = max(self.among, value)
        self.bound = self.bound if self.folded else max(self.bound, value)

    def unfold(self) -> None:
        """From now on all programs are searched among."""
        self.folded, self.among, self.highest = False, self.bound, -np.inf

    def _cheapest(self, at: dict[Place, float]) -> SearchResult:
        """The program found so far that costs least at prices of what it holds: of those that are charged, near the
        one that costs least."""
        return min(self.lines, key=lambda line: line.result.cost + line.paid(at)).result

    def without_prices(self, at: dict[Place, float]) -> tuple[float, float]:
        """Seconds of the program that costs least, and what all that it holds would cost at prices."""
        return self.lines[0].result.cost, self.lines[0].paid(at)

    def take(self, result: SearchResult) -> bool:
        """Keep a program; whether it fits."""
        same = (line for line in self.lines if line.result.cost == result.cost)
        known = next((line for line in same if line.result.program == result.program), None)
        line = self._line(result) if known is None else replace(known, result=result)
        self.lines.append(line)
        fits = not line.lacking.any()
        if fits and (self.best is None or result.cost < self.best.cost):
            self.best = result
        return fits

    def _line(self, result: SearchResult) -> Line:
        """A program, with what it holds."""
        theory, batches = self.searcher.space.theory, self.model.batches
        profile = memory_profile(theory, result.program, self.lengths, batches=batches)
        lacking = profile.lacking(self.capacity)
        more: Array = np.zeros(len(lacking))
        if not lacking.any():
            executed = StepModel(self.model, result.program).held(self.lengths)
            lacking = executed.lacking(self.capacity)
            more = np.maximum(np.subtract(executed.peaks, profile.peaks), 0).astype(float)
        return Line(result, profile, lacking, more)

    def close(self, gap: float = CLOSE) -> bool:
        return self.best is not None and self.best.cost - self.among <= gap * self.best.cost

    def narrow(self, part: float = ENOUGH) -> bool:
        """Whether a program that does not fit is nearly as dear as the best one that does."""
        if self.best is None:
            return False
        cost = self.best.cost
        return any(cost * (1 - part) <= line.result.cost <= cost for line in self.lines if line.lacking.any())

    def more_places(self, prices: dict[Place, float]) -> dict[Place, float]:
        """Prices where the last program exceeds the capacity and has none: the mean of the others."""
        more = self.exceeded(prices)
        return dict.fromkeys(more, sum(prices.values()) / len(prices))
