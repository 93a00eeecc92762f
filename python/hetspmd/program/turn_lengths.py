"""How many units of each axis a micro-batch has, and each device in it."""

from __future__ import annotations

from collections.abc import Sequence

from hetspmd.program.lengths import Lengths, apportion
from hetspmd.rules.theory import Theory


def turn_lengths(theory: Theory, axes: frozenset[int], parts: Sequence[float]) -> Lengths:
    """The units of each axis in each micro-batch: those of ``axes``, the samples, divided by ``parts``."""
    rest = (0,) * (len(parts) - 1)
    return Lengths(
        len(parts),
        tuple(
            apportion(axis.units, parts) if axis.id in axes else (axis.units, *rest)
            for axis in theory.axes.axes
        ),
    )


Table = tuple[tuple[int, ...], ...]
"""The units of each device in each turn."""


def own_table(own: Sequence[int], of_devices: Sequence[int]) -> Table:
    """The units that each device has in each turn, where it has so many turns of its own: as equal as whole units
    can be, and none in those after them."""
    count = max(own)
    columns = [
        (*apportion(units, (1 / turns,) * turns), *(0,) * (count - turns))
        for turns, units in zip(own, of_devices, strict=True)
    ]
    return tuple(zip(*columns, strict=True))


def in_turns(turns: Sequence[int], of_devices: Sequence[int]) -> Table:
    """The units that each device has in each turn: so many of a turn, and over all turns those of the device.

    After each turn a device has had its part of the units so far, but for less than one unit, where that can be.
    """
    total = sum(of_devices)
    given = [0] * len(of_devices)
    table: list[tuple[int, ...]] = []
    reached = 0
    for units in turns:
        reached += units
        due = [n * reached / total - had if total else 0.0 for n, had in zip(of_devices, given, strict=True)]
        room = [n - had for n, had in zip(of_devices, given, strict=True)]
        counts = [min(max(int(d + 1e-9), 0), r) for d, r in zip(due, room, strict=True)]
        devices = range(len(counts))
        while sum(counts) != units:
            if sum(counts) < units:
                j = max((j for j in devices if counts[j] < room[j]), key=lambda j: (due[j] - counts[j], -j))
                counts[j] += 1
            else:
                j = min((j for j in devices if counts[j]), key=lambda j: (due[j] - counts[j], -j))
                counts[j] -= 1
        given = [had + n for had, n in zip(given, counts, strict=True)]
        table.append(tuple(counts))
    return tuple(table)
