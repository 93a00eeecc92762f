"""Where the alternation of search and ratios starts (HAP 3.1).

HAP starts from ratios proportional to computing power. Even ratios are tried too, where padding costs nothing, and
ratios in proportion to memory where the others do not fit.

Each device that takes part costs something even without a share: replicated instructions, and its place in
every collective. :func:`device_subsets` are the subsets that are worth a search of their own.
"""

from __future__ import annotations

import numpy as np

from hetspmd.cost.model import CostModel
from hetspmd.program.lengths import Ratios
from hetspmd.ratios.ratio_thresholds import THRESHOLDS


def proportional(model: CostModel) -> Ratios:
    """Shares in proportion to FLOP/s in the dtype in which the graph computes most."""
    speeds = model.speeds()
    return tuple(map(float, speeds / speeds.sum()))


def even(model: CostModel) -> Ratios:
    """The same share for every device."""
    return (1.0 / model.world,) * model.world


def by_memory(model: CostModel) -> Ratios:
    """Shares in proportion to the bytes of memory; among devices without a limit even ones, and only to them."""
    memory = np.array([d.memory for d in model.cluster.devices], dtype=float)
    weight = np.isinf(memory).astype(float) if np.isinf(memory).any() else memory
    return tuple(map(float, weight / weight.sum()))


def starting_ratios(model: CostModel) -> tuple[tuple[str, Ratios], ...]:
    """``(name, ratios)`` of every start that differs from those before it."""
    starts: list[tuple[str, Ratios]] = []
    for name, ratios in (
        ("proportional", proportional(model)),
        ("even", even(model)),
    ):
        if all(
            max(abs(a - b) for a, b in zip(ratios, earlier, strict=True)) > THRESHOLDS.equal_shares
            for _, earlier in starts
        ):
            starts.append((name, ratios))
    return tuple(starts)


def device_subsets(model: CostModel) -> tuple[tuple[int, ...], ...]:
    """Ranks of the proper subsets of devices to try, ascending by size.

    The device that runs the single-device step soonest, and each prefix of the devices in the order of that
    time, equal devices together: a slower device is not taken while a faster one is left out. Of more than
    ``device_subsets``, evenly spaced ones are kept, with the first.
    """
    if model.world == 1:
        return ()
    alone = model.alone()
    order = sorted(range(model.world), key=lambda j: (alone[j], j))
    ends = [i for i in range(1, model.world) if i == 1 or alone[order[i]] != alone[order[i - 1]]]
    most = THRESHOLDS.device_subsets
    if len(ends) > most:
        ends = [ends[i * (len(ends) - 1) // (most - 1)] for i in range(most)]
    return tuple(tuple(sorted(order[:end])) for end in ends)
