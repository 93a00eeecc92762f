"""The search for the best program at given lengths: A* in the Rust core (HAP 4.3)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetspmd import _core
from hetspmd.cost.model import CostModel
from hetspmd.errors import InfeasibleError, SearchError
from hetspmd.placement import Placement
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Communicate, Program
from hetspmd.rules.theory import Theory
from hetspmd.search.folding import alike_instructions
from hetspmd.search.order import assemble_program
from hetspmd.search.pricing import Priced, Prices, Pricing
from hetspmd.search.space import Move, Space

HARD: Final = 350
"""Sweeps after which a search among all programs is a hard one: its bound is loose, as ResNet-50's is."""


@dataclass(frozen=True)
class Limits:
    """Where a search stops early: seconds, expansions of partial programs, bytes; and the seconds by which its
    program may cost more than the best one, of what is minimised. ``brief``: where alike layers can be folded, a
    hard search ends, with the best program so far and "sweep_limit".

    The limit on expansions, not the one on seconds, is what ends a hard search by default, so that the plan does
    not depend on the machine.
    """

    seconds: float = 600.0
    expansions: int = 100_000
    memory: int = 4 * 2**30
    tolerance: float = 0.0
    brief: bool = False


@dataclass(frozen=True)
class SearchResult:
    """A program and what the search proved of it. Costs are additive, in seconds; ``gap`` is relative.

    ``rows`` and ``moves`` are the chosen values; ``seconds`` is wall time. ``cost`` is that of the program alone;
    ``lower_bound`` and ``gap`` are of what was minimised, with prices of memory and weights if there were any.
    """

    program: Program
    rows: tuple[int, ...]
    moves: tuple[Move | None, ...]
    cost: float
    lower_bound: float
    gap: float
    stop_reason: str
    expansions: int
    seconds: float
    values: int


class Searcher:
    """The core with one space, to be searched at several costs and under constraints.

    What does not depend on costs is done once, and each search starts from the messages of the last one.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self._mask: tuple[tuple[tuple[int, ...], ...], npt.NDArray[np.uint8]] | None = None
        self._folded: dict[bool, bool] = {}
        self.hard = False
        """Whether a search among all programs took long, so that those that prove nothing fold what they can."""

    @cached_property
    def pricing(self) -> Pricing:
        """The space's costs."""
        return Pricing(self.space)

    @cached_property
    def core(self) -> _core.Searcher:
        """The prepared problem."""
        return _core.Searcher(self.space.structure())

    @property
    def folds(self) -> bool:
        """Whether the space has alike layers that are worth folding: many, or some where searches are hard."""
        return self._folds(few=False) or (self.hard and self._may_fold)

    @property
    def _may_fold(self) -> bool:
        """Whether the space has alike layers, few as they may be."""
        return self._folds(few=False) or self._folds(few=True)

    def _folds(self, *, few: bool) -> bool:
        """Whether the core knows alike layers, of which there may be ``few``."""
        if few not in self._folded:
            alike = alike_instructions(self.space, few=few)
            self._folded[few] = alike is not None
            if alike is not None:
                self.core.fold(alike.astype("<i8").tobytes())
        return self._folded[few]

    def problem(self, model: CostModel, lengths: Lengths, *, within: Space | None = None) -> str:
        """The self-contained problem text at ``lengths``."""
        searcher = self if within is None else Searcher(within)
        searcher._set(searcher.pricing.at(model, lengths))
        return searcher.core.problem()

    def search(
        self,
        model: CostModel,
        lengths: Lengths,
        limits: Limits,
        *,
        within: Space | None = None,
        start: SearchResult | None = None,
        prices: Prices | None = None,
        overlap: float = 1.0,
        folded: bool = False,
    ) -> SearchResult:
        """The best program of the space, or of ``within`` it, at ``lengths``.

        ``within`` has a part of the space's rows. ``start`` is an earlier find, whose program is an upper bound.
        ``prices`` of memory are added; ``overlap`` weighs communication that other work can hide. ``folded``:
        only programs in which alike layers are alike (:attr:`folds`), and the bound is of these. Raises
        InfeasibleError if no program satisfies the constraints, SearchError if a limit struck before the first
        program was found.
        """
        if within is not None and not self.covers(within):
            if prices is not None:
                raise ValueError("prices are of this searcher's rows, and within has others")
            return Searcher(within).search(
                model, lengths, limits, start=start, prices=prices, overlap=overlap
            )
        priced = self.pricing.at(model, lengths, prices, overlap)
        self._set(priced)
        narrow = within is not None and within.rows != self.space.rows
        allowed = self._allowed(within) if narrow and within is not None else None
        incumbent = None if start is None else self._incumbent(start, allowed)
        text = self.core.solve(
            time_limit=limits.seconds,
            max_expansions=limits.expansions,
            memory_limit=limits.memory,
            max_sweeps=HARD if limits.brief and self._may_fold else None,
            incumbent=incumbent,
            allowed=None if allowed is None else allowed.tobytes(),
            folded=folded,
            tolerance=int(limits.tolerance * priced.per_second),
        )
        solution = json.loads(text)
        if solution["stop_reason"] == "infeasible":
            raise InfeasibleError(
                f"no program satisfies the constraints: {solution.get('conflict', 'unknown conflict')}"
            )
        if solution["cost"] is None and solution["stop_reason"] == "sweep_limit":
            to_the_end = replace(limits, brief=False)
            return self.search(model, lengths, to_the_end, within=within, prices=prices, overlap=overlap)
        if solution["cost"] is None:
            raise SearchError(
                f"the search stopped ({solution['stop_reason']}) before it found a program; raise the limit"
            )
        self.hard = self.hard or (solution["sweeps"] >= HARD and not (folded or narrow))
        return self._result(solution, priced)

    def cost(self, result: SearchResult, model: CostModel, lengths: Lengths) -> float:
        """The additive cost in seconds of a program of the space at other lengths than it was found at."""
        priced = self.pricing.at(model, lengths)
        total = 0
        for i, row in enumerate(result.rows):
            copies = 2 if i in self.space.theory.graph.second_reads else 1
            total += int(
                priced.seconds[0][self.pricing.row_start[i] + copies * self.space.rows[i].index(row)]
            )
        for n, t in enumerate(self.pricing.tensors):
            move = result.moves[t]
            if move is not None:
                pairs = [pair[:2] for pair in self.space.pairs[t]]
                total += int(priced.seconds[1][self.pricing.move_start[n] + pairs.index(move[:2])])
        return total / priced.per_second

    def dearest(self, model: CostModel, lengths: Lengths) -> float:
        """Seconds that no program of the space costs more than."""
        priced = self.pricing.at(model, lengths)
        starts = (self.pricing.row_start, self.pricing.move_start)
        return (
            sum(
                int(np.maximum.reduceat(costs, start[:-1][np.diff(start) > 0]).sum())
                for costs, start in zip(priced.seconds, starts, strict=True)
                if len(costs)
            )
            / priced.per_second
        )

    def covers(self, within: Space) -> bool:
        """Whether every program of ``within`` is one of this space, but for forbidden rows."""
        return (
            within.theory is self.space.theory
            and within.requirements == self.space.requirements
            and all(
                few is own or set(few) <= set(own)
                for few, own in zip(within.rows, self.space.rows, strict=True)
            )
        )

    def _set(self, priced: Priced) -> None:
        self.core.set_costs(*(a.astype("<i8").tobytes() for a in (priced.rows, priced.moves, priced.keep)))

    def _allowed(self, within: Space) -> npt.NDArray[np.uint8]:
        """Per row of the core, whether ``within`` has it. Of the part that was asked for before, only the rows of
        the instructions that differ are looked at."""
        again, starts = self.space.theory.graph.second_reads, self.pricing.row_start
        before, mask = self._mask or (self.space.rows, np.ones(len(self.pricing.row), dtype=np.uint8))
        for i, (few, was) in enumerate(zip(within.rows, before, strict=True)):
            if few is was:
                continue
            every = self.space.rows[i]
            mask[starts[i] : starts[i + 1]] = 1
            if len(few) != len(every):
                allowed, copies = set(few), 2 if i in again else 1
                for n, k in enumerate(every):
                    if k not in allowed:
                        mask[starts[i] + n * copies : starts[i] + (n + 1) * copies] = 0
        self._mask = within.rows, mask
        return mask.copy()

    def _result(self, solution: dict[str, Any], priced: Priced) -> SearchResult:
        space, pricing = self.space, self.pricing
        chosen: list[int] = solution["rows"]
        again = space.theory.graph.second_reads
        rows = tuple(space.rows[i][k // 2 if i in again else k] for i, k in enumerate(chosen))
        picked: list[int] = solution["moves"]
        moves: list[Move | None] = [None] * len(space.moves)
        total = int(priced.seconds[0][pricing.row_start[:-1] + np.array(chosen, dtype=np.int64)].sum())
        seconds: dict[int, int] = {}
        for n, (t, k) in enumerate(zip(pricing.tensors, picked, strict=True)):
            if k >= 0:
                place = pricing.move_start[n] + k
                moves[t] = pricing.flat[priced.best[place]]
                seconds[t] = int(priced.seconds[1][place])
        program = assemble_program(space, rows, moves)
        # A form that only prices of memory made cheap, and that nobody reads, is no part of the program.
        communicated = {s.tensor for s in program.steps if isinstance(s, Communicate)}
        moves = [move if t in communicated else None for t, move in enumerate(moves)]
        total += sum(seconds[t] for t in communicated)
        unit = priced.per_second
        return SearchResult(
            program,
            rows,
            tuple(moves),
            total / unit,
            solution["lower_bound"] / unit,
            solution["gap"],
            solution["stop_reason"],
            solution["expansions"],
            solution["seconds"],
            solution["values"],
        )

    def _incumbent(self, start: SearchResult, allowed: npt.NDArray[np.uint8] | None) -> str | None:
        """The core's text of an earlier find; None if the space lacks one of its values."""
        space = self.space
        again = space.theory.graph.second_reads
        forms = stored_forms(space.theory, start.rows)
        rows: list[int] = []
        for i, row in enumerate(start.rows):
            if row not in space.rows[i]:
                return None
            place = space.rows[i].index(row)
            if i in again:
                # The first of the two rows where what is stored will do.
                pre = space.theory.rows[i][row].pre[0]
                place = 2 * place + (0 if forms[again[i]] in (pre, 0) else 1)
            if allowed is not None and not allowed[self.pricing.row_start[i] + place]:
                return None
            rows.append(place)
        moves: list[int] = []
        for t in self.pricing.tensors:
            move = start.moves[t]
            pairs = [pair[:2] for pair in space.pairs[t]]
            if move is None:
                moves.append(-1)
            elif move[:2] in pairs:
                moves.append(pairs.index(move[:2]))
            else:
                return None
        return json.dumps({"rows": rows, "moves": moves})


def stored_forms(theory: Theory, rows: Sequence[int]) -> dict[int, Placement]:
    """The form in which each parameter is stored, by tensor, of a program with one row per instruction."""
    return {
        p.tensor: theory.rows[i][rows[i]].post[0]
        for p in theory.graph.parameters
        for i in (theory.graph.producers[p.tensor],)
    }


def search(
    space: Space, model: CostModel, lengths: Lengths, limits: Limits, *, start: SearchResult | None = None
) -> SearchResult:
    """:meth:`Searcher.search` once."""
    return Searcher(space).search(model, lengths, limits, start=start)
