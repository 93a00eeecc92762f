"""What is held of the values of a step in micro-batches, and from when to when.

Of a value that the loop makes in rows, a micro-batch has its part: the largest micro-batch counts. What leaves the
loop as a sum is held through all of it, beside the summand of the micro-batch that is about to be added. What is
there before the loop and read in it is held to its end. Rows that are joined are held whole from the beginning of
the loop.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

import numpy as np

from hetspmd.cost.liveness import Liveness
from hetspmd.cost.model import Index
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded, sharded_dim
from hetspmd.program.lengths import Lengths
from hetspmd.program.levels import FlatKey
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.rules.theory import Theory


@dataclass(frozen=True, slots=True)
class HeldValue:
    """A value that is held from step ``first`` to before step ``end``; ``joined``: of the whole batch, though the
    loop makes it in rows."""

    tensor: int
    form: Placement
    first: int
    end: int
    joined: bool = False


class AxisPlaces:
    """Along which axis the bytes of a value are divided among the devices, and how many there are.

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
    spans: dict[int, HeldValue],
    instructions: list[int],
    values: Container[FlatKey],
) -> list[HeldValue]:
    """``spans``, by the values of ``live``, as they are where the loop runs several times.

    ``instructions``: the one that runs, or ran last, at each step. ``values``: those that the loop makes; they are
    held in each micro-batch as long as they are in one.
    """
    phases, graph = batches.loop.phases, live.theory.graph
    loop = [at for at, instruction in enumerate(instructions) if phases[instruction] == "in"]
    if not loop:
        return list(spans.values())
    first, end = loop[0], loop[-1] + 1
    made_before = {
        t for i, p in zip(graph.instructions, phases, strict=True) if p == "before" for t in i.outputs
    }
    held, more = dict(spans), list[HeldValue]()
    for value, span in spans.items():
        inside = (span.tensor, span.form) in values
        if span.tensor in made_before and not inside and span.end > first:
            held[value] = replace(span, first=min(span.first, first), end=max(span.end, end))
        elif span.tensor in batches.summed and value in live.delivered and not inside:
            held[value] = replace(span, first=max(span.first, min(end, span.end - 1)))
    for value, key in enumerate(live.sizes):
        owner, (tensor, form) = live.storage[value], key
        if owner not in held or (tensor, form) not in values:
            continue
        span = held[owner]
        if tensor in batches.joined and value not in live.delivered:
            more.append(HeldValue(tensor, form, first, max(span.end, end), joined=True))
        elif tensor in batches.summed and not _is_reduced(tensor, form, live, values):
            more.append(replace(span, first=live.born[owner], end=live.born[owner] + 1))
            held[owner] = replace(span, first=min(span.first, first), end=max(span.end, end))
    return [*held.values(), *more]


def _is_reduced(tensor: int, form: Placement, live: Liveness, values: Container[FlatKey]) -> bool:
    """Whether a summand of the devices is reduced in the loop, so that what leaves it is the reduced one."""
    return form == PARTIAL and any(
        live.sizes[v][0] == tensor and (tensor, live.sizes[v][1]) in values for v in live.delivered
    )
