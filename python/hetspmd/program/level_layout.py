"""Where the parts of tensors lie on the accelerators of machines.

An accelerator's part of a tensor is a part of its machine's part. Lengths inside are even, in whole units: those of
the machine where the outer form divides the same dim, those of the whole axis elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

from hetspmd.errors import PlanError
from hetspmd.placement import after_cut, is_sharded, placement_text, same_dim, sharded_dim
from hetspmd.program.layout import Layout, Region
from hetspmd.program.lengths import Lengths, apportion
from hetspmd.program.levels import Across, Key, NestedStep
from hetspmd.program.noise import divisible
from hetspmd.rules.nested import Level, localize_drawn, localize_nested, runs_whole
from hetspmd.rules.rule import LocalCall, Row
from hetspmd.rules.theory import Theory

__all__ = ["AcceleratorPlace", "Leg", "NestedLayout", "Part"]

Part = tuple[int, Sequence[int]] | str | None
"""How a machine's tensor lies on its accelerators: cut along a dim with these extents, "sum", or whole on each."""

Leg: TypeAlias = tuple[Part, Sequence[int], Part, Sequence[int]]
"""How a machine's tensor lies on its accelerators and its shape, before a collective between machines and after."""


@dataclass(frozen=True)
class AcceleratorPlace:
    """An accelerator: the ``inside``-th of the ``machine``-th of the active machines."""

    machine: int
    inside: int


class NestedLayout:
    """Where parts lie: ``accelerators`` of each active machine, whose lengths ``outer`` holds."""

    def __init__(self, theory: Theory, lengths: Lengths, accelerators: Sequence[int]) -> None:
        self.theory, self.graph, self.axes = theory, theory.graph, theory.axes
        self.accelerators = tuple(accelerators)
        self.outer = Layout(theory.graph, theory.axes, lengths)
        self._even: dict[tuple[int, int], tuple[int, ...]] = {}

    @property
    def world(self) -> int:
        """Accelerators in all."""
        return sum(self.accelerators)

    @property
    def places(self) -> list[AcceleratorPlace]:
        """All accelerators in rank order."""
        return [AcceleratorPlace(v, a) for v, k in enumerate(self.accelerators) for a in range(k)]

    def rank(self, at: AcceleratorPlace) -> int:
        """The rank of an accelerator among all."""
        return sum(self.accelerators[: at.machine]) + at.inside

    def even(self, units: int, machine: int) -> tuple[int, ...]:
        """Units divided evenly among the accelerators of a machine."""
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
        return tuple(n * unit for n in self.even(units, machine))

    def inner_region(self, key: Key, at: AcceleratorPlace) -> Region | None:
        """The part of its machine's part that an accelerator holds; None for all of it."""
        if not is_sharded(key[2]):
            return None
        extents = self.extents(key, at.machine)
        return Region(sharded_dim(key[2]), sum(extents[: at.inside]), extents[at.inside])

    def outer_region(self, key: Key, at: AcceleratorPlace) -> Region | None:
        """The part of the tensor that the accelerator's machine holds; None for all of it."""
        return self.outer.region(key[0], key[1], at.machine)

    def regions(self, key: Key, at: AcceleratorPlace) -> tuple[Region, ...]:
        """The parts one after the other: the machine's, then the accelerator's of that."""
        found = (self.outer_region(key, at), self.inner_region(key, at))
        return tuple(region for region in found if region is not None)

    def shape(self, key: Key, at: AcceleratorPlace) -> tuple[int, ...]:
        """The local shape."""
        shape = list(self.graph.tensors[key[0]].shape)
        for region in self.regions(key, at):
            shape[region.dim] = region.extent
        return tuple(shape)

    def levels(self, instruction: int, outer: Row, inner: Row, at: AcceleratorPlace) -> tuple[Level, Level]:
        """Both rows with the units that the machine and the accelerator hold."""
        start, stop = self._units(instruction, outer, lambda axis: self.outer.lengths.range(axis, at.machine))
        first = Level(_as_copied(outer), (start, stop))

        def inside(axis: int) -> tuple[int, int]:
            low, units = 0, self.axes.axes[axis].units
            if inner == outer:
                low, high = self.outer.lengths.range(axis, at.machine)
                units = high - low
            stops = [low, *(low + n for n in accumulate(self.even(units, at.machine)))]
            return stops[at.inside], stops[at.inside + 1]

        return first, Level(_as_copied(inner), self._units(instruction, inner, inside))

    def _units(self, instruction: int, row: Row, held: Any) -> tuple[int, int]:
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

    def call(self, instruction: int, outer: Row, inner: Row, at: AcceleratorPlace) -> LocalCall | None:
        """What an accelerator calls; None where the two rows cannot be had at once."""
        theory = self.theory
        levels = self.levels(instruction, outer, inner, at)
        call, rule = theory.calls[instruction], theory.rules[instruction]
        if rule.random and self.drawn_alike(instruction, outer, inner):
            if not divisible(call.op):
                return None
            level = levels[1] if runs_whole(outer) else levels[0]
            return localize_drawn(call, rule, level, self.rank(at), self.world)
        return localize_nested(call, rule, *levels, self.rank(at), self.world)

    def is_nothing(self, step: NestedStep) -> bool:
        """Whether a step is a rebalance of lengths that agree, between machines and inside: the value is there."""
        if not isinstance(step, Across) or step.kind != "rebalance" or step.collected != step.handed_out:
            return False
        return self.outer.agrees(step.tensor, step.source, step.target)

    def drawn_alike(self, instruction: int, outer: Row, inner: Row) -> bool:
        """Whether a random instruction draws slices of which several accelerators have the same."""
        return bool(self.theory.rules[instruction].random) and is_sharded(outer.post[0]) != is_sharded(
            inner.post[0]
        )


def _as_copied(row: Row) -> Row:
    """The row of a copy at a cut as its rule has it: the copy is divided as what it is a copy of."""
    post = tuple(map(after_cut, row.post))
    return row if post == row.post else replace(row, post=post)
