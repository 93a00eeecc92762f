"""Where the parts of tensors lie on the ranks of a program of one level, or of two: the accelerators of machines.

An accelerator's part of a tensor is a part of its machine's part. Lengths inside are even, in whole units: those of
the machine where the outer form divides the same dim, those of the whole axis elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias, TypeGuard

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.errors import PlanError
from hetspmd.placement import (
    REPLICATE,
    Placement,
    after_cut,
    is_sharded,
    placement_text,
    same_dim,
    sharded_dim,
)
from hetspmd.program.layout import Layout, Region
from hetspmd.program.lengths import Lengths, apportion
from hetspmd.program.levels import Across, Key
from hetspmd.program.noise import divisible
from hetspmd.program.program import Communicate
from hetspmd.rules.nested import Level, localize_drawn, localize_nested, runs_whole
from hetspmd.rules.rule import LocalCall, Triple, localize
from hetspmd.rules.theory import Theory

LevelKey: TypeAlias = tuple[int, ...]
"""Of a value: the tensor's id, and its form on each level."""

Rows: TypeAlias = tuple[Triple, ...]
"""The row of an instruction on each level."""

Part = tuple[int, Sequence[int]] | str | None
"""How a machine's tensor lies on its accelerators: cut along a dim with these extents, "sum", or whole on each."""

Leg: TypeAlias = tuple[Part, Sequence[int], Part, Sequence[int]]
"""How a machine's tensor lies on its accelerators and its shape, before a collective between machines and after."""


@dataclass(frozen=True)
class RankPlace:
    """A rank that runs a program: the ``inside``-th accelerator of the ``machine``-th of the active machines, or,
    in a program of one level, the ``machine``-th of the active devices."""

    machine: int
    inside: int = 0


def rebalances(step: object) -> TypeGuard[Across]:
    """Whether a step is a rebalance between machines that lies inside of them as before."""
    return isinstance(step, Across) and KINDS[step.kind].keeps_dim and step.collected == step.handed_out


class LevelLayout:
    """Where parts lie: ``lengths`` are those of the active devices. In a program of two levels these are machines,
    with so many ``accelerators``."""

    def __init__(self, theory: Theory, lengths: Lengths, accelerators: Sequence[int] | None = None) -> None:
        self.theory, self.graph, self.axes = theory, theory.graph, theory.axes
        self.levels = 1 if accelerators is None else 2
        self.accelerators = (1,) * lengths.world if accelerators is None else tuple(accelerators)
        self.outer = Layout(theory.graph, theory.axes, lengths)
        self._even: dict[tuple[int, int], tuple[int, ...]] = {}

    @cached_property
    def world(self) -> int:
        """Ranks in all."""
        return sum(self.accelerators)

    @cached_property
    def places(self) -> tuple[RankPlace, ...]:
        """All of them, in order."""
        return tuple(RankPlace(v, a) for v, k in enumerate(self.accelerators) for a in range(k))

    def rank(self, at: RankPlace) -> int:
        """The number of a rank among all."""
        return sum(self.accelerators[: at.machine]) + at.inside

    def whole(self, tensor: int, outer: Placement = REPLICATE) -> LevelKey:
        """What a device holds of a tensor, on each of its accelerators."""
        return (tensor, outer) if self.levels == 1 else (tensor, outer, REPLICATE)

    def peers(self, level: int, at: RankPlace) -> tuple[int, int]:
        """The place of a rank among those that a level divides its part among, and their number."""
        if level == 0:
            return at.machine, len(self.accelerators)
        return at.inside, self.accelerators[at.machine]

    def inside(self, axis: int, units: int, machine: int) -> tuple[int, ...]:
        """Units of an axis, all of them or the machine's, divided among the accelerators of a machine: evenly."""
        count = self.accelerators[machine]
        key = (units, count)
        if key not in self._even:
            self._even[key] = apportion(units, (1 / count,) * count)
        return self._even[key]

    def extents(self, key: Key, machine: int) -> tuple[int, ...]:
        """Elements per accelerator of the machine along the dim that the inner form divides."""
        tensor, outer, inner = key
        own = outer if same_dim(outer, inner) else inner  # as many units before a cut and behind it
        axis = self.axes.sharded(tensor, own)
        if axis is None:
            raise PlanError(f"{self.graph.tensors[tensor].name} is never divided as {placement_text(own)}")
        unit = self.graph.tensors[tensor].shape[sharded_dim(inner)] // axis.units
        units = self.outer.lengths.units[axis.id][machine] if own == outer else axis.units
        return tuple(n * unit for n in self.inside(axis.id, units, machine))

    def divided(self, key: LevelKey, level: int, at: RankPlace) -> tuple[int, ...]:
        """Elements along the dim that a level's form divides, of each of those that it divides the part of ``at``
        among."""
        if level == 0:
            extents: tuple[int, ...] = self.outer.extents(key[0], key[1])
            return extents
        return self.extents((key[0], key[1], key[2]), at.machine)

    def region(self, key: LevelKey, level: int, at: RankPlace) -> Region | None:
        """The part that a rank holds, on a level, of what the level above leaves; None for all of it."""
        if level == 0:
            return self.outer.region(key[0], key[1], at.machine)
        if not is_sharded(key[2]):
            return None
        extents = self.extents((key[0], key[1], key[2]), at.machine)
        return Region(sharded_dim(key[2]), sum(extents[: at.inside]), extents[at.inside])

    def regions(self, key: LevelKey, at: RankPlace) -> tuple[Region, ...]:
        """The parts one after the other: the machine's, then the accelerator's of that."""
        regions = (self.region(key, level, at) for level in range(len(key) - 1))
        return tuple(region for region in regions if region is not None)

    def shape(self, key: LevelKey, at: RankPlace) -> tuple[int, ...]:
        """The local shape."""
        shape = list(self.graph.tensors[key[0]].shape)
        for region in self.regions(key, at):
            shape[region.dim] = region.extent
        return tuple(shape)

    def held(self, instruction: int, rows: Rows, at: RankPlace) -> tuple[Level, ...]:
        """The row of each level with the units that a rank holds on it."""
        outer = rows[0]
        lengths = self.outer.lengths

        def of_device(axis: int) -> tuple[int, int]:
            return lengths.range(axis, at.machine)

        first = Level(as_copied(outer), self._units(instruction, outer, of_device))
        if len(rows) == 1:
            return (first,)
        inner = rows[1]

        def inside(axis: int) -> tuple[int, int]:
            low, units = 0, self.axes.axes[axis].units
            if inner == outer:
                low, high = of_device(axis)
                units = high - low
            stops = [low, *(low + n for n in accumulate(self.inside(axis, units, at.machine)))]
            return stops[at.inside], stops[at.inside + 1]

        return first, Level(as_copied(inner), self._units(instruction, inner, inside))

    def _units(self, instruction: int, row: Triple, held: Any) -> tuple[int, int]:
        if row.factor is None:
            return 0, 0
        rows = self.theory.rows[instruction]
        axis = self.theory.row_axes[instruction][rows.index(row)] if row in rows else None
        if axis is None:
            name = self.graph.instructions[instruction].name
            raise PlanError(f"{name} has no row {row}; the plan was made with other rules, compile it again")
        scale = self.theory.rules[instruction].factors[row.factor].size // self.axes.axes[axis].units
        start, stop = held(axis)
        return start * scale, stop * scale

    def call(self, instruction: int, rows: Rows, at: RankPlace) -> LocalCall | None:
        """What a rank calls; None where the rows of two levels cannot be had at once."""
        theory = self.theory
        held = self.held(instruction, rows, at)
        call, rule = theory.calls[instruction], theory.rules[instruction]
        if len(held) == 1:
            return localize(call, rule, held[0].row, at.machine, self.world, *held[0].units)
        outer, inner = held
        if rule.random and self.drawn_alike(instruction, rows):
            if not divisible(call.op):
                return None
            level = inner if runs_whole(rows[0]) else outer
            return localize_drawn(call, rule, (level,), self.rank(at), self.world)
        return localize_nested(call, rule, outer, inner, self.rank(at), self.world)

    def is_nothing(self, step: object) -> bool:
        """Whether a step is a collective of a lone rank, or a rebalance of lengths that agree, between devices and
        inside: the value is there."""
        if isinstance(step, Communicate):
            alike = KINDS[step.kind].keeps_dim
            return self.world == 1 or (alike and self.outer.agrees(step.tensor, step.source, step.target))
        return rebalances(step) and self.outer.agrees(step.tensor, step.source, step.target)

    def drawn_alike(self, instruction: int, rows: Rows) -> bool:
        """Whether a random instruction draws slices of which several accelerators have the same."""
        if len(rows) == 1 or not self.theory.rules[instruction].random:
            return False
        return is_sharded(rows[0].post[0]) != is_sharded(rows[1].post[0])


def as_copied(row: Triple) -> Triple:
    """The row of a copy at a cut as its rule has it: the copy is divided as what it is a copy of."""
    post = tuple(map(after_cut, row.post))
    return row if post == row.post else replace(row, post=post)
