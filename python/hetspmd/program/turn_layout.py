"""Where the parts of tensors lie on the devices in each micro-batch: the rows of a micro-batch, divided."""

from __future__ import annotations

from hetspmd.program.lengths import Lengths
from hetspmd.program.level_layout import LevelLayout, Rows
from hetspmd.program.levels import InsideCollective
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

    def inside(self, axis: int, units: int, machine: int) -> tuple[int, ...]:
        """Units of an axis divided among the devices: all of them by the lengths, those of a micro-batch so that
        over all micro-batches each device has those of its lengths."""
        of_devices = self.lengths.units[axis]
        if units == sum(of_devices):
            return of_devices
        return self.table(axis)[machine]

    def table(self, axis: int) -> Table:
        """The units of an axis of the samples that each device has in each turn."""
        if axis not in self._turns:
            self._turns[axis] = self.batches.table(axis, self.lengths.units[axis])
        return self._turns[axis]

    def drawn_alike(self, instruction: int, rows: Rows) -> bool:
        """Whether a random instruction draws slices of which several devices have the same; a lone one has none."""
        return self.lengths.world > 1 and super().drawn_alike(instruction, rows)

    def is_nothing(self, step: object) -> bool:
        """Whether a step is a collective of a lone device: the value is there."""
        return isinstance(step, InsideCollective) and self.lengths.world == 1
