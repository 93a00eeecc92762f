"""What a synthesis works with: the model's theory, the cluster, constraints, limits, and the searcher of its
space."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.least_memory import LeastMemory
from hetspmd.cost.model import CostModel
from hetspmd.errors import InfeasibleError
from hetspmd.optimize.thresholds import THRESHOLDS, Thresholds
from hetspmd.program.lengths import Lengths
from hetspmd.program.micro_batches import MicroBatches, in_own_turns
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import Constraints
from hetspmd.search.earlier_prices import EarlierPrices
from hetspmd.search.memory_prices import MemoryPrices
from hetspmd.search.search import Limits, Searcher, SearchResult
from hetspmd.search.space import Space, search_space


@dataclass
class Clock:
    """Wall seconds per stage; ``progress`` is told each stage that begins."""

    seconds: MutableMapping[str, float] = field(default_factory=dict)
    progress: Callable[[str], object] | None = None

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(stage)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def is_large(theory: Theory) -> bool:
    """Whether a step has so many instructions that not all of several ways to plan it are tried."""
    return len(theory.graph.instructions) >= THRESHOLDS.many_instructions


class Prepared:
    """What is made once for steps in several numbers of micro-batches, which have the same space of programs: the
    search core, whose searches then start from the messages of all earlier ones, and what holding tensors costs.

    Raises InfeasibleError if no program can satisfy the constraints.
    """

    def __init__(self, theory: Theory, constraints: Constraints) -> None:
        self.theory, self.searcher = theory, Searcher(search_space(theory, constraints))
        self._prices: MemoryPrices | None = None
        self.lacks_outside = False
        """In no number of micro-batches ZeRO-1 fits, whose collectives are outside of the loop."""

    def memory_prices(self, batches: MicroBatches | None) -> MemoryPrices:
        """What holding tensors costs in so many micro-batches."""
        if self._prices is None:
            self._prices = MemoryPrices(self.searcher, batches)
            return self._prices
        return self._prices.dividing(batches)


@dataclass(frozen=True)
class Synthesis:
    """The context of a synthesis. Functions take it first and return candidates; none of them changes it.

    ``constraints`` are the user's, on all candidates. ``limits`` are those of each search. ``batches``: the step
    runs in micro-batches. ``earlier_prices``: where searches for programs that fit the memory begin; each of them
    leaves its own there for the next. ``quick``: where no program that fits is found after a few searches, there is
    another way to plan the step. ``prepared``: what was made of the same theory and constraints for another number
    of micro-batches. ``bound``: what any program must hold, where that is known. Raises InfeasibleError if no
    program can satisfy the constraints.
    """

    theory: Theory
    cluster: Cluster
    constraints: Constraints
    limits: Limits
    clock: Clock = field(default_factory=Clock)
    thresholds: Thresholds = THRESHOLDS
    batches: MicroBatches | None = None
    earlier_prices: EarlierPrices = field(default_factory=EarlierPrices)
    quick: bool = False
    prepared: Prepared | None = None
    bound: LeastMemory | None = None

    def __post_init__(self) -> None:
        _ = self.searcher  # constraints that no program satisfies are told here

    @cached_property
    def searcher(self) -> Searcher:
        """The search core with all programs that satisfy the constraints."""
        return self._prepared.searcher

    @cached_property
    def _prepared(self) -> Prepared:
        with self.clock("synth"):
            return self.prepared or Prepared(self.theory, self.constraints)

    @cached_property
    def memory_prices(self) -> MemoryPrices:
        """What holding tensors costs at prices of bytes."""
        with self.clock("synth"):
            return self._prepared.memory_prices(self.batches)

    @cached_property
    def least(self) -> LeastMemory:
        """What any program must hold."""
        with self.clock("synth"):
            if (
                self.bound is not None and self.bound.theory is self.theory
            ):  # not that of a theory in segments
                return self.bound
            return LeastMemory(self.theory, self.batches, self.constraints.forms)

    @cached_property
    def batch(self) -> frozenset[int]:
        """The logical axes of the batch."""
        return self.theory.batch_axes

    def with_repeated(self, repeated: frozenset[int]) -> Synthesis:
        """The same for a step in micro-batches in whose loop the collectives of these tensors are, with the same
        searcher; itself for a step of one micro-batch, which has no loop."""
        if self.batches is None:
            return self
        _ = self._models  # shared with the other
        other = copy.copy(self)
        object.__setattr__(other, "batches", replace(self.batches, repeated=repeated))
        return other

    def with_own_turns(self, turns: tuple[int, ...]) -> Synthesis:
        """The same where the active devices run the loop in so many turns each; only their costs may be asked."""
        assert self.batches is not None
        other = copy.copy(self)
        vars(other).pop("_models", None)
        object.__setattr__(other, "batches", in_own_turns(self.theory, self.batches, turns))
        return other

    @property
    def brief(self) -> bool:
        """Whether this is a quick synthesis of a step so large that what can hardly be the best is not tried."""
        return self.quick and is_large(self.theory)

    @property
    def everyone(self) -> tuple[int, ...]:
        """The ranks of all devices."""
        return tuple(range(self.cluster.world))

    def costs(self, active: tuple[int, ...]) -> CostModel:
        """The costs of instructions on these devices, and of collectives among them."""
        repeated = frozenset[int]() if self.batches is None else self.batches.repeated
        models = self._models.setdefault(active, {})
        if repeated not in models:
            like = next(iter(models.values()), None)
            if like is None or self.batches is None:
                models[repeated] = CostModel(self.theory, self.cluster.part(active), self.batches)
            else:
                models[repeated] = like.repeating(self.batches)
        return models[repeated]

    @cached_property
    def _models(self) -> dict[tuple[int, ...], dict[frozenset[int], CostModel]]:
        """The costs that have been asked for, by devices and by the tensors whose collectives are in the loop."""
        return {}

    def search(
        self,
        costs: CostModel,
        lengths: Lengths,
        *,
        start: SearchResult | None = None,
        within: Space | None = None,
        overlap: float = 1.0,
        certain: bool = False,
    ) -> SearchResult:
        """The best program at these lengths by additive costs (:meth:`hetspmd.search.search.Searcher.search`).

        A quick synthesis takes alike layers alike (:mod:`hetspmd.search.folding`), and so does one whose searches
        are hard, from the first that turns out to be. They prove no bound, but where the result is to be
        ``certain``. Raises InfeasibleError if there is none, SearchError if a limit struck before the first was
        found.
        """
        searcher = self.searcher

        def found(start: SearchResult | None, *, folded: bool = False, brief: bool = False) -> SearchResult:
            limits = replace(self.limits, brief=brief)
            return searcher.search(
                costs, lengths, limits, within=within, start=start, overlap=overlap, folded=folded
            )

        with self.clock("synth"):
            if certain or within is not None:
                return found(start)
            if not self.quick and not searcher.hard:
                start = found(start, brief=True)
                if start.stop_reason != "sweep_limit":
                    return start
            if searcher.folds:
                with suppress(InfeasibleError):
                    result = found(start, folded=True)
                    return replace(result, lower_bound=0.0, gap=1.0, stop_reason="folded")
            return found(start)
