"""Liveness along an order of steps: where each value is made and last read, and whose storage it has.

It is the same for programs of one level and of two: a value is its tensor's id with its form on each level, and
what is read of it, a slice or a mask, may come from what is whole on a level (:mod:`hetspmd.program.levels`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Set
from dataclasses import dataclass

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cost.copied_views import copied_views
from hetspmd.placement import PARTIAL
from hetspmd.program.buckets import Bucket
from hetspmd.program.dataflow import compute_keys
from hetspmd.program.level_layout import LevelKey
from hetspmd.program.levels import (
    Across,
    Both,
    InsideCollective,
    Together,
    Transfer,
    carried,
    made_by,
    provider,
    reads_of,
)
from hetspmd.program.program import Communicate, Compute
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import Graph

Move = Communicate | InsideCollective | Across
"""A collective of one tensor."""


@dataclass(frozen=True, slots=True)
class Transit:
    """A collective, started at step ``start`` (``shared``: in a bucket), whose result is first read at ``wait``."""

    start: int
    step: Move
    shared: bool
    wait: int


@dataclass(frozen=True, slots=True)
class Sum:
    """A collective of step ``at`` that sums the value ``source`` into the value ``result``; ``late``: in the
    backward."""

    step: Move
    source: int
    result: int
    at: int
    late: bool


def aliases(theory: Theory, delivered: Set[int] = frozenset()) -> frozenset[int]:
    """The instructions that make views; ``delivered``: tensors that collectives deliver (kept with the theory)."""
    kept: dict[frozenset[int], frozenset[int]] = vars(theory).setdefault("_aliases", {})
    copied = copied_views(theory, delivered)
    if copied not in kept:
        kept[copied] = frozenset(i for i, rule in theory.rules.items() if rule.alias) - copied
    return kept[copied]


def _keys_of(graph: Graph, step: Both) -> tuple[tuple[LevelKey, ...], tuple[LevelKey, ...]]:
    """What a computation reads, and what it makes."""
    return reads_of(graph, step), tuple(k for k in made_by(graph, step) if k[0] >= 0)


class Liveness:
    """What the steps hold, in the order in which they are told by :meth:`follow`.

    Values are numbered as they are made. Value v holds ``sizes[v]`` (a tensor in its forms) from step ``born[v]``
    to ``last[v]``, in the storage of value ``storage[v]``, which is v itself or what v is a view of; ``side[v]``
    says whether the backward makes it. ``slices``: what the backward reads of whole tensors, of which copies are
    made.
    ``delivered``: the values that come of collectives. ``alone``: on a lone device, where a collective delivers
    what it was given.
    """

    def __init__(self, theory: Theory, slices: Container[LevelKey], *, alone: bool = False) -> None:
        self.theory, self._slices, self._alone = theory, slices, alone
        self.sizes: list[LevelKey] = []
        self.storage: list[int] = []
        self.born: list[int] = []
        self.last: list[int] = []
        self.side: list[bool] = []
        self.sums: list[Sum] = []
        self.transits: list[Transit] = []
        self.delivered: set[int] = set()
        self.optimized: list[LevelKey] = []
        self._values: dict[LevelKey, int] = {}
        self._sliced: dict[LevelKey, int] = {}  # where a slice is first cut from what is whole
        self._started: dict[int, tuple[int, Move, bool]] = {}  # value -> where its collective starts
        self._ready: dict[int, int] = {}  # value -> where its collective is waited for
        self._trained = {p.tensor for p in theory.graph.parameters if p.gradient is not None}
        self._constants = {c.tensor for c in theory.graph.constants}
        self._steps = 0
        self._late = False
        self._told = compute_keys(theory.graph)

    def hold(self, key: LevelKey, steps: int) -> None:
        """A value that is there from the beginning to the end, behind the last of so many ``steps``."""
        self._add(key, 0, steps)
        if key[0] in self._trained:
            self.optimized.append(key)

    def communicate(self, step: Transfer, at: int, *, late: bool, nothing: bool = False) -> None:
        """A collective, or several as one, starts at step ``at``; ``late``: in the backward; ``nothing``: it gives
        what it is given."""
        self._late = late
        shared = isinstance(step, (Bucket, Together))
        moves: tuple[Move, ...] = step.members if isinstance(step, (Bucket, Together)) else (step,)
        for move, (operand, target) in zip(moves, carried(step), strict=True):
            source = self._read(operand, at, late=late)
            if target not in self._values and not nothing:
                result = len(self.sizes)
                self.delivered.add(result)
                self._started[result] = at, move, shared
                if source is not None and not shared and move.source == PARTIAL:
                    self.sums.append(Sum(move, source, result, at, late))
            self._add(target, at, at, source if self._alone or nothing else None)

    def follow(self, order: Iterable[tuple[Compute | Both | Transfer, bool, bool]], steps: int) -> None:
        """All of the ``steps`` in their order, each with whether it is of the backward and, if it is a collective,
        whether it gives what it is given. What a source makes is there from the beginning to the end, and so is
        what is read of a constant."""
        self._steps = steps
        order, told, graph = list(order), self._told, self.theory.graph
        views, strided = self._views(order)
        sources, values, started, slices = graph.sources, self._values, self._started, self._slices
        storage, last, sizes, side, born = self.storage, self.last, self.sizes, self.side, self.born
        read: tuple[LevelKey, ...]
        made: tuple[LevelKey, ...]
        for at, (step, late, nothing) in enumerate(order):
            if isinstance(step, Compute):
                _, read, made = told(step)
            elif isinstance(step, Both):
                read, made = _keys_of(graph, step)
            else:
                self.communicate(step, at, late=late, nothing=nothing)
                continue
            self._late = late
            base, first = None, True
            for key in read:
                value = values.get(key)
                if value is None or value in started or key in slices:
                    value = self._read(key, at, late=late)
                else:
                    owner = storage[value]
                    if last[owner] < at:
                        last[owner] = at
                if first:
                    base, first = value, False
            instruction = step.instruction
            if instruction in sources:
                for key in made:
                    self.hold(key, steps)
                continue
            if instruction not in views or (instruction in strided and base not in self.delivered):
                base = None
            for key in made:
                if key not in values:
                    values[key] = value = len(sizes)
                    sizes.append(key)
                    storage.append(value if base is None else storage[base])
                    side.append(late)
                    born.append(at)
                    last.append(at)

    def _views(
        self, order: Iterable[tuple[Compute | Both | Transfer, bool, bool]]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """The instructions that make views, and those of them that do only of what a collective delivers."""
        moved: Iterator[Transfer] = (
            step
            for step, _, nothing in order
            if not (isinstance(step, (Compute, Both)) or nothing or self._alone)
        )
        views = aliases(self.theory, {target[0] for step in moved for _, target in carried(step)})
        return views, views - aliases(self.theory)

    def leave(self, forward: Iterable[LevelKey], backward: Iterable[LevelKey], steps: int) -> None:
        """What the graphs leave behind is held to the end, and so is what no step waits for."""
        for key in forward:
            self._read(key, steps, late=False)
        for key in backward:
            self._read(key, steps, late=True)
        self.transits += [Transit(*started, steps) for started in self._started.values()]

    def give_memory(self) -> set[int]:
        """The ids of collectives that work in the memory of what they sum, since nothing reads it afterwards. A
        whole sum that is made there is one step younger."""
        tensors, spare = self.theory.graph.tensors, set[int]()
        for each in self.sums if not self._alone else ():
            base = self.storage[each.source]
            whole = PARTIAL in self.sizes[base][1:] and tensors[self.sizes[base][0]].nbytes
            free = self.last[base] == each.at and self.side[base] == each.late
            if free and whole == tensors[each.step.tensor].nbytes and KINDS[each.step.kind].in_place:
                spare.add(id(each.step))
                if KINDS[each.step.kind].target == "replicated":
                    self.born[each.result] = each.at + 1
        return spare

    def _read(self, key: LevelKey, at: int, *, late: bool) -> int | None:
        base = provider(self._values, key) if key[0] not in self._constants else key
        if base is None:
            return None
        if base not in self._values:
            self.hold(base, self._steps)
        value = self._values[base]
        if base != key and late and key in self._slices:
            self._add(key, self._sliced.get(key, self._ready.get(value, self.born[value])), at)
            value = self._values[key]
        if key in self._slices:
            self._sliced.setdefault(key, at)
        owner = self.storage[value]
        self.last[owner] = max(self.last[owner], at)
        if value in self._started:
            self.transits.append(Transit(*self._started.pop(value), at))
            self._ready[value] = at
        return value

    def _add(self, key: LevelKey, at: int, until: int, base: int | None = None) -> None:
        if key in self._values:
            return
        self._values[key] = len(self.sizes)
        self.storage.append(len(self.sizes) if base is None else self.storage[base])
        self.side.append(self._late)
        self.sizes.append(key)
        self.born.append(at)
        self.last.append(until)
