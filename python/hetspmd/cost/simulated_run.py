"""What a simulated step was: the clocks of the devices, and when collectives started and ended.

:mod:`hetspmd.cost.simulator` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetspmd.cost.model import Array

LATE: Final = 0.5
"""The part of a collective's predicted seconds by which it may end later. On an emulated link buffers of
collectives stayed so long that a rank held 2.4 % more at its peak than was predicted without it."""


@dataclass(frozen=True)
class SimulatedRun:
    """One pass over the events: ``seconds[i, j]`` of computation i on active device j; ``clocks[e]``, the
    devices' clocks right before event e (packed, where it starts a collective); the collectives' starts and ends;
    the clocks at the end of forward and of the step; which collectives are none at these shares; each device's
    seconds of issuing and copying, in all and right behind event e (``issued[e]``)."""

    seconds: Array
    clocks: list[Array]
    starts: list[float]
    ends: list[float]
    forward: Array
    final: Array
    dropped: tuple[bool, ...]
    issuing: Array
    issued: dict[int, Array]

    def ended(self, collective: int) -> float:
        """The second of the step at which a collective has ended for certain, even if its link is slower than the
        profile says by :data:`LATE`. Its buffers count until then, since what fits must not depend on a link."""
        return self.ends[collective] + LATE * (self.ends[collective] - self.starts[collective])
