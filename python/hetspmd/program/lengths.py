"""Integer lengths: how many units of each logical axis each device holds (HAP 5.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace
from typing import Final, TypeAlias, cast

import numpy as np

from hetspmd.placement import Placement, sharded_dim
from hetspmd.rules.axes import Axes

LITTLE: Final = 1 / 16
"""Part by which a stage may last longer so that slices are aligned."""

Ratios: TypeAlias = tuple[float, ...]
"""B of one segment: the share of each device."""

Matrix: TypeAlias = tuple[Ratios, ...]
"""B (HAP 5.2): the ratios of each segment."""


def by_segment(ratios: Sequence[float] | Sequence[Sequence[float]], segments: int) -> Matrix:
    """The ratios of each of ``segments``, from those or from ratios that all have in common.

    Raises ValueError for ratios of another number of segments.
    """
    if np.ndim(ratios) == 1:
        return (tuple(cast(Sequence[float], ratios)),) * segments
    matrix = tuple(tuple(row) for row in cast(Sequence[Sequence[float]], ratios))
    if len(matrix) != segments or len({len(row) for row in matrix}) != 1:
        raise ValueError(
            f"ratios of {len(matrix)} segments for a graph of {segments}; give one row for all, or one for each"
        )
    return matrix


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

    def extents(self, axes: Axes, tensor: int, form: Placement, extent: int) -> tuple[int, ...]:
        """Elements per device along the dim that ``form`` shards, of a tensor with ``extent`` there."""
        axis = axes.sharded(tensor, form)
        if axis is None:
            raise ValueError(f"dim {sharded_dim(form)} of tensor {tensor} has no logical axis")
        unit = extent // axis.units
        return tuple(n * unit for n in self.units[axis.id])


def apportion(units: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """``units`` divided in the given ratios (non-negative, not all zero), to whole units.

    First the least ``T = max_j n_j / B_j`` that any division into whole units reaches: the time in which a
    stage ends when device j's speed is proportional to B_j. Handing out units one by one to the device that
    would then finish first, with the least ``(n_j + 1) / B_j``, reaches it (D'Hondt's method). Among the
    divisions that take no longer than T, the one nearest to the ratios is kept: whole parts of the quotas
    ``units * B_j``, then unit by unit where most is missing (the rounding of HAP 5.1, held back where it
    makes the stage longer). A device with ratio 0 gets nothing. Ties go to the lower rank.

    Raises ValueError for a negative number of units and for ratios that are negative or all zero.
    """
    if units < 0 or not ratios or not min(ratios) >= 0 or not 0 < sum(ratios) < math.inf:
        raise ValueError(f"cannot divide {units} units in ratios {list(ratios)}")
    total = sum(ratios)
    shares = [r / total for r in ratios]
    ranks = [j for j, share in enumerate(shares) if share > 0]
    floors = [int(units * share * (1 - 1e-12)) for share in shares]
    rest = units - sum(floors)
    fastest = floors.copy()
    first = [((fastest[j] + 1) / shares[j], j) for j in ranks]
    heapify(first)
    for _ in range(rest):
        j = first[0][1]
        fastest[j] += 1
        heapreplace(first, ((fastest[j] + 1) / shares[j], j))
    time = max(fastest[j] / shares[j] for j in ranks)
    caps = [max(n, int(time * share * (1 + 1e-12))) for n, share in zip(fastest, shares, strict=True)]
    counts = floors
    missing = [(counts[j] - units * shares[j], j) for j in ranks if counts[j] < caps[j]]
    heapify(missing)
    for _ in range(rest):
        j = missing[0][1]
        counts[j] += 1
        if counts[j] < caps[j]:
            heapreplace(missing, (counts[j] - units * shares[j], j))
        else:
            heappop(missing)
    return tuple(counts)


def aligned(units: int, ratios: Sequence[float], alignment: int) -> tuple[int, ...]:
    """:func:`apportion`, but in multiples of ``alignment`` units, the last device's slice aside, where a stage
    lasts at most :data:`LITTLE` longer then and the same devices have units. Equal slices stay equal."""
    counts = apportion(units, ratios)
    if alignment == 1 or len({n for n in counts if n}) <= 1:
        return counts
    multiples = [n * alignment for n in apportion(-(-units // alignment), ratios)]
    last = max(j for j, n in enumerate(multiples) if n)
    multiples[last] -= sum(multiples) - units
    same = all((n > 0) == (m > 0) for n, m in zip(counts, multiples, strict=True))
    if same and _time(multiples, ratios) <= (1 + LITTLE) * _time(counts, ratios):
        return tuple(multiples)
    return counts


def _time(counts: Sequence[int], ratios: Sequence[float]) -> float:
    return max(n / share for n, share in zip(counts, ratios, strict=True) if n)


def lengths_for(axes: Axes, ratios: Sequence[float] | Sequence[Sequence[float]]) -> Lengths:
    """Lengths of all axes at the sharding ratios B, of all segments or by segment. Raises ValueError for ratios of
    another number of segments."""
    matrix = by_segment(ratios, axes.segments)

    @cache
    def sizes(units: int, segment: int, alignment: int) -> tuple[int, ...]:
        return aligned(units, matrix[segment], alignment)

    return Lengths(
        len(matrix[0]), tuple(sizes(axis.units, axis.segment, axis.alignment) for axis in axes.axes)
    )
