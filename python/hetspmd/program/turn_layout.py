"""Where the parts of tensors lie on the devices in each micro-batch: the rows of a micro-batch, divided."""

from __future__ import annotations

from collections.abc import Sequence

from hetspmd.program.level_layout import LevelLayout
from hetspmd.program.lengths import Lengths, apportion
from hetspmd.rules.theory import Theory

__all__ = ["TurnLayout", "turn_lengths"]


class TurnLayout(LevelLayout):
    """A layout of two levels: the micro-batches, of ``turns`` units of each axis, and the devices, which divide
    the units of a micro-batch as ``lengths`` divide those of the whole batch.

    The place of a rank is its micro-batch (``machine``) and its device (``inside``).
    """

    def __init__(self, theory: Theory, turns: Lengths, lengths: Lengths) -> None:
        super().__init__(theory, turns, (lengths.world,) * turns.world)
        self.lengths = lengths

    def inside(self, axis: int, units: int, machine: int) -> tuple[int, ...]:
        """Units of an axis divided among the devices: all of them by the lengths, those of a micro-batch in the same
        ratios."""
        of_devices = self.lengths.units[axis]
        if units == sum(of_devices):
            return of_devices
        return apportion(units, of_devices)


def turn_lengths(theory: Theory, axes: frozenset[int], parts: Sequence[float]) -> Lengths:
    """The units of each axis in each micro-batch: those of ``axes``, the samples, divided by ``parts``. Other axes
    are never divided in time; all their units stand with the first."""
    rest = (0,) * (len(parts) - 1)
    return Lengths(
        len(parts),
        tuple(
            apportion(axis.units, parts) if axis.id in axes else (axis.units, *rest) for axis in theory.axes.axes
        ),
    )
