"""Where the parts of tensors lie on the devices in each micro-batch: the rows of a micro-batch, divided."""

from __future__ import annotations

from hetspmd.program.lengths import Lengths
from hetspmd.program.level_layout import LevelLayout
from hetspmd.program.turn_lengths import in_turns
from hetspmd.rules.theory import Theory


class TurnLayout(LevelLayout):
    """A layout of two levels: the micro-batches, of ``turns`` units of each axis, and the devices, which divide
    the units of a micro-batch as ``lengths`` divide those of the whole batch.

    The place of a rank is its micro-batch (``machine``) and its device (``inside``).
    """

    def __init__(self, theory: Theory, turns: Lengths, lengths: Lengths) -> None:
        super().__init__(theory, turns, (lengths.world,) * turns.world)
        self.lengths = lengths
        self._turns: dict[int, tuple[tuple[int, ...], ...]] = {}

    def inside(self, axis: int, units: int, machine: int) -> tuple[int, ...]:
        """Units of an axis divided among the devices: all of them by the lengths, those of a micro-batch so that
        over all micro-batches each device has those of its lengths."""
        of_devices = self.lengths.units[axis]
        if units == sum(of_devices):
            return of_devices
        if axis not in self._turns:
            self._turns[axis] = in_turns(self.outer.lengths.units[axis], of_devices)
        return self._turns[axis][machine]
