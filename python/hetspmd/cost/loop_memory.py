"""What is held of the values of a step in micro-batches, and from when to when, in the order of the search
(:mod:`hetspmd.cost.turn_memory` has the order that is executed).

Of a value that the loop makes in rows, a micro-batch has its part: the largest micro-batch counts. What leaves the
loop as a sum is held through all of it, beside the summand of the micro-batch that is about to be added. What is
there before the loop and read in it is held to its end. Rows that are joined are held whole from the beginning of
the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

import numpy as np

from hetspmd.cost.liveness import Liveness
from hetspmd.cost.model import Index
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded, sharded_dim
from hetspmd.program.lengths import Lengths
from hetspmd.program.level_layout import LevelKey
from hetspmd.program.levels import FlatKey
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.time_split import Loop
from hetspmd.rules.theory import Theory


@dataclass(frozen=True, slots=True)
class HeldValue:
    """A value, a tensor in its form on each level, that is held from step ``first`` to before step ``end``;
    ``joined``: of the whole batch, though the loop makes it in rows."""

    key: LevelKey
    first: int
    end: int
    joined: bool = False


Turn: TypeAlias = Literal["only", "first", "between", "last"]
"""The turns of a device that hold different things; ``only`` is that of a device which has one."""

_KEPT: Final = 8
"""Loops, and divisions in turns, of which a theory keeps what was told."""

_Told: TypeAlias = tuple[Mapping[int, Placement] | None, dict[int, int], dict[FlatKey, tuple[int, int]]]


class AxisPlaces:
    """Along which axis the bytes of a value are divided among the devices, and how many there are; told once for
    each value of a theory and a division in turns, and kept with the theory.

    Axes are numbered as those of the theory; the next number is that of what is whole, and behind it stand the axes
    of the samples once more, as the largest micro-batch has them.
    """

    def __init__(self, theory: Theory, batches: MicroBatches | None) -> None:
        self.theory, self.batches = theory, batches
        self.whole = len(theory.axes.axes)
        samples = sorted(batches.loop.axes) if batches is not None else []
        self._in_turn = {axis: self.whole + 1 + place for place, axis in enumerate(samples)}
        self._largest = (
            {axis: max(batches.turns.units[axis]) for axis in samples} if batches is not None else {}
        )
        self._told = self._kept()

    def _kept(self) -> dict[FlatKey, tuple[int, int]]:
        """What was told of the same theory in turns of as many samples."""
        told: deque[_Told] = vars(self.theory).setdefault("_held_places", deque(maxlen=_KEPT))
        division = (None, {}) if self.batches is None else (self.batches.placements, self._largest)
        for placements, largest, places in told:
            if placements is division[0] and largest == division[1]:
                return places
        told.append((*division, {}))
        return told[-1][2]

    def of_keys(self, keys: Sequence[FlatKey]) -> list[tuple[int, int]]:
        """:meth:`of` of many values, none of them joined."""
        told = self._told
        for key in keys:
            if key not in told:
                told[key] = self.of(*key)
        return [told[key] for key in keys]

    def of(self, tensor: int, form: Placement, *, joined: bool = False) -> tuple[int, int]:
        """The axis of a value, and its bytes over all devices that divide it."""
        return self.at(tensor, axis_of(self.theory, tensor, form), joined=joined)

    def at(self, tensor: int, axis: int, *, joined: bool = False) -> tuple[int, int]:
        """The same of a tensor that is divided along a logical axis, or whole."""
        nbytes = self.theory.graph.tensors[tensor].nbytes
        time = REPLICATE if self.batches is None else self.batches.placements.get(tensor, REPLICATE)
        of_time = self.theory.axes.sharded(tensor, time) if is_sharded(time) and not joined else None
        if of_time is None:
            return axis, nbytes
        part = -(-nbytes * self._largest[of_time.id] // max(of_time.units, 1))
        return self._in_turn.get(axis, axis), part

    def units(self, lengths: Lengths) -> tuple[Index, Index]:
        """``(units, of)``: device j holds ``units[a, j]`` of ``of[a]`` units of axis a."""
        rows = [*lengths.units, (1,) * lengths.world]
        of = [*(max(axis.units, 1) for axis in self.theory.axes.axes), 1]
        for axis in self._in_turn:
            assert self.batches is not None
            table = self.batches.table(axis, lengths.units[axis])
            rows.append(tuple(map(max, zip(*table, strict=True))))
            of.append(max(self._largest[axis], 1))
        return np.array(rows, dtype=np.int64).reshape(-1, lengths.world), np.array(of, dtype=np.int64)

    @property
    def segments(self) -> Index:
        """The segment of each axis; beyond the last, what is whole, and behind it the segments of the samples of a
        micro-batch."""
        axes, count = self.theory.axes.axes, self.theory.axes.segments
        behind = [count + 1 + axes[axis].segment for axis in self._in_turn]
        return np.array([*(a.segment for a in axes), count, *behind], dtype=np.int64)

    def times(self, world: int) -> tuple[float, ...]:
        """How many micro-batches' samples each device has in one of its turns: 1 where each runs all of them."""
        if self.batches is None:
            return (1.0,) * world
        return tuple(self.batches.count / own for own in self.batches.turns_of(world))


def axis_of(theory: Theory, tensor: int, form: Placement) -> int:
    """Id of the axis along which a form is sharded; the number of axes for one that is whole."""
    if not is_sharded(form):
        return len(theory.axes.axes)
    axis = theory.axes.sharded(tensor, form)
    if axis is None:
        name = theory.graph.tensors[tensor].name
        raise ValueError(f"dim {sharded_dim(form)} of {name} has no logical axis and is never sharded")
    return axis.id


def held_in_turns(
    batches: MicroBatches,
    live: Liveness,
    spans: tuple[Sequence[int], list[int], list[int]],
    loop: tuple[int, int],
    values: Container[FlatKey],
) -> list[HeldValue]:
    """Let the values of ``live`` be held where the loop runs several times; what is held beside them.

    ``spans``: the values that have a storage of their own, and of each value the step from which and the one
    before which it is held; they are made longer or shorter here. ``loop``: as :func:`loop_of` says. ``values``:
    those that the loop makes; they are held in each micro-batch as long as they are in one.
    """
    first, end = loop
    own, firsts, ends = spans
    sizes, summed, joined = live.sizes, batches.summed, batches.joined
    before = made_before(live.theory, batches.loop)
    for value in own:
        key = cast(FlatKey, sizes[value])
        if key[0] in before and ends[value] > first and key not in values:
            firsts[value], ends[value] = min(firsts[value], first), max(ends[value], end)
        elif key[0] in summed and value in live.delivered and key not in values:
            firsts[value] = max(firsts[value], min(end, ends[value] - 1))
    more: list[HeldValue] = []
    reduced = {key[0] for key in map(sizes.__getitem__, live.delivered) if key in values}
    for value, sized in enumerate(sizes):
        tensor, form = key = cast(FlatKey, sized)
        if (tensor not in joined and tensor not in summed) or key not in values:
            continue
        owner = live.storage[value]
        if tensor in joined and value not in live.delivered:
            more.append(HeldValue(key, first, max(ends[owner], end), joined=True))
        elif tensor in summed and not (form == PARTIAL and tensor in reduced):
            # Beside what is summed the summand of the micro-batch, which is about to be added.
            more.append(HeldValue(sizes[owner], live.born[owner], live.born[owner] + 1))
            firsts[owner], ends[owner] = min(firsts[owner], first), max(ends[owner], end)
    return more


def loop_of(batches: MicroBatches, instructions: Sequence[int]) -> tuple[int, int] | None:
    """The first step of the loop and the one behind its last; None where nothing is in it.

    ``instructions``: the one that runs, or ran last, at each step.
    """
    phases = batches.loop.phases
    loop = [at for at, instruction in enumerate(instructions) if phases[instruction] == "in"]
    return (loop[0], loop[-1] + 1) if loop else None


def made_before(theory: Theory, loop: Loop) -> frozenset[int]:
    """The tensors that are made before the loop (kept with the theory)."""
    kept: deque[tuple[Loop, frozenset[int]]] = vars(theory).setdefault("_made_before", deque(maxlen=_KEPT))
    for of, made in kept:
        if of is loop:
            return made
    pairs = zip(theory.graph.instructions, loop.phases, strict=True)
    kept.append((loop, frozenset(t for i, phase in pairs if phase == "before" for t in i.outputs)))
    return kept[-1][1]
