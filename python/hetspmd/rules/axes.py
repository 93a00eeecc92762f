"""Logical axes: which dimensions must be cut at the same places.

768 columns that are later viewed as 12 heads x 64 may only be cut at multiples of 64, in every tensor that
carries them, and a gradient like its parameter. Union-find over ``(tensor, dim)`` through the factors of all
instructions gives the axes. An axis has ``units`` = gcd of the sizes of all factors on it; a dim of extent E on
it has a unit of E / units elements, and a device that holds the units ``[u, v)`` holds the elements
``[u, v) * E / units`` of it.

Matrix products are slower where rows begin at odd places in memory. So an axis of a parameter has a *grain*: the
fewest units that make multiples of :data:`ALIGNED` elements of every dim of a parameter on it. Lengths are
multiples of it where that costs little (:func:`hetspmd.program.lengths.aligned`).

A cut between segments (:mod:`hetspmd.trace.cuts`) does not join the axes of a tensor and of its copy: each segment
divides its own at its own ratios. They are *kin*, and have as many units as they would have as one axis, and one
grain, so that they have equal lengths at equal ratios.

A parameter that is stored apart from its use (:mod:`hetspmd.trace.stored`) has an axis of its own along its stored
dim, with a unit for each element, whatever the graph cuts. Nothing is its kin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm
from typing import Final

from hetspmd.placement import Form, is_before_cut, sharded_dim
from hetspmd.rules.rule import Cut, Factor, OpRule
from hetspmd.trace.graph import REBALANCE, Graph

ALIGNED: Final = 8
"""Elements: 16 bytes of bfloat16 and float16, which tensor cores want, and a vector register of float32 on a CPU,
where the gradient of a weight can take twice as long at odd places (``benches/alignment.py``)."""

Member = tuple[int, int]
"""(tensor id, dim)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A logical axis: ``units`` indivisible units, shared by the ``members`` (tensor id, dim), all of one
    ``segment``. ``kin``: the first of the axes that cuts tell from each other, itself where there are none.
    ``grain``: units of which lengths should be multiples."""

    id: int
    units: int
    members: tuple[Member, ...]
    segment: int
    kin: int
    grain: int = 1


@dataclass(frozen=True)
class Axes:
    """All logical axes of a graph, ``axes[i].id == i``, in order of their first member.

    ``of``: the axis of a dim. ``copied``: of a dim of a copy at a cut, the axis of that dim of the tensor copied.
    """

    axes: tuple[Axis, ...]
    of: Mapping[Member, int]
    copied: Mapping[Member, int]
    segments: int = 1

    def axis(self, tensor: int, dim: int) -> Axis | None:
        """The axis of a dim; None if no factor ever cuts it."""
        found = self.of.get((tensor, dim))
        return None if found is None else self.axes[found]

    def sharded(self, tensor: int, form: Form) -> Axis | None:
        """The axis along which a sharded form divides a tensor; None if no factor ever cuts that dim."""
        member = tensor, sharded_dim(form)
        found = (self.copied if is_before_cut(form) else self.of).get(member)
        return None if found is None else self.axes[found]


def factor_cuts(factor: Factor) -> list[tuple[int, int]]:
    """What a factor cuts: ``(position among inputs then outputs, dim)``, in that order."""
    places = enumerate((*factor.inputs, *factor.outputs))
    return [(position, place.dim) for position, place in places if isinstance(place, Cut)]


def logical_axes(graph: Graph, rules: Mapping[int, OpRule]) -> Axes:
    """Union-find over the factors of ``rules`` (instruction id to rule); the least member is its set's root."""
    first_of = [0]  # (tensor, dim) is member first_of[tensor] + dim
    for tensor in graph.tensors:
        first_of.append(first_of[-1] + len(tensor.shape))
    parent = [-1] * first_of[-1]
    units = [extent for tensor in graph.tensors for extent in tensor.shape]

    def find(m: int) -> int:
        root = m
        while parent[root] != root:
            root = parent[root]
        while parent[m] != root:
            parent[m], m = root, parent[m]
        return root

    def join(a: int, b: int) -> int:
        low, high = find(a), find(b)
        if low > high:
            low, high = high, low
        if low != high:
            parent[high] = low
            units[low] = gcd(units[low], units[high])
        return low

    for t, dim in graph.stored_apart.items():
        parent[first_of[t] + dim] = first_of[t] + dim
    cuts_of: dict[
        int, list[tuple[int, list[tuple[int, int]]]]
    ] = {}  # equal instructions share one rule object
    for id_, rule in rules.items():
        cuts = cuts_of.get(id(rule))
        if cuts is None:
            cuts = cuts_of[id(rule)] = [(f.size, factor_cuts(f)) for f in rule.factors if f.nameable]
        instruction = graph.instructions[id_]
        if instruction.op == REBALANCE:
            continue
        starts = [first_of[t] for t in (*instruction.inputs, *instruction.outputs)]
        for size, places in cuts:
            root = -1
            for position, dim in places:
                member = starts[position] + dim
                if parent[member] < 0:
                    parent[member] = member
                root = member if root < 0 else join(root, member)
            if root >= 0:
                root = find(root)
                units[root] = gcd(units[root], size)
    for parameter in graph.parameters:
        if parameter.gradient is not None:
            for dim in range(len(graph.tensors[parameter.tensor].shape)):
                stored, gradient = first_of[parameter.tensor] + dim, first_of[parameter.gradient] + dim
                if parent[stored] >= 0:
                    if parent[gradient] < 0:
                        parent[gradient] = gradient
                    join(stored, gradient)
    copies = [(i.inputs[0], i.outputs[0]) for i in graph.instructions if i.op == REBALANCE]
    copied = [
        (t, copy, d, find(first_of[t] + d), find(first_of[copy] + d))
        for t, copy in copies
        for d in range(len(graph.tensors[t].shape))
        if parent[first_of[t] + d] >= 0 and parent[first_of[copy] + d] >= 0
    ]
    apart = {find(first_of[t] + dim) for t, dim in graph.stored_apart.items()}
    kin = _kin(units, [(a, b) for *_, a, b in copied if a not in apart and b not in apart])
    grain: dict[int, int] = {}
    for parameter in graph.parameters:
        for dim, extent in enumerate(graph.tensors[parameter.tensor].shape):
            member = first_of[parameter.tensor] + dim
            if parent[member] >= 0:
                root = find(member)
                whole = ALIGNED // gcd(ALIGNED, extent // max(units[root], 1))
                least = kin.get(root, root)
                grain[least] = lcm(grain.get(least, 1), whole)
    groups: dict[int, list[Member]] = {}
    for tensor in graph.tensors:
        for dim in range(len(tensor.shape)):
            member = first_of[tensor.id] + dim
            if parent[member] >= 0:
                groups.setdefault(find(member), []).append((tensor.id, dim))
    number = {root: i for i, root in enumerate(groups)}
    axes = tuple(
        Axis(i, units[root], tuple(members), graph.segment(members[0][0]), number[least], grain.get(least, 1))
        for i, (root, members) in enumerate(groups.items())
        for least in (kin.get(root, root),)
    )
    of = {m: axis.id for axis in axes for m in axis.members}
    before = {(copy, d): number[a] for _, copy, d, a, _ in copied}
    return Axes(axes, of, before, graph.segment_count)


def _kin(units: list[int], pairs: list[tuple[int, int]]) -> dict[int, int]:
    """Roots to the least root that chains of ``pairs`` lead to; all of them get the gcd of their units."""
    least: dict[int, int] = {}

    def find(root: int) -> int:
        while least.setdefault(root, root) != root:
            root = least[root]
        return root

    for a, b in pairs:
        low, high = sorted((find(a), find(b)))
        least[high] = low
        units[low] = gcd(units[low], units[high])
    found = {root: find(root) for root in least}
    for root, low in found.items():
        units[root] = units[low]
    return found
