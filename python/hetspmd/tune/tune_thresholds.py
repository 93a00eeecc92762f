"""The numbers by which measured steps decide between plans, each with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class TuneThresholds:
    """Which plans are measured, how many of their steps, and when one of them counts as the fastest."""

    slowest_alternative: float = 1.6
    """Times the predicted seconds of the compiled plan that another may have: predictions are not so wrong that a
    slower one could be the fastest."""

    warm_steps: int = 2
    """Steps that never count: the first makes gradients and the optimizer's state."""

    settled_part: float = 0.95
    """The part of the step before that a step must take for the timing to start with it: while memory is new to a
    process, the system takes longer to provide it than steps take to compute."""

    latest_first_step: int = 6
    """The step with which the timing starts at the latest, counted from one: steps that still get shorter would
    hold up the choice without end."""

    hopeless_part: float = 1.5
    """Times the best plan's seconds from which a plan's first timed step is its last: it is not the fastest,
    whatever further steps take."""

    rival_part: float = 1.1
    """Times the best plan's seconds that a plan may take to be measured again: a slower one is behind however
    steps vary."""

    turns: int = 6
    """Turns of a plan at most: the standard error falls with their root, so that more of them tell little."""

    steps_for_error: int = 6
    """Steps from which a standard error is believed: one of fewer steps is itself a matter of chance."""

    certain_errors: float = 2.0
    """Standard errors of a difference by which a plan is behind: chance alone makes one of twenty so large."""

    equal_part: float = 0.01
    """The part of a step by which the choice may be wrong: less is not worth another turn."""


THRESHOLDS: Final = TuneThresholds()
"""Those that are used."""
