"""Where the alternation of search and ratios starts (HAP 3.1, design 7).

HAP starts from ratios proportional to computing power. Even ratios and the fastest device alone are tried
too: the first is where padding costs nothing, the second is what a plan must never lose to.
"""

from __future__ import annotations

import numpy as np

from hetspmd.cost.model import CostModel

Ratios = tuple[float, ...]


def proportional(model: CostModel) -> Ratios:
    """Shares in proportion to FLOP/s in the dtype in which the graph computes most."""
    speeds = model.speeds()
    return tuple(map(float, speeds / speeds.sum()))


def even(model: CostModel) -> Ratios:
    """The same share for every device."""
    return (1.0 / model.world,) * model.world


def fastest_alone(model: CostModel) -> Ratios:
    """Everything on the device that runs the single-device step soonest (the lowest rank among equals)."""
    best = int(np.argmin(model.alone()))
    return tuple(float(j == best) for j in range(model.world))


def starting_ratios(model: CostModel) -> tuple[tuple[str, Ratios], ...]:
    """``(name, ratios)`` of every start that differs from those before it."""
    found: list[tuple[str, Ratios]] = []
    for name, ratios in (
        ("proportional", proportional(model)),
        ("even", even(model)),
        ("fastest", fastest_alone(model)),
    ):
        if all(max(abs(a - b) for a, b in zip(ratios, known, strict=True)) > 1e-9 for _, known in found):
            found.append((name, ratios))
    return tuple(found)
