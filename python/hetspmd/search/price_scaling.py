"""Which factors to scale prices of memory by, until a program just fits.

At prices scaled by s a program x costs ``cost(x) + s paid(x)``, so each is a line in s, and searches find the lower
hull of the lines. Where one end of a bracket fits and the other does not, the next factor is the one at which the
programs of both ends cost the same,

    s = (cost(most) - cost(least)) / (paid(least) - paid(most)),

as in Dinkelbach's method (1967). If the search there finds none cheaper than these two, by more than it may miss,
the hull has no program between them. Where no program has fitted yet, the steps grow as squares do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hetspmd.search.search import SearchResult

LONGEST = 256.0
"""The largest step outwards."""

FAR_OFF, FAR_STEP = 0.2, 4.0
"""A program that lacks more than this part of a device's memory is far from one that fits: the step is at least the
second."""

ENDS_MEET = 1e-3
"""Relative distance of two factors between which no further one is tried."""

SAME = 1e-6
"""Relative difference of priced costs up to which they count as the same."""


@dataclass(frozen=True)
class Scaled:
    """A program found at prices scaled by ``factor``: its own seconds, and what it pays at unscaled prices."""

    factor: float
    cost: float
    paid: float

    @classmethod
    def of(cls, factor: float, result: SearchResult) -> Scaled:
        """``result`` is what a search at these prices has found."""
        priced = result.lower_bound / (1.0 - result.gap) if result.gap < 1.0 else result.cost
        return cls(factor, result.cost, max(0.0, priced - result.cost) / factor)

    def at(self, factor: float) -> float:
        """Seconds with the prices of another factor."""
        return self.cost + factor * self.paid

    def crossing(self, other: Scaled) -> float:
        """The factor at which another program costs as much; NaN if it pays no less than this one."""
        return (other.cost - self.cost) / (self.paid - other.paid) if self.paid > other.paid else math.nan


@dataclass
class Bracket:
    """The nearest factors so far at which a program does not fit (``least``) and does (``most``).

    Steps outwards are by ``steps``, and beyond the last of them by squares of it.
    """

    steps: tuple[float, ...] = (2.0,)
    least: Scaled | None = None
    most: Scaled | None = None
    factor: float = 1.0
    over: bool = False
    """No further factor is worth a search."""
    cheapest: tuple[float, float] | None = None
    """Of the program that costs least without prices: its seconds, and at most what it pays at unscaled ones."""
    tolerance: float = 0.0
    """Seconds by which a search may miss the best program."""
    _crossing: float | None = None
    _outwards: int = field(default=0)

    def take(self, result: SearchResult, *, fits: bool, lacking: float = 0.0) -> None:
        """Take what a search at the present factor has found, and choose the next factor.

        ``lacking``: the part of a device's memory that the program lacks.
        """
        found = Scaled.of(self.factor, result)
        if self.factor == self._crossing and self.least is not None:
            self.over = found.at(self.factor) >= self.least.at(self.factor) * (1.0 - SAME) - self.tolerance
        if fits:
            self.most = found
        else:
            self.least = found
        self._crossing = None
        if self.least is not None and self.most is not None:
            self._between(self.least, self.most)
        else:
            self._outside(FAR_STEP if lacking > FAR_OFF else 1.0)

    def restart(self) -> None:
        """The prices are other ones from now on: what was too low may do, and nobody knows what is paid."""
        self.least = None
        if self.most is not None:
            self.most = Scaled(self.most.factor, self.most.cost, math.nan)

    def _between(self, least: Scaled, most: Scaled) -> None:
        """Next is where both ends cost the same, or the middle where they do so nowhere between. Where they cost
        the same at one end, but for what a search may miss, no factor between gives another program."""
        self.over |= most.factor - least.factor <= ENDS_MEET * least.factor
        dearer = (
            most.at(most.factor) - least.at(most.factor),
            least.at(least.factor) - most.at(least.factor),
        )
        self.over |= self.tolerance > 0.0 and any(0.0 <= by <= self.tolerance for by in dearer)
        factor = least.crossing(most)
        if least.factor < factor < most.factor:
            self.factor = self._crossing = factor
        else:
            self.factor = math.sqrt(least.factor * most.factor)

    def _outside(self, step_at_least: float) -> None:
        """Next is a step out from what is known. The first one down is to where the program that costs least
        without prices would cost as much, if it paid for all that it holds."""
        n, steps = self._outwards, self.steps
        self._outwards += 1
        if self.most is not None and self.cheapest is not None and n == 0:
            factor = Scaled(0.0, *self.cheapest).crossing(self.most)
            if 0.0 < factor < self.most.factor:
                self.factor = factor
                return
        step = steps[min(n, len(steps) - 1)]
        for _ in range(n + 1 - len(steps)):
            step = min(step * step, LONGEST)
        if self.least is not None:
            self.factor = self.least.factor * max(step, step_at_least)
        elif self.most is not None:
            self.factor = self.most.factor / step
