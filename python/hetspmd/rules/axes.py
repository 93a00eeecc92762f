"""Logical axes: which dimensions must be cut at the same places.

768 columns that are later viewed as 12 heads x 64 may only be cut at multiples of 64, in every tensor that
carries them, and a gradient like its parameter. Union-find over ``(tensor, dim)`` through the factors of all
instructions gives the axes. An axis has ``units`` = gcd of the sizes of all factors on it; a dim of extent E on
it has a unit of E / units elements, and a device that holds the units ``[u, v)`` holds the elements
``[u, v) * E / units`` of it.

Matrix products are slower where rows begin at odd places in memory. So an axis of a parameter has an *alignment*:
the fewest units that make multiples of :data:`ALIGNED` elements of every dim of a parameter on it. Lengths are
multiples of it where that costs little (:func:`hetspmd.program.lengths.aligned`).

A cut between segments (:mod:`hetspmd.trace.cuts`) does not join the axes of a tensor and of its copy: each segment
divides its own at its own ratios. They are one *group*, and have as many units as they would have as one axis, and
one alignment, so that they have equal lengths at equal ratios.

A parameter that is stored apart from its use (:mod:`hetspmd.trace.storage_axes`) has an axis of its own along its
stored dim, with a unit for each element, whatever the graph cuts. It is a group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm
from typing import Final

from hetspmd.placement import Placement, is_before_cut, sharded_dim
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
    ``segment``. ``group``: the first of the axes that cuts tell from each other, itself where there are none.
    ``alignment``: units of which lengths should be multiples."""

    id: int
    units: int
    members: tuple[Member, ...]
    segment: int
    group: int
    alignment: int = 1


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
        number = self.of.get((tensor, dim))
        return None if number is None else self.axes[number]

    def sharded(self, tensor: int, form: Placement) -> Axis | None:
        """The axis along which a sharded form divides a tensor; None if no factor ever cuts that dim."""
        member = tensor, sharded_dim(form)
        number = (self.copied if is_before_cut(form) else self.of).get(member)
        return None if number is None else self.axes[number]


def factor_cuts(factor: Factor) -> list[tuple[int, int]]:
    """What a factor cuts: ``(position among inputs then outputs, dim)``, in that order."""
    places = enumerate((*factor.inputs, *factor.outputs))
    return [(position, place.dim) for position, place in places if isinstance(place, Cut)]


class _Sets:
    """Dimensions, (tensor, dim), in sets of those that are cut alike, by union-find; the least is its set's root.

    A dimension is in no set until something cuts it. ``units[root]`` are the units in which its set can be cut.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.first_of = [0]  # (tensor, dim) is number first_of[tensor] + dim
        for tensor in graph.tensors:
            self.first_of.append(self.first_of[-1] + len(tensor.shape))
        self.parent = [-1] * self.first_of[-1]
        self.units = [extent for tensor in graph.tensors for extent in tensor.shape]

    def number(self, tensor: int, dim: int) -> int:
        return self.first_of[tensor] + dim

    def is_cut(self, m: int) -> bool:
        return self.parent[m] >= 0

    def add(self, m: int) -> int:
        """The number, which is in a set from now on."""
        if self.parent[m] < 0:
            self.parent[m] = m
        return m

    def find(self, m: int) -> int:
        """The root of a number's set."""
        parent, root = self.parent, m
        while parent[root] != root:
            root = parent[root]
        while parent[m] != root:
            parent[m], m = root, parent[m]
        return root

    def join(self, a: int, b: int) -> int:
        """Make two sets one; its root."""
        low, high = self.find(a), self.find(b)
        if low > high:
            low, high = high, low
        if low != high:
            self.parent[high] = low
            self.units[low] = gcd(self.units[low], self.units[high])
        return low

    def members(self) -> dict[int, list[Member]]:
        """The dimensions of each set, by its root, in order."""
        groups: dict[int, list[Member]] = {}
        for tensor in self.graph.tensors:
            for dim in range(len(tensor.shape)):
                m = self.number(tensor.id, dim)
                if self.is_cut(m):
                    groups.setdefault(self.find(m), []).append((tensor.id, dim))
        return groups


def logical_axes(graph: Graph, rules: Mapping[int, OpRule]) -> Axes:
    """The axes that the factors of ``rules`` (instruction id to rule) make of the graph's dimensions."""
    sets = _Sets(graph)
    for t, dim in graph.stored_apart.items():
        sets.add(sets.number(t, dim))
    _join_factors(sets, rules)
    _join_gradients(sets)
    copied = _copies(sets)
    apart = {sets.find(sets.number(t, dim)) for t, dim in graph.stored_apart.items()}
    copy_groups = _copy_groups(
        sets.units, [(a, b) for *_, a, b in copied if a not in apart and b not in apart]
    )
    alignments = _alignments(sets, copy_groups)
    groups = sets.members()
    number = {root: i for i, root in enumerate(groups)}
    axes = tuple(
        Axis(
            i,
            sets.units[root],
            tuple(members),
            graph.segment(members[0][0]),
            number[least],
            alignments.get(least, 1),
        )
        for i, (root, members) in enumerate(groups.items())
        for least in (copy_groups.get(root, root),)
    )
    of = {m: axis.id for axis in axes for m in axis.members}
    before = {(copy, d): number[a] for copy, d, a, _ in copied}
    return Axes(axes, of, before, graph.segment_count)


def _join_factors(sets: _Sets, rules: Mapping[int, OpRule]) -> None:
    """What one factor cuts is cut alike, in units of which the factor's size is a multiple."""
    cuts_of: dict[int, list[tuple[int, list[Member]]]] = {}  # equal instructions share one rule object
    for id_, rule in rules.items():
        cuts = cuts_of.get(id(rule))
        if cuts is None:
            cuts = cuts_of[id(rule)] = [(f.size, factor_cuts(f)) for f in rule.factors if f.nameable]
        instruction = sets.graph.instructions[id_]
        if instruction.op == REBALANCE:
            continue
        starts = [sets.first_of[t] for t in (*instruction.inputs, *instruction.outputs)]
        for size, places in cuts:
            root = -1
            for position, dim in places:
                m = sets.add(starts[position] + dim)
                root = m if root < 0 else sets.join(root, m)
            if root >= 0:
                root = sets.find(root)
                sets.units[root] = gcd(sets.units[root], size)


def _join_gradients(sets: _Sets) -> None:
    """A gradient is cut as its parameter is stored."""
    for parameter in sets.graph.parameters:
        if parameter.gradient is None:
            continue
        for dim in range(len(sets.graph.tensors[parameter.tensor].shape)):
            stored = sets.number(parameter.tensor, dim)
            if sets.is_cut(stored):
                sets.join(stored, sets.add(sets.number(parameter.gradient, dim)))


def _copies(sets: _Sets) -> list[tuple[int, int, int, int]]:
    """(copy, dim, root of the original, root of the copy) of the copies with another segment's lengths."""
    graph = sets.graph
    pairs = [(i.inputs[0], i.outputs[0]) for i in graph.instructions if i.op == REBALANCE]
    return [
        (copy, d, sets.find(a), sets.find(b))
        for t, copy in pairs
        for d in range(len(graph.tensors[t].shape))
        for a, b in ((sets.number(t, d), sets.number(copy, d)),)
        if sets.is_cut(a) and sets.is_cut(b)
    ]


def _alignments(sets: _Sets, copy_groups: Mapping[int, int]) -> dict[int, int]:
    """By root: the units of which shares are multiples, so that shards of parameters are aligned."""
    alignments: dict[int, int] = {}
    for parameter in sets.graph.parameters:
        for dim, extent in enumerate(sets.graph.tensors[parameter.tensor].shape):
            m = sets.number(parameter.tensor, dim)
            if sets.is_cut(m):
                root = sets.find(m)
                whole = ALIGNED // gcd(ALIGNED, extent // max(sets.units[root], 1))
                least = copy_groups.get(root, root)
                alignments[least] = lcm(alignments.get(least, 1), whole)
    return alignments


def _copy_groups(units: list[int], pairs: list[tuple[int, int]]) -> dict[int, int]:
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
    groups = {root: find(root) for root in least}
    for root, low in groups.items():
        units[root] = units[low]
    return groups
