"""What a simulated step was: the clocks of the devices, and when collectives started and ended.

:mod:`hetspmd.cost.simulator` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from hetspmd.cost.contention import Beside
from hetspmd.cost.model import Array

START: Final = 0
"""A collective is issued."""
WAIT: Final = 1
"""Every device waits for a collective."""
WAIT_FIRST: Final = 2
"""Rank 0 waits for a collective."""
BOUNDARY: Final = 3
"""Forward ends."""

LATE: Final = 0.5
"""The part of a collective's predicted seconds by which it may end later. On an emulated link buffers of
collectives stayed so long that a rank held 2.4 % more at its peak than was predicted without it."""


@dataclass(frozen=True)
class SimulatedRun:
    """One pass over the events: ``alone[i, j]`` seconds of computation i on active device j; ``clocks[e]``, the
    devices' clocks right before event e (packed, where it starts a collective); the collectives' starts and ends;
    the clocks at the end of forward and of the step; which collectives are none at these shares; each device's
    seconds of issuing and copying, in all and right behind event e (``issued[e]``); the first computation of each
    group that no event divides."""

    alone: Array
    clocks: list[Array]
    starts: list[float]
    ends: list[float]
    forward: Array
    final: Array
    dropped: tuple[bool, ...]
    issuing: Array
    issued: dict[int, Array]
    groups: npt.NDArray[np.int64]
    beside: Beside | None

    @cached_property
    def seconds(self) -> Array:
        """Those of each computation on each device, also beside collectives that slow it down."""
        return self.alone if self.beside is None else self.beside.stretched(self.alone, self.groups)

    def ended(self, collective: int) -> float:
        """The second of the step at which a collective has ended for certain, even if its link is slower than the
        profile says by :data:`LATE`. Its buffers count until then, since what fits must not depend on a link."""
        return self.ends[collective] + LATE * (self.ends[collective] - self.starts[collective])


def waited(what: int, clock: Array, end: float) -> Array:
    """The devices' clocks behind a wait for what ends at ``end``."""
    if what == WAIT:
        clocks: Array = np.maximum(clock, end)
        return clocks
    clocks = clock.copy()
    clocks[0] = max(clocks[0], end)
    return clocks
