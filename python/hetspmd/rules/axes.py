"""Logical axes: which dimensions must be cut at the same places (design 4).

768 columns that are later viewed as 12 heads x 64 may only be cut at multiples of 64, in every tensor that
carries them, and a gradient like its parameter. Union-find over ``(tensor, dim)`` through the factors of all
instructions gives the axes. An axis has ``units`` = gcd of the sizes of all factors on it; a dim of extent E on
it has a unit of E / units elements, and a device that holds the units ``[u, v)`` holds the elements
``[u, v) * E / units`` of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd

from hetspmd.rules.rule import Cut, OpRule
from hetspmd.trace.graph import Graph

Member = tuple[int, int]
"""(tensor id, dim)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A logical axis: ``units`` indivisible units, shared by the ``members`` (tensor id, dim)."""

    id: int
    units: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Axes:
    """All logical axes of a graph, ``axes[i].id == i``, in order of their first member."""

    axes: tuple[Axis, ...]
    of: Mapping[Member, int]

    def axis(self, tensor: int, dim: int) -> Axis | None:
        """The axis of a dim; None if no factor ever cuts it."""
        found = self.of.get((tensor, dim))
        return None if found is None else self.axes[found]


def factor_members(
    inputs: tuple[int, ...], outputs: tuple[int, ...], rule: OpRule, factor: int
) -> Iterable[Member]:
    """The (tensor, dim) pairs that a factor of an instruction cuts."""
    f = rule.factors[factor]
    for tensors, places in ((inputs, f.inputs), (outputs, f.outputs)):
        for tensor, place in zip(tensors, places, strict=True):
            if isinstance(place, Cut):
                yield tensor, place.dim


def logical_axes(graph: Graph, rules: Mapping[int, OpRule]) -> Axes:
    """Union-find over the factors of ``rules`` (instruction id to rule)."""
    parent: dict[Member, Member] = {}
    units: dict[Member, int] = {}

    def find(m: Member) -> Member:
        root = m
        while parent[root] != root:
            root = parent[root]
        while parent[m] != root:
            parent[m], m = root, parent[m]
        return root

    def join(a: Member, b: Member) -> None:
        low, high = sorted((find(a), find(b)))
        if low != high:
            parent[high] = low
            units[low] = gcd(units[low], units[high])

    def declare(member: Member) -> None:
        if member not in parent:
            parent[member] = member
            units[member] = graph.tensors[member[0]].shape[member[1]]

    for id_, rule in rules.items():
        instruction = graph.instructions[id_]
        for index, factor in enumerate(rule.factors):
            first: Member | None = None
            for member in factor_members(instruction.inputs, instruction.outputs, rule, index):
                declare(member)
                if first is None:
                    first = member
                else:
                    join(first, member)
            if first is not None:
                root = find(first)
                units[root] = gcd(units[root], factor.size)
    for parameter in graph.parameters:
        if parameter.gradient is not None:
            for dim in range(len(graph.tensors[parameter.tensor].shape)):
                if (parameter.tensor, dim) in parent:
                    declare((parameter.gradient, dim))
                    join((parameter.tensor, dim), (parameter.gradient, dim))
    groups: dict[Member, list[Member]] = {}
    for member in sorted(parent):
        groups.setdefault(find(member), []).append(member)
    axes = tuple(Axis(i, units[root], tuple(members)) for i, (root, members) in enumerate(groups.items()))
    return Axes(axes, {m: axis.id for axis in axes for m in axis.members})
