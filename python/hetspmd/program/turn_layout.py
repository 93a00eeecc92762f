"""Where the parts of tensors lie on the devices in each micro-batch: the rows of a micro-batch, divided."""

from __future__ import annotations

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.errors import PlanError
from hetspmd.placement import REPLICATE, Placement, placement_text, same_dim, sharded_dim
from hetspmd.program.layout import Layout
from hetspmd.program.lengths import Lengths
from hetspmd.program.level_layout import LevelKey, LevelLayout, Rows
from hetspmd.program.levels import InsideCollective, Key
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.turn_lengths import Table
from hetspmd.rules.theory import Theory


class TurnLayout(LevelLayout):
    """A layout of two levels: the micro-batches, and the devices, which divide the units of a micro-batch as
    ``lengths`` divide those of the whole batch, or take them in turns of their own.

    The place of a rank is its micro-batch (``machine``) and its device (``inside``).
    """

    def __init__(self, theory: Theory, batches: MicroBatches, lengths: Lengths) -> None:
        super().__init__(theory, batches.micro_batch_units(lengths), (lengths.world,) * batches.count)
        self.batches, self.lengths = batches, lengths
        self._turns: dict[int, Table] = {}
        self._of_devices = Layout(theory.graph, theory.axes, lengths)

    def inside(self, axis: int, units: int, machine: int) -> tuple[int, ...]:
        """Units of an axis divided among the devices: all of them by the lengths, those of a micro-batch so that
        over all micro-batches each device has those of its lengths."""
        of_devices = self.lengths.units[axis]
        if units == sum(of_devices):
            return of_devices
        return self.table(axis)[machine]

    def given(self, tensor: int, form: Placement = REPLICATE) -> LevelKey:
        """What a rank is given of a tensor that lies on the devices in a form."""
        return tensor, REPLICATE, form

    def table(self, axis: int) -> Table:
        """The units of an axis of the samples that each device has in each turn."""
        if axis not in self._turns:
            self._turns[axis] = self.batches.table(axis, self.lengths.units[axis])
        return self._turns[axis]

    def extents(self, key: Key, machine: int) -> tuple[int, ...]:
        """Elements per device along the dim that the form on the devices divides. A copy at a cut has other lengths
        there than its original, and the same in time."""
        tensor, time, form = key
        axis = self.axes.sharded(tensor, form)
        if axis is None:
            raise PlanError(f"{self.graph.tensors[tensor].name} is never divided as {placement_text(form)}")
        unit = self.graph.tensors[tensor].shape[sharded_dim(form)] // axis.units
        units = self.outer.lengths.units[axis.id][machine] if same_dim(time, form) else axis.units
        return tuple(n * unit for n in self.inside(axis.id, units, machine))

    def drawn_alike(self, instruction: int, rows: Rows) -> bool:
        """Whether a random instruction draws slices of which several devices have the same; a lone one has none."""
        return self.lengths.world > 1 and super().drawn_alike(instruction, rows)

    def is_nothing(self, step: object) -> bool:
        """Whether a step is a collective of a lone device, or a rebalance of lengths that agree: the value is
        there."""
        if not isinstance(step, InsideCollective):
            return False
        return self.lengths.world == 1 or (
            KINDS[step.kind].keeps_dim and self._of_devices.agrees(step.tensor, step.source, step.target)
        )
