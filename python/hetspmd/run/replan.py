"""Another graph than those that there are plans for: rank 0 traces it, and either knows its program or
compiles.

What Python does beside the graph may be another and the graph the same (a cache is filled, a flag is set
that nothing asks for again). Then the plan that there is serves the new state, too. A number that changed
may become an input of the graph, so that the next value of it needs no compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hetspmd.dist.agreement import agreed_content
from hetspmd.errors import HetspmdError
from hetspmd.run.host_guard import Guard
from hetspmd.trace.graph import Graph, Output
from hetspmd.trace.host.equal import differ_in_numbers, digest, number_values
from hetspmd.trace.host.places import NOTHING, Roots, text
from hetspmd.trace.host.recorder import Place
from hetspmd.trace.host.templates import from_text

if TYPE_CHECKING:
    from hetspmd.dist.communicator import Communicator
    from hetspmd.plan.plan import Plan

Tracer = Callable[[Sequence[Place]], tuple[Graph, list[Any]]]
"""Traces the step with these numbers as inputs; gives the graph, and states of generators after Python's
draws."""


@dataclass(frozen=True)
class Replanned:
    """What rank 0 found: the position of the plan that it knows (None: a new plan), the graph, and the
    states in which the host's generators are after the draws of the step."""

    position: int | None
    graph: Graph
    states: list[Any]


@dataclass
class Replanner:
    """Finds graphs again, on rank 0. ``stubborn`` are numbers that cannot be inputs."""

    roots: Roots
    digests: dict[int, str] = field(default_factory=dict)
    stubborn: set[Place] = field(default_factory=set)

    def agree(
        self, communicator: Communicator, trace: Tracer, plans: Sequence[Plan], guards: Sequence[Guard]
    ) -> Replanned:
        """What every rank does next. Raises on every rank what the trace raises on rank 0."""
        decision: Replanned = agreed_content(communicator, lambda: self._find(trace, plans, guards))
        return decision

    def _find(self, trace: Tracer, plans: Sequence[Plan], guards: Sequence[Guard]) -> Replanned:
        graph, states = trace(())
        wanted: dict[tuple[int, ...], tuple[Graph, str]] = {}
        for position, plan in enumerate(plans):
            left = _left_out(plan.graph, graph)
            if left not in wanted:
                own = _without(graph, left)
                wanted[left] = own, digest(own)
            own, its = wanted[left]
            if self._digest(plan) == its:
                return Replanned(position, own, states)
        for places in self._numbers(guards):
            other = self._with_numbers(trace, graph, places)
            if other is not None:
                return Replanned(None, other, states)
        return Replanned(None, graph, states)

    def _digest(self, plan: Plan) -> str:
        if id(plan) not in self.digests:
            self.digests[id(plan)] = digest(plan.graph)
        return self.digests[id(plan)]

    def _numbers(self, guards: Sequence[Guard]) -> list[tuple[Place, ...]]:
        """Numbers that are all that differs between a guard and now, with those that its graph has as
        inputs."""
        candidates: list[tuple[Place, ...]] = []
        for guard in guards:
            differences = guard.differences()
            places = tuple((read.root, read.path) for read, _ in differences)
            numbers = all(_is_number(value) and _was_number(read.value) for read, value in differences)
            places += tuple((n.root, n.path) for n in guard.host.numbers)
            if places and numbers and not self.stubborn & set(places) and places not in candidates:
                candidates.append(places)
        return sorted(candidates, key=len)[:1]

    def _with_numbers(self, trace: Tracer, plain: Graph, places: tuple[Place, ...]) -> Graph | None:
        try:
            other, _ = trace(places)
        except HetspmdError:
            self.stubborn.update(places)
            return None
        values: Mapping[int, Any] = {n.tensor: self.roots.value(n.root, n.path) for n in other.host.numbers}
        if _same_writes(plain, other, values) and differ_in_numbers(plain, other, values):
            return other
        self.stubborn.update(places)
        return None


def _left_out(planned: Graph, graph: Graph) -> tuple[int, ...]:
    """The places of outputs that a plan leaves out of the same step: rows in micro-batches, all but the loss where
    that alone is asked for."""
    pairs = zip(planned.outputs, graph.outputs, strict=False)
    return tuple(n for n, (a, b) in enumerate(pairs) if a.tensor is None and b.tensor is not None)


def _without(graph: Graph, left: Sequence[int]) -> Graph:
    if not left:
        return graph
    return graph.with_outputs(tuple(Output(None) if n in left else o for n, o in enumerate(graph.outputs)))


def _same_writes(plain: Graph, other: Graph, numbers: Mapping[int, Any]) -> bool:
    """Whether two graphs leave the same behind, the other one the values of tensors where the first leaves
    numbers."""
    if len(plain.host.writes) != len(other.host.writes) or plain.host.counters != other.host.counters:
        return False
    own = len(other.outputs) - len(other.host.kept)
    values = number_values(other, numbers)

    def value(number: int) -> Any:
        return torch.tensor(values[other.outputs[own + number].tensor], dtype=torch.float64)  # type: ignore[index]  # kept

    for a, b in zip(plain.host.writes, other.host.writes, strict=True):
        if (a.root, a.path, a.removed) != (b.root, b.path, b.removed):
            return False
        try:
            if a.value != b.value and from_text(a.value, value) != from_text(b.value, value):
                return False
        except KeyError:
            return False
    return True


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and value is not NOTHING


def _was_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def differ(guard: Guard) -> list[tuple[str, str]]:
    """Names and values of what is not as a plan has it, at most three."""
    return [(text(r.root, r.path), repr(v)[:60]) for r, v in guard.differences()[:3]]
