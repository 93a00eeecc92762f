"""Search and ratios in turns, on all devices and on subsets of them (HAP 3.1, design 7).

From each starting ratio B the search gives the best program Q at the lengths of B, the linear program the
best B for Q, and so on until the pair repeats. Pairs are compared by the two-stream simulation. At the
lengths of the best pair more candidates are searched, with less weight on communication that other work can
hide. Data parallel programs are always among the candidates, so a plan is never worse than those in the
same model.

The same is done for subsets of the devices, the fastest one alone among them; the devices of a better
subset's plan are its active ones, the others idle. A subset whose bound :meth:`CostModel.floor` is no
better than the best so far is left out.

Only pairs that fit every device's memory can become a plan. Where the best program at some lengths does not
fit, the best that does is searched at prices of memory (:mod:`hetspmd.synth.memory`), and the ratios are
bounded by what the program holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hetspmd.balance.lengths import Lengths, lengths_for
from hetspmd.balance.ratios import optimise_ratios
from hetspmd.balance.starts import Ratios, by_memory, even, proportional, starting_ratios, teams
from hetspmd.cost.cluster import Cluster
from hetspmd.cost.model import Array, CostModel
from hetspmd.cost.step import StageSeconds, StepCost, StepModel, idle_seconds, on_cluster
from hetspmd.errors import InfeasibleError, MemoryLimitError, SearchError
from hetspmd.forms import IDENTITY, all_gather
from hetspmd.plan import Iteration
from hetspmd.rules.theory import Theory
from hetspmd.synth import constraints as known
from hetspmd.synth.constraints import Constraints
from hetspmd.synth.memory import capacities, search_that_fits
from hetspmd.synth.program import Program, Result
from hetspmd.synth.search import Found, Limits, Progress, Searcher
from hetspmd.synth.space import Space, search_space

__all__ = ["Alternation", "Clock", "Outcome", "Pair"]

MAX_ITERATIONS = 4
"""Alternations of search and ratios from one start; pairs repeat after two or three in practice."""

WORTH = 0.005
"""The part of a step that another search at prices of memory should gain."""

MARGINS = 4
"""Attempts at ratios whose whole units keep within the memory."""

OVERLAPS = (0.5, 0.1)
"""Weights on communication that other work can hide, for further candidates."""


class Pair:
    """A program of some devices with the ratios and lengths it is judged at; what costs time to know is computed
    when it is asked for. ``searched``: the program was searched at these lengths, to which its cost and bound
    belong."""

    def __init__(self, judge: _Judge, ratios: Ratios, lengths: Lengths) -> None:
        self.judge, self.ratios, self.lengths = judge, ratios, lengths
        self.searched = lengths == judge.searched_at

    @property
    def found(self) -> Found:
        """The program and what the search proved of it."""
        return self.judge.found

    @property
    def program(self) -> Program:
        """The program, with outputs as idle devices want them."""
        return self.judge.program

    @property
    def active(self) -> tuple[int, ...]:
        """Ranks of the devices that take part."""
        return self.judge.active

    @cached_property
    def stages(self) -> StageSeconds:
        """Seconds of the stage model."""
        return self.judge.step.computed(self.lengths)

    @cached_property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.judge.step.streams.seconds(self.judge.step.model.shares(self.lengths))

    @cached_property
    def cost(self) -> StepCost:
        """The prediction for the cluster."""
        return on_cluster(self.judge.step.cost(self.lengths), self.judge.cluster, self.active)

    @cached_property
    def fits(self) -> bool:
        """Whether every device has the memory that the program holds at its peak."""
        memory = [self.judge.cluster.devices[rank].memory for rank in self.active]
        if not np.isfinite(memory).any():
            return True
        peaks = self.judge.step.held(self.lengths).peaks
        return all(n <= m for n, m in zip(peaks, memory, strict=True))


@dataclass(frozen=True)
class Outcome:
    """The best pair, seconds of the baselines, the trace of the alternation that led to the pair, and the baselines
    that do not fit the devices' memory."""

    pair: Pair
    baselines: dict[str, float]
    iterations: tuple[Iteration, ...]
    over_memory: tuple[str, ...] = ()


@dataclass
class Clock:
    """Wall seconds per stage."""

    seconds: MutableMapping[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class Alternation:
    """The search for the best pair for one theory, cluster and set of constraints."""

    def __init__(
        self, theory: Theory, cluster: Cluster, fixed: Constraints, limits: Limits, clock: Clock,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self.theory, self.cluster, self.fixed = theory, cluster, fixed
        self.limits, self.clock, self.progress = limits, clock, progress
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
            best = self._best([best, *self._overlapping(costs, everyone, best)])
        seconds = {name: pair.seconds for name, pair in baselines.items()}
        over = [name for name, pair in baselines.items() if not pair.fits]
        seconds["fastest_device_alone"] = float(min(costs.alone()))
        all_devices = None if best is None else best.seconds
        for ranks in teams(costs):
            part = CostModel(self.theory, self.cluster.part(ranks))
            limited = len(ranks) == 1 and np.isfinite(capacities(part)).any()
            if best is not None and part.floor() >= best.seconds and not limited:
                continue
            pairs, rounds = self._team(part, ranks)
            if limited and not any(pair.fits for pair in pairs):
                over.append("fastest_device_alone")
            better = self._best(pairs if best is None else [best, *pairs])
            if better is not None and better is not best:
                best, iterations = better, rounds
        if best is None:
            assert self.nearest is not None
            raise self.nearest
        best = self._certified(best)
        if len(best.active) < self.cluster.world and all_devices is not None:
            seconds["all_devices"] = all_devices
        return Outcome(best, seconds, tuple(iterations), tuple(over))

    def at(self, ratios: Ratios, lengths: Lengths, active: tuple[int, ...]) -> Pair:
        """The best pair at given lengths, whether it fits or not."""
        costs = CostModel(self.theory, self.cluster.part(active))
        found = self._search(costs, lengths, None)
        return _Judge(self, costs, found, active, lengths)(ratios, lengths)

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
        judge = _Judge(self, costs, _bounded(pair.found, cost, whole), pair.active, pair.lengths)
        return Pair(judge, pair.ratios, pair.lengths)

    def _team(self, part: CostModel, ranks: tuple[int, ...]) -> tuple[list[Pair], list[Iteration]]:
        """Pairs of a proper subset of the devices."""
        if len(ranks) > 1:
            pairs, rounds = self._rounds(part, ranks, (("proportional", proportional(part)),))
            best = self._best(pairs)
            return pairs + ([] if best is None else self._overlapping(part, ranks, best)), rounds
        alone = self.searcher.space.within(known.single_device(self.theory, self.fixed.forms))
        return self._rounds(part, ranks, (("alone", (1.0,)),), alone)

    def _search(
        self, costs: CostModel, lengths: Lengths, start: Found | None, within: Space | None = None,
        overlap: float = 1.0,
    ) -> Found:  # fmt: skip
        with self.clock("synth"):
            return self.searcher.search(
                costs,
                lengths,
                self.limits,
                within=within,
                start=start,
                overlap=overlap,
                progress=self.progress,
            )

    def _rounds(
        self, costs: CostModel, active: tuple[int, ...], starts: Sequence[tuple[str, Ratios]],
        within: Space | None = None,
    ) -> tuple[list[Pair], list[Iteration]]:  # fmt: skip
        """Search and ratios in turns from each start, on the devices of ``costs``."""
        pairs: list[Pair] = []
        iterations: list[Iteration] = []
        queue = list(starts)
        while queue:
            name, ratios = queue.pop(0)
            before: Found | None = None
            seen: set[tuple[object, ...]] = set()
            for index in range(MAX_ITERATIONS):
                lengths = lengths_for(self.theory.axes, ratios)
                found = self._search(costs, lengths, before, within)
                judged = _Judge(self, costs, found, active, lengths)
                tried = [judged(ratios, lengths)]
                if not tried[0].fits:
                    by = by_memory(costs)
                    if not queue and name != "memory" and max(map(abs, np.subtract(by, starts[0][1]))) > 1e-3:
                        queue.append(("memory", by))
                    fitting = self._fitting(costs, lengths, found, within, active)
                    if fitting is None:
                        break
                    found = fitting
                    judged = _Judge(self, costs, found, active, lengths)
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
                        self.searcher, costs, lengths, self.limits, found, within=within, progress=self.progress,
                        reserve=reserve,
                    )  # fmt: skip
                step = _Judge(self, costs, fitting, active, lengths).step
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
        self, costs: CostModel, judged: _Judge, ratios: Ratios, lengths: Lengths
    ) -> tuple[Ratios, Lengths]:
        """The best ratios for a program that keep within the memory, and their lengths."""
        if costs.world == 1:
            return ratios, lengths
        capacity = capacities(costs)
        most = None
        if np.isfinite(capacity).any():
            most = judged.step.held(lengths).largest_shares(capacity)
        # Whole units may be more than the share that fits: then the device gets a smaller bound.
        for _ in range(MARGINS):
            with self.clock("balance"):
                better = optimise_ratios(
                    self.theory, costs, judged.program, most=most, start=ratios, stages=judged.step.stages
                )
                moved = lengths_for(self.theory.axes, better)
            if most is None:
                return better, moved
            needed = judged(better, moved).cost.memory_bytes
            over = np.array([needed[rank] for rank in judged.active]) > capacity
            if not over.any():
                return better, moved
            most = np.where(over, np.minimum(most, better) * 0.97, most)
        return ratios, lengths

    def _overlapping(self, costs: CostModel, active: tuple[int, ...], best: Pair) -> list[Pair]:
        """Pairs with programs that are best at the lengths of ``best`` if part of the communication is hidden."""
        pairs: list[Pair] = []
        if costs.world == 1:
            return pairs
        whole = best.found if best.searched else self._search(costs, best.lengths, best.found)
        tried = [best.found.rows]
        for weight in OVERLAPS:
            found = self._search(costs, best.lengths, best.found, overlap=weight)
            if found.rows in tried:
                continue
            tried.append(found.rows)
            # Its own bound is of the weighted costs; the bound of all programs is the unweighted search's.
            found = _bounded(found, found.cost, whole)
            judged = _Judge(self, costs, found, active, best.lengths)
            pairs.append(judged(best.ratios, best.lengths))
            pairs.append(judged(*self._balanced(costs, judged, best.ratios, best.lengths)))
        return pairs

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
            if name == "data_parallel_proportional" and same is not None and same.ratios == ratios:
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
            found[name] = _Judge(self, costs, result, everyone, lengths)(ratios, lengths)
        return found


def _bounded(found: Found, cost: float, whole: Found) -> Found:
    """A program that the simulation prefers, at its additive cost, with the bound that the search at its lengths
    proved."""
    bound = min(whole.lower_bound, cost)
    gap = (cost - bound) / cost if cost > 0 else 0.0
    return replace(
        found, cost=cost, lower_bound=bound, gap=gap, stop_reason="optimal" if gap == 0 else "rescored"
    )


def _much_better(pairs: Sequence[Pair]) -> bool:
    """Whether the last of three pairs is worth another search at prices of memory, which is dear."""
    return pairs[-1].stages.seconds < pairs[0].stages.seconds * (1 - WORTH)


def _order(pair: Pair) -> tuple[float, bool]:
    return pair.seconds, not pair.searched


class _Judge:
    """One program, to be judged at several ratios."""

    def __init__(
        self, of: Alternation, costs: CostModel, found: Found, active: tuple[int, ...], searched_at: Lengths
    ) -> None:
        self.of, self.found, self.active, self.searched_at = of, found, active, searched_at
        self.cluster = of.cluster
        self.program = self._left(found.program)
        idle = idle_seconds(of.theory.graph, self.program, of.cluster, active)
        with of.clock("balance"):
            self.step = StepModel(costs, self.program, idle=idle)
        self._known: dict[Lengths, Pair] = {}

    def __call__(self, ratios: Ratios, lengths: Lengths) -> Pair:
        found = self._known.get(lengths)
        if found is None or found.ratios != ratios:
            found = self._known[lengths] = Pair(self, ratios, lengths)
        return found

    def _left(self, program: Program) -> Program:
        """What idle devices are sent costs time, so an output with a row per sample that every active device
        holds whole is left as rows instead, which is free: each device slices what it holds."""
        if len(self.active) == self.of.cluster.world:
            return program
        theory = self.of.theory

        def left(result: Result) -> Result:
            shape = theory.graph.tensors[result.tensor].shape
            axis = theory.axes.axis(result.tensor, 0) if shape else None
            free = result.form == IDENTITY and result.tensor not in self.of.fixed.forms
            rows = free and axis is not None and axis.id in self.of.batch and axis.units > 1
            return Result(result.tensor, all_gather(0)) if rows else result

        return replace(program, outputs=tuple(map(left, program.outputs)))
