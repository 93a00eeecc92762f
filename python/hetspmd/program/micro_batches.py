"""A step in micro-batches: what runs before the loop over them, in it, and after it.

To split the batch in time is like sharding it over devices that take turns, so the triples of the theory say what
holds. Each instruction has a phase and a triple *in time*:

- *before*: whole, once. What depends on no sample (casts of parameters), and what depends on inputs alone where the
  loop needs it whole: the number of tokens that count, by which a loss is divided;
- *in*: once for each micro-batch, by a triple along the samples. Its results are the micro-batch's rows of a tensor
  (``shard(d)``), or a summand of it (``partial``);
- *after*: whole, once, of sums over the loop.

What leaves the loop as ``partial`` is summed over the micro-batches (gradients, the loss), what leaves it in rows
is joined (logits). An instruction that needs the whole batch's value of something that only the loop computes makes
the step impossible to split exactly: the statistics of batch norm, logits over all pairs of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetspmd.errors import MicroBatchError
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Communicate
from hetspmd.program.time_split import INSTEAD, Loop, in_time, split_in_time
from hetspmd.program.turn_lengths import Table, in_turns, own_table, turn_lengths
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import Graph


@dataclass(frozen=True)
class MicroBatches:
    """The loop of a step, run ``count`` times.

    Attributes:
        count: How many micro-batches there are, from 2 on.
        loop: What runs before the loop, in it and after it.
        turns: The units of each axis in each micro-batch, where all devices have as many turns. Other axes than
            those of the samples are never divided in time; all their units stand with the first.
        placements: Of each tensor its placement in time; REPLICATE where it is there outside of the loop.
        repeated: The tensors whose collectives run in each micro-batch though they could run once, before the loop
            or after it: what they give is then not held through the loop (:mod:`hetspmd.program.loop_steps`).
        own_turns: How many turns each active device runs the loop in, where the devices do not wait for each other
            in it; the most is ``count``. Empty where each runs all of them.
    """

    count: int
    loop: Loop
    turns: Lengths
    placements: Mapping[int, Placement]
    repeated: frozenset[int] = frozenset()
    own_turns: tuple[int, ...] = ()

    def turns_of(self, world: int) -> tuple[int, ...]:
        """How many turns each of the active devices runs the loop in."""
        return self.own_turns or (self.count,) * world

    def table(self, axis: int, of_devices: Sequence[int]) -> Table:
        """The units of an axis of the samples that each device has in each turn, of those that it has in all."""
        if self.own_turns:
            return own_table(self.own_turns, of_devices)
        return in_turns(self.turns.units[axis], of_devices)

    def micro_batch_units(self, lengths: Lengths) -> Lengths:
        """The units of each axis in each micro-batch, at these lengths of the devices."""
        if not self.own_turns:
            return self.turns
        axes = self.loop.axes
        return Lengths(
            self.count,
            tuple(
                tuple(map(sum, self.table(axis, lengths.units[axis]))) if axis in axes else units
                for axis, units in enumerate(self.turns.units)
            ),
        )

    @cached_property
    def summed(self) -> frozenset[int]:
        """The tensors that leave the loop as sums."""
        return frozenset(r.tensor for r in self.loop.leaving if r.form == PARTIAL)

    def is_made_before(self, graph: Graph, tensor: int) -> bool:
        """Whether a tensor is there before the loop."""
        return self.loop.phases[graph.producers[tensor]] == "before" if tensor in graph.producers else True

    def repeats(self, step: Communicate) -> bool:
        """Whether a collective runs in the loop though it could stand outside of it: one that gathers or reduces a
        tensor of ``repeated``."""
        return step.tensor in self.repeated and (step.tensor in self.summed or is_sharded(step.source))

    @cached_property
    def joined(self) -> frozenset[int]:
        """The tensors that leave the loop in rows."""
        return frozenset(r.tensor for r in self.loop.leaving if is_sharded(r.form))


def micro_batches(
    theory: Theory, count: int, repeated: frozenset[int] = frozenset(), own_turns: tuple[int, ...] = ()
) -> MicroBatches:
    """A step in so many micro-batches, which are as equal as whole samples can be. ``repeated``: the tensors whose
    collectives run in each of them though they need not. ``own_turns``: those of each device, of which the most are
    ``count``.

    Raises MicroBatchError where the step cannot be split exactly, or has fewer samples than micro-batches.
    """
    _check_rows(theory, theory.batch_axes, count)
    loop = split_in_time(theory)
    _check_rows(theory, loop.axes, count)
    found = MicroBatches(
        count=count,
        loop=loop,
        turns=turn_lengths(theory, loop.axes, (1 / count,) * count),
        placements=_placements(theory, loop),
        repeated=repeated,
        own_turns=own_turns,
    )
    _check_joined(theory.graph, found.joined)
    return found


def in_own_turns(theory: Theory, batches: MicroBatches, turns: tuple[int, ...]) -> MicroBatches:
    """The loop with so many turns of each active device."""
    count = max(turns)
    units = turn_lengths(theory, batches.loop.axes, (1 / count,) * count)
    return replace(batches, count=count, turns=units, own_turns=turns)


def largest_axis(theory: Theory, axes: frozenset[int]) -> int | None:
    """The first of these axes with the most units; None without any."""
    return max(sorted(axes), key=lambda axis: theory.axes.axes[axis].units, default=None)


def samples(theory: Theory, axes: frozenset[int]) -> int:
    """The largest number of units of these axes; 0 without any."""
    axis = largest_axis(theory, axes)
    return 0 if axis is None else theory.axes.axes[axis].units


def _check_rows(theory: Theory, axes: frozenset[int], count: int) -> None:
    rows = samples(theory, axes)
    if rows < count:
        raise MicroBatchError(
            f"micro_batches={count}: the batch has {rows or 1} sample{'s' if rows > 1 else ''} that can be "
            "divided; give fewer micro-batches, or a larger batch"
        )


def _check_joined(graph: Graph, joined: frozenset[int]) -> None:
    """Outputs alone may leave the loop in rows."""
    for holder in graph.holders:
        if holder.updated in joined:
            raise MicroBatchError(
                f"forward leaves rows of the batch in {holder.name}, which micro-batches would leave in parts"
                f"{INSTEAD}"
            )
    for parameter in graph.parameters:
        if parameter.gradient in joined:
            raise MicroBatchError(
                f"the gradient of {parameter.name} has a row for each sample, which micro-batches would leave in "
                f"parts{INSTEAD}"
            )


def _placements(theory: Theory, loop: Loop) -> Mapping[int, Placement]:
    kept: list[Mapping[int, Placement]] = vars(theory).setdefault("_placements_in_time", [])
    if kept:
        return kept[0]
    placements: dict[int, Placement] = {c.tensor: REPLICATE for c in theory.graph.constants}
    for instruction, row, phase in zip(theory.graph.instructions, loop.rows, loop.phases, strict=True):
        whole = [REPLICATE] * len(instruction.outputs)
        post: Sequence[Placement] = in_time(row) if phase == "in" else whole
        placements.update((t, p) for t, p in zip(instruction.outputs, post, strict=True) if t >= 0)
    kept.append(placements)
    return placements
