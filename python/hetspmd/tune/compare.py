"""The fastest of several plans, by measured steps that vary.

Steps of one plan vary by some per cent, and machines drift within minutes. Plans are therefore measured in turns,
in alternating order, until it is known which is the fastest, or until it does not matter. What a plan takes is the
mean over its turns of a turn's median. Its standard error is the larger of that of the mean of so many turns and
that of a median of n steps, sqrt(pi / 2) sigma / sqrt(n) for many that are normally distributed; their sigma is
1.48 times the median distance of a step from the median of its turn, which a few that were held up do not change.

Of plans that cannot be told apart, that of the fewest devices is chosen: links and the slowest of many devices have
no part in how long one device takes, so that it is the least likely to take longer in a month than in these steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev

from hetspmd.plan.plan import Plan
from hetspmd.tune.tune_thresholds import THRESHOLDS

Turns = Sequence[Sequence[float]]


def compare(
    plans: Mapping[str, Plan], measure: Callable[[Plan, float | None], Sequence[float]]
) -> tuple[str, dict[str, float]]:
    """The name of the plan to choose, and the seconds of a step of each, by name. ``measure`` gets a plan and the
    least seconds so far (None: measure it whatever it takes), and returns the seconds of some steps, the same on
    every rank."""
    timings: dict[str, list[Sequence[float]]] = {}
    for name, plan in plans.items():
        best = min((_seconds(turns) for turns in timings.values()), default=None)
        timings[name] = [measure(plan, best)]
    for turn in range(1, THRESHOLDS.turns):
        rivals, settled = _rivals(timings)
        if settled:
            break
        for name in reversed(rivals) if turn % 2 else rivals:
            timings[name].append(measure(plans[name], None))
    rivals, _ = _rivals(timings)
    chosen = min(rivals, key=lambda name: (len(plans[name].active), _seconds(timings[name])))
    return chosen, {name: _seconds(turns) for name, turns in timings.items()}


def _rivals(timings: Mapping[str, Turns]) -> tuple[list[str], bool]:
    """The plans that may be the fastest, and whether none of them is by more than ``equal_part``. One that was
    behind before is among them again when the others turn out slower than they seemed."""
    best = min(timings, key=lambda name: _seconds(timings[name]))
    least = _seconds(timings[best])
    most = THRESHOLDS.rival_part * least
    close = {name: turns for name, turns in timings.items() if name != best and _seconds(turns) <= most}
    margins = {name: _margin(turns, timings[best]) for name, turns in close.items()}
    rivals = {n: m for n, m in margins.items() if _seconds(timings[n]) <= (1 + m) * least}
    settled = all(m <= THRESHOLDS.equal_part for m in rivals.values())
    return [name for name in timings if name == best or name in rivals], settled


def _seconds(turns: Turns) -> float:
    return fmean(map(median, turns))


def _margin(one: Turns, other: Turns) -> float:
    """By how much, as a part, the two must differ for the slower to be the slower."""
    if min(sum(map(len, one)), sum(map(len, other))) < THRESHOLDS.steps_for_error:
        return THRESHOLDS.rival_part - 1
    return THRESHOLDS.certain_errors * math.hypot(_error(one), _error(other))


def _error(turns: Turns) -> float:
    """The standard error of the seconds, as a part of them."""
    medians = [median(turn) for turn in turns]
    away = [
        abs(seconds / middle - 1) for turn, middle in zip(turns, medians, strict=True) for seconds in turn
    ]
    within = 1.25 * 1.48 * median(away) / math.sqrt(len(away))
    between = stdev(medians) / fmean(medians) / math.sqrt(len(medians)) if len(medians) > 1 else 0.0
    return max(within, between)
