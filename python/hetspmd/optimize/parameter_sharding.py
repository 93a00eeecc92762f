"""Which parameters are stored in shards, settled one by one in the simulation of the step.

A parameter that every device holds costs an all-reduce of its gradient in the backward; one in shards costs half
the bytes there and as many in the forward, where it is gathered (:mod:`hetspmd.optimize.prefetch`). Where the
links are what the step waits for, the best division leaves them idle neither in the forward nor in the backward,
gathers nothing that the forward reads at once, and keeps small gradients together in buckets. No additive cost
tells that. So the storage of a good program is changed, one parameter after the other, and what the simulation
finds faster is kept. At the end of a round the distance of the gathers is chosen anew; one that gains enough is
followed by another.

A changed program computes by the same triples; the search, confined to them, chooses its collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from hetspmd.cost.model import CostModel
from hetspmd.errors import InfeasibleError, SearchError
from hetspmd.optimize.candidate import Judge, Pair
from hetspmd.optimize.prefetch import (
    AHEAD,
    WORTH,
    Searching,
    divisible,
    last_first,
    like,
    storage_axes,
    stored_evenly,
)
from hetspmd.placement import REPLICATE, Placement
from hetspmd.program.lengths import Lengths
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints, RowFilter
from hetspmd.search.search import stored_forms

__all__ = ["stored_one_by_one"]

GROUPS: Final = 32
"""Groups of parameters that are changed together; neighbours in the order of the forward share one."""

SMALL: Final = 0.002
"""The smallest parameters, with this part of all bytes, stay as they are."""

ROUNDS: Final = 2
GAIN: Final = 0.01
"""Rounds at most, and the part of the step that the first must gain to be followed by another."""


def stored_one_by_one(of: Searching, costs: CostModel, pair: Pair) -> Pair | None:
    """A pair on the same devices with other parameters stored in shards, if one is faster than ``pair``."""
    if costs.world == 1 or pair.seconds * (1 - WORTH) <= pair.stages.floor:
        return None
    return _Settling(of, costs, pair).run()


class _Settling:
    """The storage of the parameters of one pair."""

    def __init__(self, of: Searching, costs: CostModel, pair: Pair) -> None:
        self.of, self.costs, self.pair = of, costs, pair
        theory, rows = of.theory, pair.found.rows
        free = storage_axes(theory, pair.program)
        self.lengths: Lengths = stored_evenly(theory, pair.lengths, pair.ratios, free)
        self.filter: RowFilter = like(theory, rows)
        self.forms = stored_forms(theory, rows)
        open_ = [t for t in self.forms if t not in of.fixed.forms]
        self.sharded = divisible(theory, open_, free, pair.lengths.world)
        self.groups = grouped(theory, self.sharded)
        self.ahead = pair.program.ahead
        self.best = pair

    def run(self) -> Pair | None:
        """The best pair, None where it is the one that was given."""
        for _ in range(ROUNDS):
            before = self.best.seconds
            for group in self.groups:
                self._change(group)
            for distance in (1, *AHEAD):
                if distance != self.ahead:
                    self._try(self.forms, distance)
            if self.best.seconds > before * (1 - GAIN):
                break
        return None if self.best is self.pair else self.best

    def _change(self, group: Sequence[int]) -> None:
        """Store the group's parameters in shards, or whole, unless they are."""
        for form in ({t: self.sharded[t] for t in group}, dict.fromkeys(group, REPLICATE)):
            forms = {**self.forms, **form}
            if forms != self.forms:
                self._try(forms, self.ahead)

    def _try(self, forms: dict[int, Placement], ahead: int) -> None:
        of = self.of
        within = of.searcher.space.within(Constraints({**of.fixed.forms, **forms}, self.filter))
        try:
            found = of._search(self.costs, self.lengths, None, within)
        except (InfeasibleError, SearchError):
            return
        found = replace(found, program=replace(found.program, ahead=ahead))
        # Its bound is of programs of its kind.
        made = Judge(of, self.costs, found, self.pair.active, None)(self.pair.ratios, self.lengths)
        with of.clock("balance"):
            if made.seconds < self.best.seconds and made.fits:
                self.best, self.forms, self.ahead = made, forms, ahead


def grouped(theory: Theory, parameters: Iterable[int]) -> list[list[int]]:
    """The parameters, but for the smallest, in about :data:`GROUPS` groups of neighbours of nearly as many bytes;
    of most bytes first and, among equals, in the order of the forward."""
    ordered = last_first(theory, parameters, SMALL)[::-1]
    nbytes = {t: theory.graph.tensors[t].nbytes for t in ordered}
    total = sum(nbytes.values())
    found: dict[int, list[int]] = {}
    for n, (tensor, end) in enumerate(zip(ordered, accumulate(nbytes.values()), strict=True)):
        middle = (end - nbytes[tensor] / 2) / total
        found.setdefault(n if len(ordered) <= GROUPS else int(middle * GROUPS), []).append(tensor)
    return sorted(found.values(), key=lambda group: -sum(nbytes[t] for t in group))
