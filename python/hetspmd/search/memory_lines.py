"""Programs found at prices of memory, and the prices that follow from them (Kelley's cutting planes, 1960)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import highspy
import numpy as np

from hetspmd.cost.memory import MemoryProfile
from hetspmd.cost.model import Array, Index
from hetspmd.search.highs import quiet_highs
from hetspmd.search.memory_prices import Place
from hetspmd.search.search import SearchResult

WINDOWS = 8
"""Parts of a step in each of which memory gets a price."""

ALIKE = 1e-2
"""Relative difference of the memory that two equally dear programs lack, up to which they count as the same."""


@dataclass(frozen=True)
class Line:
    """A program found, with its profile: its line bounds L from above."""

    result: SearchResult
    profile: MemoryProfile
    lacking: Array
    """Bytes of each device."""
    more: Array
    """Bytes that each device holds more while the program is executed, where only that does not fit."""
    _held: dict[int, Index] = field(default_factory=dict)

    def paid(self, at: dict[Place, float]) -> float:
        """Seconds that what the program holds costs at these prices."""
        return sum(price * float(self.held(i)[j]) for (i, j), price in at.items())

    def part(self, capacity: Array) -> float:
        """The largest part of a device's memory that the program lacks."""
        return float((self.lacking / np.maximum(capacity, 1.0)).max())

    def exceeded(self, capacity: Array, priced: Iterable[Place]) -> list[Place]:
        """Where the program exceeds the capacity and there is no price yet: per device the peak of each of
        :data:`WINDOWS` equal parts of the step. Were it the highest alone, the next program would only move it from
        one layer to the next."""
        known, profile, room = frozenset(priced), self.profile, capacity - self.more
        places: dict[Place, None] = {}
        for j in np.flatnonzero(profile.lacking(room) > 0).tolist():
            held = profile.held[:, j]
            for moments in np.array_split(np.arange(len(held)), min(WINDOWS, len(held))):
                at = int(moments[held[moments].argmax()])
                if held[at] > room[j]:
                    places[int(profile.instruction[at]), j] = None
        return [place for place in places if place not in known]

    def held(self, instruction: int) -> Index:
        """The most bytes that each device holds during an instruction."""
        if instruction not in self._held:
            self._held[instruction] = self.profile.during(instruction)
        return self._held[instruction]

    def same(self, other: Line) -> bool:
        """Whether both are of one program, or of two that differ in nothing that counts here."""
        one, two = self.result, other.result
        if one.rows == two.rows and one.moves == two.moves:
            return True
        return math.isclose(one.cost, two.cost) and np.allclose(self.lacking, other.lacking, rtol=ALIKE)


def dearest_prices(lines: list[Line], places: list[Place], capacity: Array, box: float) -> dict[Place, float]:
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
        slopes = [(float(line.held(i)[j]) - capacity[j]) / s for (i, j), s in zip(places, scale, strict=True)]
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
