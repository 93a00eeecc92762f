"""Which parameters are stored in shards, settled one by one in the simulation of the step.

A parameter that every device holds costs an all-reduce of its gradient in the backward; one in shards costs half
the bytes there and as many in the forward, where it is gathered (:mod:`hetspmd.optimize.prefetch`). Where the
links are what the step waits for, the best division leaves them idle neither in the forward nor in the backward,
gathers nothing that the forward reads at once, and keeps small gradients together in buckets. No additive cost
tells that. So the storage of a good program is changed, one parameter after the other, and what the simulation
finds faster is kept, largest ones first until many in a row gain nothing. What a few in a row do not fit the
memory, in shards or whole, is tried no further: their collectives are chosen without prices of memory. Of alike
parameters, those of alike layers, the first and the last are tried: where neither gains, those between are left as
they are. At the end of a round the distance of the gathers is chosen anew; one that gains enough is followed by
another.

A changed program computes by the same triples; the search, confined to them, chooses its collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from hetspmd.cost.model import CostModel
from hetspmd.errors import InfeasibleError, SearchError
from hetspmd.optimize.candidate import Candidate, Evaluator
from hetspmd.optimize.prefetch import divisible, last_first, like, storage_axes, stored_evenly
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.placement import REPLICATE, Placement
from hetspmd.program.lengths import Lengths
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import SearchResult, stored_forms


def storage_variants(
    ctx: Synthesis, costs: CostModel, candidate: Candidate
) -> tuple[Candidate, list[Candidate]]:
    """Candidates on the same devices with other parameters stored in shards, in the order in which they were tried,
    and before them the best of all: ``candidate`` itself if none that fits is faster."""
    gain = ctx.thresholds.hidden_gain
    if costs.world == 1 or candidate.seconds * (1 - gain) <= candidate.stages.lower_bound:
        return candidate, []
    storage = _Storage(ctx, costs, candidate)
    storage.run()
    return storage.best, storage.tried


_FEW_ALIKE: Final = 3
"""Of so few alike groups all are tried."""


class _Storage:
    """The storage of the parameters of one candidate."""

    def __init__(self, ctx: Synthesis, costs: CostModel, candidate: Candidate) -> None:
        self.ctx, self.costs, self.first = ctx, costs, candidate
        theory, rows = ctx.theory, candidate.result.rows
        free = storage_axes(theory, candidate.program)
        self.lengths: Lengths = stored_evenly(theory, candidate.lengths, candidate.ratios, free)
        self.within = ctx.searcher.space.within(Constraints(ctx.constraints.forms, like(theory, rows)))
        self.forms = stored_forms(theory, rows)
        open_ = [t for t in self.forms if t not in ctx.constraints.forms]
        self.sharded = divisible(theory, open_, free, candidate.lengths.world, ctx.thresholds.even_shard)
        self.groups = grouped(ctx, self.sharded)
        self.names = {p.tensor: p.name for p in theory.graph.parameters}
        self.distance = candidate.evaluator.prefetch_distance
        self.best = candidate
        self.waited = 0  # changes in a row that gained nothing
        # Of each way to store them, the changes in a row that cannot fit the memory.
        self.unfit = {"in shards": 0, "whole": 0}
        self.tried: list[Candidate] = []
        self.results: dict[frozenset[tuple[int, Placement]], SearchResult | None] = {}
        self.seen: set[tuple[frozenset[tuple[int, Placement]], int]] = set()

    def run(self) -> None:
        """Try all, and keep what is faster."""
        thresholds = self.ctx.thresholds
        for _ in range(thresholds.storage_rounds):
            before = self.best.seconds
            self.waited = 0
            for alike in self._alike_groups():
                for how in ("in shards", "whole"):
                    first, *between = alike
                    ends = [first, between.pop()] if len(alike) > 1 else [first]
                    gains = [self._change(group, how) for group in ends]
                    if any(gains) or len(alike) <= _FEW_ALIKE:
                        for group in between:
                            self._change(group, how)
            self._move_gathers()
            if self.best.seconds > before * (1 - thresholds.storage_round_gain):
                break

    def _move_gathers(self) -> None:
        """Gather fewer groups ahead, and more, until that gains nothing some times in a row."""
        thresholds, middle = self.ctx.thresholds, self.distance
        distances = (1, *thresholds.prefetch_distances)
        for way in ([d for d in distances if d > middle], [d for d in distances if d < middle][::-1]):
            waited = 0
            for distance in way:
                if waited == thresholds.distances_without_gain:
                    break
                gains = self._try(self.forms, distance, f"gathers {distance} ahead")
                waited = 0 if gains else waited + 1

    def _alike_groups(self) -> list[list[list[int]]]:
        """The groups, those together whose parameters have the same shapes and are stored alike."""
        tensors = self.ctx.theory.graph.tensors
        alike: dict[tuple[object, ...], list[list[int]]] = {}
        for group in self.groups:
            kind = tuple((tensors[t].shape, tensors[t].dtype, self.forms[t]) for t in group)
            alike.setdefault(kind, []).append(group)
        return list(alike.values())

    def _change(self, group: Sequence[int], how: str) -> bool:
        """Store the group's parameters in shards, or whole, unless they are; whether that gains."""
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        form = {t: self.sharded[t] for t in group} if how == "in shards" else dict.fromkeys(group, REPLICATE)
        forms, thresholds = {**self.forms, **form}, self.ctx.thresholds
        if forms == self.forms or self.waited >= thresholds.changes_without_gain:
            return False
        if self.unfit[how] >= thresholds.changes_that_do_not_fit:
            return False
        before = len(self.tried)
        gains = self._try(forms, self.distance, f"{self.names[group[0]]}{more} {how}")
        self.waited = 0 if gains else self.waited + 1
        may_fit = all(candidate.may_fit for candidate in self.tried[before:])
        self.unfit[how] = 0 if may_fit else self.unfit[how] + 1
        return gains

    def _try(self, forms: dict[int, Placement], distance: int, reason: str) -> bool:
        """Whether the best program that stores parameters in these forms is the best so far with its gathers so
        many groups ahead. What was tried before is not again."""
        key = frozenset(forms.items())
        if (key, distance) in self.seen:
            return False
        self.seen.add((key, distance))
        if key not in self.results:
            self.results[key] = self._searched(forms)
        result = self.results[key]
        if result is None:
            return False
        # Its bound is of programs of its kind.
        reason = f"{reason}, else as the best before"
        evaluator = Evaluator(self.ctx, self.costs, result, self.first.active, None, reason, distance)
        candidate = evaluator(self.first.ratios, self.lengths)
        self.tried.append(candidate)
        with self.ctx.clock("balance"):
            better = candidate.may_fit and candidate.seconds < self.best.seconds and candidate.fits
        if better:
            self.best, self.forms, self.distance = candidate, forms, distance
        return better

    def _searched(self, forms: dict[int, Placement]) -> SearchResult | None:
        try:
            return self.ctx.search(self.costs, self.lengths, within=self.within.storing(forms))
        except (InfeasibleError, SearchError):
            return None


def grouped(ctx: Synthesis, parameters: Iterable[int]) -> list[list[int]]:
    """The parameters, but for the smallest, in about as many groups of neighbours of nearly as many bytes as the
    thresholds say; of most bytes first and, among equals, in the order of the forward."""
    most = ctx.thresholds.parameter_groups
    ordered = last_first(ctx.theory, parameters, ctx.thresholds.smallest_in_groups)[::-1]
    nbytes = {t: ctx.theory.graph.tensors[t].nbytes for t in ordered}
    total = sum(nbytes.values())
    groups: dict[int, list[int]] = {}
    for n, (tensor, end) in enumerate(zip(ordered, accumulate(nbytes.values()), strict=True)):
        middle = (end - nbytes[tensor] / 2) / total
        groups.setdefault(n if len(ordered) <= most else int(middle * most), []).append(tensor)
    return sorted(groups.values(), key=lambda group: -sum(nbytes[t] for t in group))
