"""What limits a plan's step, for the reports: the cluster's quantities, and that lengths are whole units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hetspmd.cluster.machines import device_word, devices_text
from hetspmd.plan.plan import Plan
from hetspmd.ratios.problem import Room
from hetspmd.ratios.ratio_thresholds import THRESHOLDS
from hetspmd.ratios.sensitivity import QUANTITIES, Quantity, Sensitivity, sensitivities

_MOST_LINES = 5
"""Quantities that the text names: those that gain most."""
_SHOWN_GAIN = 0.0005
"""The part of a step from which a gain is shown: less would read as 0.0 %."""
_NAMES: dict[Quantity, str] = {
    "flops": "FLOP/s",
    "memory_bandwidth": "memory bandwidth",
    "launch": "time per launch",
    "bandwidth": "network bandwidth",
    "latency": "network latency",
}


@dataclass(frozen=True)
class StepLimits:
    """What limits the predicted step.

    sensitivities       of the quantities that the step depends on, the greatest elasticity first
    fractional_seconds  of the step if units could be cut, at the plan's ratios
    loss                ``seconds / fractional_seconds - 1`` for the step at the plan's lengths (below 0 where whole
                        units happen to be quicker)
    """

    sensitivities: tuple[Sensitivity, ...]
    fractional_seconds: float
    loss: float


def limits(plan: Plan) -> StepLimits:
    """The limits of a plan; seconds are those of the two-stream simulation."""
    model, program = plan.costs, plan.program
    streams = plan.step.streams
    fractional = streams.seconds(model.even_shares(plan.ratios))
    whole = streams.seconds(model.shares(plan.lengths))
    memory = model.capacity
    room = None
    if np.isfinite(memory).any():
        room = Room.of(plan.step.executed.at(plan.lengths), memory)
    elasticities = sensitivities(
        model, program, plan.ratios, cluster=plan.cluster, active=plan.active, room=room, streams=streams
    )
    return StepLimits(elasticities, fractional, whole / fractional - 1 if fractional > 0 else 0.0)


def limits_text(plan: Plan, limits: StepLimits) -> str:
    """For people: what would gain most, and what whole units cost."""
    shown = [(s.gain, s) for s in limits.sensitivities if s.gain is not None and s.gain >= _SHOWN_GAIN]
    shown.sort(key=lambda entry: -entry[0])
    lines = [f"  {sentence(plan, s)} would gain {100 * gain:.1f} %" for gain, s in shown[:_MOST_LINES]]
    if not lines:
        lines = ["  no single speed: 10 % more of any gains less than 0.05 %"]
    if limits.fractional_seconds > 0:
        verb, loss = ("cost", limits.loss) if limits.loss >= 0 else ("save", -limits.loss)
        lines.append(f"  whole units {verb} {100 * loss:.1f} %")
    return "What limits the step\n" + "\n".join(lines)


def sentence(plan: Plan, of: Sensitivity) -> str:
    """``10 % more FLOP/s on large (rank 0)``; across machines their numbers are called so."""
    name, more = _NAMES[of.quantity], "more" if QUANTITIES[of.quantity] < 0 else "less"
    if not of.ranks:
        return f"{100 * THRESHOLDS.better_quantity:.0f} % {more} {name}"
    kinds = dict.fromkeys(plan.cluster.devices[rank].name for rank in of.ranks)
    where = devices_text(device_word(plan.cluster), of.ranks)
    return f"{100 * THRESHOLDS.better_quantity:.0f} % {more} {name} on {', '.join(kinds)} ({where})"


def limits_document(limits: StepLimits) -> dict[str, Any]:
    """The keys ``sensitivity`` and ``lengths`` of the JSON document."""
    return {
        "sensitivity": [
            {"quantity": s.quantity, "ranks": list(s.ranks), "elasticity": s.elasticity, "gain": s.gain}
            for s in limits.sensitivities
        ],
        "lengths": {"fractional_seconds": limits.fractional_seconds, "loss": limits.loss},
    }
