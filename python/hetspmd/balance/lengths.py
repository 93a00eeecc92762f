"""Integer lengths: how many units of each logical axis each device holds (HAP 5.1, design 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetspmd.forms import Form, sharded_dim
from hetspmd.rules.axes import Axes


@dataclass(frozen=True)
class Lengths:
    """``units[axis][rank]``: the units of a logical axis on a device; consecutive in rank order.

    ``world`` is the number of devices.
    """

    world: int
    units: tuple[tuple[int, ...], ...]

    def range(self, axis: int, rank: int) -> tuple[int, int]:
        """The units ``[start, stop)`` of an axis that a device holds."""
        start = sum(self.units[axis][:rank])
        return start, start + self.units[axis][rank]

    def extents(self, axes: Axes, tensor: int, form: Form, extent: int) -> tuple[int, ...]:
        """Elements per device along the dim that ``form`` shards, of a tensor with ``extent`` there."""
        axis = axes.axis(tensor, sharded_dim(form))
        if axis is None:
            raise ValueError(f"dim {sharded_dim(form)} of tensor {tensor} has no logical axis")
        unit = extent // axis.units
        return tuple(n * unit for n in self.units[axis.id])


def apportion(units: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """``units`` divided in the given ratios (non-negative, not all zero), to whole units.

    Units are handed out one by one to the device that then finishes first, i.e. with the least
    ``(n_j + 1) / B_j``. This minimises ``max_j n_j / B_j`` exactly, the completion time of a stage in which
    device j is given time in proportion to 1 / B_j, and is within one unit of the nearest integers of
    HAP 5.1 for long axes. A device with ratio 0 gets nothing. Ties go to the lower rank.
    """
    if units < 0 or not ratios or min(ratios) < 0 or sum(ratios) <= 0:
        raise ValueError(f"cannot divide {units} units in ratios {list(ratios)}")
    total = sum(ratios)
    counts = [int(units * r / total * (1 - 1e-12)) for r in ratios]
    for _ in range(units - sum(counts)):
        j = min(
            (k for k in range(len(ratios)) if ratios[k] > 0), key=lambda k: ((counts[k] + 1) / ratios[k], k)
        )
        counts[j] += 1
    return tuple(counts)


def lengths_for(axes: Axes, ratios: Sequence[float]) -> Lengths:
    """Lengths of all axes at the sharding ratios B (one segment)."""
    return Lengths(len(ratios), tuple(apportion(axis.units, ratios) for axis in axes.axes))
