"""Search and ratios in turns, on all devices and on subsets of them (HAP 3.1).

From each starting ratio B the search gives the best program Q at the lengths of B, the linear program the
best B for Q, and so on until the pair repeats. Pairs are compared by the two-stream simulation. At the
lengths of the best pair more candidates are searched, with less weight on communication that other work can
hide; and at those of the other starts' best pairs, where these are nearly as good. Programs that tie in the
search may differ by a fifth in the simulation (an all-reduce costs what a reduce-scatter and an all-gather
cost together, of which the latter can be hidden), and which of them comes out changes with the lengths. Data
parallel programs are always among the candidates, so a plan is never worse than those in the same model.

The same is done for subsets of the devices, the fastest one alone among them; the devices of a better
subset's plan are its active ones, the others idle. A subset whose bound :meth:`CostModel.floor` is no
better than the best so far is left out.

Only pairs that fit every device's memory can become a plan. Where the best program at some lengths does not
fit, the best that does is searched at prices of memory (:mod:`hetspmd.search.memory_limits`), and the ratios are
bounded by what the program holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.model import Array, CostModel
from hetspmd.errors import InfeasibleError, MemoryLimitError, SearchError
from hetspmd.optimize.candidate import Clock, Judge, Pair, bounded
from hetspmd.optimize.parameter_sharding import stored_one_by_one
from hetspmd.optimize.prefetch import gathered_ahead
from hetspmd.plan.reports import Iteration
from hetspmd.program.lengths import Lengths, Matrix, Ratios, by_segment, lengths_for
from hetspmd.ratios.problem import Room
from hetspmd.ratios.ratios import optimise
from hetspmd.ratios.starts import by_memory, even, proportional, starting_ratios, teams
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.search.memory_limits import capacities, search_that_fits
from hetspmd.search.search import Found, Limits, Searcher
from hetspmd.search.space import Space, search_space

__all__ = ["Alternation", "Clock", "Outcome", "Pair"]

MAX_ITERATIONS = 4
"""Alternations of search and ratios from one start; pairs repeat after two or three in practice."""

WORTH = 0.005
"""The part of a step that another search at prices of memory should gain."""

MARGINS = 4
"""Attempts at ratios whose whole units keep within the memory."""

OVERLAPS = (0.5, 0.1)
"""Weights on communication that other work can hide, for further candidates."""


NEAR = 0.1
"""Where a start's best pair takes at most this part longer than the best of all, more candidates are searched."""


@dataclass(frozen=True)
class Outcome:
    """The best pair, seconds of the baselines, the trace of the alternation that led to the pair, and the baselines
    that do not fit the devices' memory."""

    pair: Pair
    baselines: dict[str, float]
    iterations: tuple[Iteration, ...]
    over_memory: tuple[str, ...] = ()


class Alternation:
    """The search for the best pair for one theory, cluster and set of constraints."""

    def __init__(
        self, theory: Theory, cluster: Cluster, fixed: Constraints, limits: Limits, clock: Clock
    ) -> None:
        self.theory, self.cluster, self.fixed = theory, cluster, fixed
        self.limits, self.clock = limits, clock
        with clock("synth"):
            self.searcher = Searcher(search_space(theory, fixed))
        self.batch = known.batch_axes(theory)
        self.nearest: MemoryLimitError | None = None

    def run(self) -> Outcome:
        """The best pair on any set of devices.

        Raises InfeasibleError if no program satisfies the constraints, MemoryLimitError if none found fits,
        SearchError if a limit struck before the first program was found.
        """
        everyone = tuple(range(self.cluster.world))
        costs = CostModel(self.theory, self.cluster)
        found, iterations = self._rounds(costs, everyone, starting_ratios(costs))
        baselines = self._baselines(costs)
        best = self._best([*baselines.values(), *found])
        if best is not None:
            best = self._best([best, *self._overlapping(costs, everyone, best, found, iterations)])
        seconds = {name: pair.seconds for name, pair in baselines.items()}
        over = [name for name, pair in baselines.items() if not pair.fits]
        seconds["fastest_device_alone"] = float(min(costs.alone()))
        teamed = [] if best is None else [(costs, best, iterations)]
        for ranks in teams(costs):
            part = CostModel(self.theory, self.cluster.part(ranks))
            limited = len(ranks) == 1 and np.isfinite(capacities(part)).any()
            if best is not None and part.floor() >= best.seconds and not limited:
                continue
            pairs, rounds = self._team(part, ranks)
            if limited and not any(pair.fits for pair in pairs):
                over.append("fastest_device_alone")
            better = self._best(pairs)
            if better is not None:
                teamed.append((part, better, rounds))
                best = self._best([better] if best is None else [best, better])
        if best is None:
            assert self.nearest is not None
            raise self.nearest
        settled = [(self._settled(costs, pair, best), rounds) for costs, pair, rounds in teamed]
        best = self._best([pair for pair, _ in settled]) or best
        iterations = next(rounds for pair, rounds in settled if pair is best)
        if len(best.active) < self.cluster.world and len(teamed[0][1].active) == self.cluster.world:
            seconds["all_devices"] = settled[0][0].seconds
        best = self._certified(best)
        return Outcome(best, seconds, tuple(iterations), tuple(over))

    def on(self, active: tuple[int, ...], starts: Sequence[tuple[str, Matrix]]) -> Outcome | None:
        """The best pair from these starts on the devices ``active``, without baselines; None if none found fits."""
        costs = CostModel(self.theory, self.cluster.part(active))
        pairs, iterations = self._rounds(costs, active, starts)
        best = self._best(pairs)
        if best is not None:
            best = self._best([best, *self._overlapping(costs, active, best, pairs, iterations)]) or best
            best = self._settled(costs, best, best)
        return None if best is None else Outcome(self._certified(best), {}, tuple(iterations))

    def at(self, ratios: Matrix, lengths: Lengths, active: tuple[int, ...]) -> Pair:
        """The best pair at given lengths, whether it fits or not."""
        costs = CostModel(self.theory, self.cluster.part(active))
        found = self._search(costs, lengths, None)
        return Judge(self, costs, found, active, lengths)(ratios, lengths)

    def fitting(self, pair: Pair) -> Pair | None:
        """The pair, or the best at its lengths that fits; None if none found does."""
        if pair.fits:
            return pair
        costs = CostModel(self.theory, self.cluster.part(pair.active))
        found = self._fitting(costs, pair.lengths, pair.found, None, pair.active)
        if found is None:
            return None
        fitting = Judge(self, costs, found, pair.active, pair.lengths)(pair.ratios, pair.lengths)
        return fitting if fitting.fits else None

    def _settled(self, costs: CostModel, pair: Pair, best: Pair) -> Pair:
        """The pair with its parameters' storage settled, where it could then be as good as ``best``."""
        if pair.stages.floor >= best.seconds or pair.seconds > best.seconds * (1 + NEAR):
            return pair
        return stored_one_by_one(self, costs, pair) or pair

    def _best(self, pairs: Sequence[Pair]) -> Pair | None:
        """The fastest of the pairs that fit; among equals one that was searched as it is, and the first."""
        best: Pair | None = None
        with self.clock("balance"):
            for pair in pairs:
                if best is not None and pair.stages.floor > best.seconds:
                    continue
                if pair.fits and (best is None or _order(pair) < _order(best)):
                    best = pair
        return best

    def _certified(self, pair: Pair) -> Pair:
        """The pair with cost and bound of its own lengths, where its program was found at others."""
        if pair.searched:
            return pair
        costs = CostModel(self.theory, self.cluster.part(pair.active))
        whole = self._search(costs, pair.lengths, pair.found)
        cost = self.searcher.cost(pair.found, costs, pair.lengths)
        judge = Judge(self, costs, bounded(pair.found, cost, whole), pair.active, pair.lengths)
        return Pair(judge, pair.ratios, pair.lengths)

    def _team(self, part: CostModel, ranks: tuple[int, ...]) -> tuple[list[Pair], list[Iteration]]:
        """Pairs of a proper subset of the devices."""
        if len(ranks) > 1:
            pairs, rounds = self._rounds(part, ranks, (("proportional", proportional(part)),))
            best = self._best(pairs)
            more = [] if best is None else self._overlapping(part, ranks, best, pairs, rounds)
            return pairs + more, rounds
        alone = self.searcher.space.within(known.single_device(self.theory, self.fixed.forms))
        return self._rounds(part, ranks, (("alone", (1.0,)),), alone)

    def _search(
        self,
        costs: CostModel,
        lengths: Lengths,
        start: Found | None,
        within: Space | None = None,
        overlap: float = 1.0,
    ) -> Found:
        with self.clock("synth"):
            return self.searcher.search(
                costs, lengths, self.limits, within=within, start=start, overlap=overlap
            )

    def _rounds(
        self,
        costs: CostModel,
        active: tuple[int, ...],
        starts: Sequence[tuple[str, Ratios | Matrix]],
        within: Space | None = None,
    ) -> tuple[list[Pair], list[Iteration]]:
        """Search and ratios in turns from each start, on the devices of ``costs``."""
        pairs: list[Pair] = []
        iterations: list[Iteration] = []
        segments = self.theory.axes.segments
        queue = [(name, by_segment(start, segments)) for name, start in starts]
        first = queue[0][1]
        while queue:
            name, ratios = queue.pop(0)
            before: Found | None = None
            seen: set[tuple[object, ...]] = set()
            for index in range(MAX_ITERATIONS):
                lengths = lengths_for(self.theory.axes, ratios)
                found = self._search(costs, lengths, before, within)
                judged = Judge(self, costs, found, active, lengths)
                tried = [judged(ratios, lengths)]
                if not tried[0].fits:
                    by = by_segment(by_memory(costs), segments)
                    if not queue and name != "memory" and np.abs(np.subtract(by, first)).max() > 1e-3:
                        queue.append(("memory", by))
                    fitting = self._fitting(costs, lengths, found, within, active)
                    if fitting is None:
                        break
                    found = fitting
                    judged = Judge(self, costs, found, active, lengths)
                    tried = [judged(ratios, lengths)]
                better, moved = self._balanced(costs, judged, ratios, lengths)
                tried.append(judged(better, moved))
                pairs += tried
                iterations.append(
                    Iteration(name, index, ratios, found.cost, min(pair.stages.seconds for pair in tried))
                )
                key = (found.rows, found.moves, moved)
                if key in seen or moved == lengths:
                    break
                if found.stop_reason == "memory" and index and not _much_better(pairs[-3:]):
                    break
                seen.add(key)
                ratios, before = better, found
        return pairs, iterations

    def _fitting(
        self, costs: CostModel, lengths: Lengths, found: Found, within: Space | None, active: tuple[int, ...]
    ) -> Found | None:
        """The best program that fits at these lengths; None, and the error kept, if there seems to be none.

        The search knows what collectives hold while they are started. What a program holds more while they are on
        their way is known once it is there, and left free in the next search.
        """
        reserve: Array = np.zeros(costs.world)
        try:
            for _ in range(MARGINS):
                with self.clock("synth"):
                    fitting = search_that_fits(
                        self.searcher, costs, lengths, self.limits, found, within=within, reserve=reserve
                    )
                step = Judge(self, costs, fitting, active, lengths).step
                held = np.array(step.held(lengths).peaks, dtype=float)
                if (held <= capacities(costs)).all():
                    return fitting
                more = held - np.array(step.holdings.at(lengths).peaks, dtype=float)
                if (more <= reserve).all():
                    return fitting
                reserve = np.maximum(reserve, more)
            return fitting
        except MemoryLimitError as error:
            lacking = {active[j]: amounts for j, amounts in error.lacking.items()}
            missing = sum(amount for amount, _ in lacking.values())
            if self.nearest is None or missing < sum(amount for amount, _ in self.nearest.lacking.values()):
                self.nearest = MemoryLimitError(lacking, [d.name for d in self.cluster.devices])
            return None

    def _balanced(
        self, costs: CostModel, judged: Judge, ratios: Matrix, lengths: Lengths
    ) -> tuple[Matrix, Lengths]:
        """The best ratios for a program that keep within the memory, and their lengths."""
        if costs.world == 1:
            return ratios, lengths
        capacity = capacities(costs)
        most: Array | None = None
        room: Room | None = None
        if np.isfinite(capacity).any():
            profile = judged.step.held(lengths)
            if len(ratios) == 1:
                most = profile.largest_shares(capacity)
            else:
                room = Room.of(profile, capacity)
        # Whole units may be more than the share that fits: then the device gets a smaller bound.
        for _ in range(MARGINS):
            with self.clock("balance"):
                better = optimise(
                    self.theory,
                    costs,
                    judged.program,
                    ratios,
                    most=most,
                    room=room,
                    stages=judged.step.stages,
                )
                moved = lengths_for(self.theory.axes, better)
            if most is None and room is None:
                return better, moved
            held = judged(better, moved).cost.memory_bytes
            needed = np.array([held[rank] for rank in judged.active], dtype=float)
            over = needed > capacity
            if not over.any():
                return better, moved
            if most is not None:
                most = np.where(over, np.minimum(most, better[0]) * 0.97, most)
            if room is not None:
                room = replace(room, capacity=np.where(over, room.capacity * 0.97, room.capacity))
        return ratios, lengths

    def _overlapping(
        self,
        costs: CostModel,
        active: tuple[int, ...],
        best: Pair,
        pairs: Sequence[Pair],
        rounds: Sequence[Iteration],
    ) -> list[Pair]:
        """Pairs with programs that are best if part of the communication is hidden: at the lengths of ``best``, and
        of those of ``pairs``, two of each of the ``rounds``, that are nearly as good."""
        found: list[Pair] = []
        if costs.world == 1:
            return found
        for place in (best, *self._near(best, pairs, rounds)):
            tried = [place.found.rows]
            for weight in OVERLAPS:
                other = self._search(costs, place.lengths, place.found, overlap=weight)
                if other.rows in tried:
                    continue
                tried.append(other.rows)
                searched_at = None
                if place.searched:
                    # Its own bound is of the weighted costs; the bound of all programs is the unweighted search's.
                    other = bounded(other, other.cost, place.found)
                    searched_at = place.lengths
                judged = Judge(self, costs, other, active, searched_at)
                found.append(judged(place.ratios, place.lengths))
                found.append(judged(*self._balanced(costs, judged, place.ratios, place.lengths)))
        best = self._best([best, *found]) or best
        return found + gathered_ahead(self, costs, best, [*pairs, *found])

    def _near(self, best: Pair, pairs: Sequence[Pair], rounds: Sequence[Iteration]) -> list[Pair]:
        """The best pair of each start, where it takes at most NEAR longer than ``best`` and has other lengths."""
        most = best.seconds * (1 + NEAR)
        starts: dict[str, Pair] = {}
        with self.clock("balance"):
            for i, pair in enumerate(pairs):
                if pair.stages.floor > most or not pair.fits or pair.seconds > most:
                    continue
                start = rounds[i // 2].start
                if start not in starts or _order(pair) < _order(starts[start]):
                    starts[start] = pair
        found: list[Pair] = []
        for pair in starts.values():
            if all(pair.lengths != other.lengths for other in (best, *found)):
                found.append(pair)
        return found

    def _baselines(self, costs: CostModel) -> dict[str, Pair]:
        """Known kinds of programs in the same cost model, as far as the user's constraints allow them.

        Data parallelism with even and proportional shares, the latter with sharded parameters (ZeRO-3), and the
        best program that does not divide the batch (tensor parallelism).
        """
        found: dict[str, Pair] = {}
        everyone = tuple(range(self.cluster.world))
        quick = replace(self.limits, expansions=min(self.limits.expansions, 10_000))
        before: Found | None = None
        for name, wanted, ratios in (
            ("data_parallel_even", known.data_parallel(self.theory), even(costs)),
            ("data_parallel_proportional", known.data_parallel(self.theory), proportional(costs)),
            ("zero_like", known.zero_like(self.theory), proportional(costs)),
            ("tensor_parallel", known.tensor_parallel(self.theory), proportional(costs)),
        ):
            if any(wanted.forms.get(t, form) != form for t, form in self.fixed.forms.items()):
                continue
            same = found.get("data_parallel_even")
            equal = by_segment(ratios, self.theory.axes.segments)
            if name == "data_parallel_proportional" and same is not None and same.ratios == equal:
                found[name] = same
                continue
            constraints = Constraints({**self.fixed.forms, **wanted.forms}, wanted.row_filter)
            lengths = lengths_for(self.theory.axes, ratios)
            try:
                with self.clock("synth"):
                    within = self.searcher.space.within(constraints)
                    result = self.searcher.search(costs, lengths, quick, within=within, start=before)
            except (InfeasibleError, SearchError):
                continue
            before = result
            # Its bound is of programs of its kind.
            found[name] = Judge(self, costs, result, everyone, None)(equal, lengths)
        return found


def _much_better(pairs: Sequence[Pair]) -> bool:
    """Whether the last of three pairs is worth another search at prices of memory, which is dear."""
    return pairs[-1].stages.seconds < pairs[0].stages.seconds * (1 - WORTH)


def _order(pair: Pair) -> tuple[float, bool]:
    return pair.seconds, not pair.searched
