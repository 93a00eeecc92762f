"""What computing and a collective on its way take from each other, in the simulation of a step.

A device that computes while a collective is on its way computes more slowly (a CPU's threads carry messages, NCCL
holds multiprocessors of a GPU), and the collective takes longer. A cluster says by how many times, per device and
kind of collective (:meth:`hetspmd.cluster.devices.Device.slowdowns`).

A computation that needs w seconds alone has done (e - b) / s of them between b and e, where a collective that slows
computing down by s is on its way. A collective takes

    seconds (1 + max_j (k_j - 1) o_j)

where k_j is its slowdown while device j computes, and o_j the part of its time in which device j does: a ring waits
for the slowest of its ranks. The parts are those of the pass of the simulation before (:data:`PASSES`), the first
with k = 1. A longer collective has less of its time beside computing, so that passes overshoot in turns; from the
third on a pass takes the mean of what it finds and of the pass before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from hetspmd.cluster.devices import Device
from hetspmd.cost.model import Array

PASSES: Final = 3
"""Passes of the simulation where collectives have slowdowns: the parts of their time in which devices compute
change little after that."""


@dataclass(frozen=True)
class Contention:
    """While collective c is on its way, device j computes ``computing[c, j]`` times as long, and while the device
    computes, the collective takes ``carrying[c, j]`` times as long."""

    computing: Array
    carrying: Array

    @classmethod
    def of(cls, devices: Sequence[Device], kinds: Sequence[str | None]) -> Contention | None:
        """That of collectives of these kinds (None: one that has no slowdown); None if nothing slows anything."""
        if not any(d.computing_slowdown or d.collective_slowdown for d in devices):
            return None
        none = np.ones((len(devices), 2))
        by_kind = {
            kind: np.array([d.slowdowns(kind) for d in devices]) for kind in set(kinds) if kind is not None
        }
        both = np.array([none if kind is None else by_kind[kind] for kind in kinds]).reshape(
            -1, len(devices), 2
        )
        return cls(both[:, :, 0], both[:, :, 1]) if (both != 1.0).any() else None

    @property
    def passes(self) -> int:
        """How often a step is simulated."""
        return PASSES if (self.carrying != 1.0).any() else 1


@dataclass
class Beside:
    """What one pass of a simulation has computed beside collectives.

    longer  by collective, how many times as long it takes as alone in this pass
    seconds [c, j] seconds in which device j has computed while collective c was on its way
    number  of the pass, from 0
    factors by group of computations, how many times as long each device took for it as alone
    """

    contention: Contention
    longer: Array
    seconds: Array
    number: int = 0
    factors: dict[int, Array] = field(default_factory=dict)
    _on_the_way: list[tuple[float, float, int]] = field(default_factory=list)

    @classmethod
    def first(cls, contention: Contention) -> Beside:
        """For the first pass."""
        shape = contention.computing.shape
        return cls(contention, np.ones(shape[0]), np.zeros(shape))

    def then(self, starts: Sequence[float], ends: Sequence[float]) -> Beside:
        """For the pass after this one, in which the collectives had these starts and ends."""
        spans = np.array(ends) - np.array(starts)
        parts = np.divide(
            self.seconds, spans[:, None], out=np.zeros_like(self.seconds), where=spans[:, None] > 0
        )
        longer: Array = 1.0 + ((self.contention.carrying - 1.0) * parts).max(axis=1)
        if self.number:
            longer = (longer + self.longer) / 2
        return Beside(self.contention, longer, np.zeros_like(self.seconds), self.number + 1)

    def begun(self, collective: int, start: float, end: float) -> None:
        """A collective is on its way from start to end: the next one, for one begins where the last has ended."""
        if end > start:
            self._on_the_way.append((start, end, collective))

    def computed(self, clock: Array, seconds: Array, group: int) -> Array:
        """The clocks behind computations that need these seconds of each device alone."""
        earliest = float(clock.min())
        self._on_the_way = [span for span in self._on_the_way if span[1] > earliest]
        if not self._on_the_way:
            clocks: Array = clock + seconds
            return clocks
        now, rest = clock, seconds
        for start, end, collective in self._on_the_way:
            alone = np.minimum(np.maximum(start - now, 0.0), rest)
            now, rest = now + alone, rest - alone
            slower = self.contention.computing[collective]
            both = np.minimum(np.maximum(end - now, 0.0), rest * slower)
            self.seconds[collective] += both
            now, rest = now + both, np.maximum(rest - both / slower, 0.0)
            if not rest.any():
                break
        now = now + rest
        self.factors[group] = np.divide(now - clock, seconds, out=np.ones_like(seconds), where=seconds > 0)
        return now

    def stretched(self, seconds: Array, groups: npt.NDArray[np.int64]) -> Array:
        """Seconds of each computation on each device as it was; ``groups`` has where each group begins."""
        if not self.factors:
            return seconds
        sizes = np.diff([*groups.tolist(), len(seconds)])
        none: Array = np.ones(seconds.shape[1])
        factors = np.array([self.factors.get(group, none) for group in range(len(groups))])
        stretched: Array = seconds * np.repeat(factors, sizes, axis=0)
        return stretched
